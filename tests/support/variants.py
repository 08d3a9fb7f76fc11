"""Small random models of every family, one for each feature that a configuration can enable.

Weights are large, norms are not one and biases are not zero, so that every part matters.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from support.tables import read_table
from support.tiny_llama import INITIALIZER_RANGE, edit_json, random_model, spell_old

_TABLES = read_table("variants")
"""`common` fields of `config.json`; `shapes` by model type, of which other types have Llama's; of
the `variants` what sets them apart: fields of `config.json`, and of `Variant`."""
_COMMON, _SHAPES = _TABLES["common"], _TABLES["shapes"]
VOCAB_SIZE: int = _COMMON["vocab_size"]
"""Not divisible by 2, 3 or 4."""
MAX_POSITIONS: int = _SHAPES["llama"]["max_position_embeddings"]
WINDOW: int = _SHAPES["gemma2"]["sliding_window"]


@dataclass(frozen=True)
class Variant:
    """One model.

    Attributes:
        config: fields of its configuration in addition to the common ones.
        ablation: fields of `config.json` without which the oracle must answer otherwise: proof
            that the variant's point acts; empty where it is no field that can be taken away.
        old_spelling: writes the rope fields as transformers 4 did, the kind under this key.
        bias_std: small where larger biases would make the logits independent of the tokens.
        embedding_scale: small where larger embeddings, which the model multiplies, would outweigh
            all layers.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    ablation: dict[str, Any] = field(default_factory=dict)
    old_spelling: str | None = None
    bias_std: float = INITIALIZER_RANGE
    embedding_scale: float = 1.0

    def write(self, folder: Path) -> None:
        """Builds the model and writes its folder; no tokenizer."""
        config = transformers.AutoConfig.for_model(self.model_type, **{**_COMMON, **self.config})
        make = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.float32)
        # A head that is not tied: larger differences of logits make fewer near-ties.
        scales = {"model.embed_tokens.weight": self.embedding_scale, "lm_head.weight": 3.0}
        model = random_model(make, bias_std=self.bias_std, scales=scales)
        model.save_pretrained(folder)
        if (key := self.old_spelling) is not None:
            edit_json(folder / "config.json", lambda config: spell_old(config, key))

    def write_ablated(self, folder: Path, target: Path) -> None:
        """Writes the same weights with the fields of `ablation` changed."""
        shutil.copytree(folder, target)
        edit_json(target / "config.json", lambda config: config.update(self.ablation))


def _variants(table: str) -> list[Variant]:
    """Those of a table; a name begins with its model type."""
    variants = []
    for name, fields in _TABLES[table].items():
        model_type = name.partition("-")[0]
        config = {**_SHAPES.get(model_type, _SHAPES["llama"]), **fields}
        own = {key: config.pop(key) for key in _OWN_FIELDS & config.keys()}
        variants.append(Variant(name, model_type, config, **own))
    return variants


_OWN_FIELDS = {"ablation", "old_spelling", "bias_std", "embedding_scale"}
VARIANTS = _variants("variants")
"""Of `phi3-longrope-long` the original length is 1: transformers takes the short factors up to it,
and at position 0 no factor changes anything."""
PADDED = _variants("padded")
"""Heads whose size is no multiple of 16; the tests of all families do not run them."""
