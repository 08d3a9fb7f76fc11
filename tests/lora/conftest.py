"""One base model with eight adapters of ranks 4 to 64, which most tests share."""

from __future__ import annotations

import pytest
from support.adapters import Adapters
from support.models import ModelShop
from support.tiny_llama import TinyLlama

EIGHT = {
    "rank4": {"r": 4, "lora_alpha": 8},
    "rank8": {"r": 8, "lora_alpha": 4},
    "rank16": {"r": 16, "use_rslora": True},
    "rank32": {"r": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rank64": {"r": 64, "lora_alpha": 128},
    "patterns": {
        "rank_pattern": {r"layers\.0\.mlp\.gate_proj": 24, "k_proj": 5},
        "alpha_pattern": {"o_proj": 3, r"layers\.1\..*": 40},
    },
    "one layer": {"layers_to_transform": [1], "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "regex": {
        "target_modules": r".*\.(self_attn|mlp)\.(q|k|up)_proj",
        "exclude_modules": ["layers.0.mlp.up_proj"],
    },
}
"""Fields of `LoraConfig`, by the adapter's name."""
BASE = TinyLlama(64, 4, 2)


@pytest.fixture(scope="session")
def eight(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(models.folder(BASE), tmp_path_factory.mktemp("eight"), EIGHT)
