"""Hidden states of encoders equal those of transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.bare_model import BareModel, step_metadata, tensor
from support.pooling_models import hidden_states
from support.ranks import run_ranks
from support.small_encoders import ENCODERS, MAX_POSITIONS, random_prompts, write_encoder
from support.tiny_llama import edit_json

from tpengine.checkpoint import model_files
from tpengine.checkpoint.model_files import read_hf_config
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError

LENGTHS = (1, 2, 17, 40, MAX_POSITIONS)
"""The first prompt is a row of one token; the last takes the last position."""
ERROR = 2e-4
CLEAR = 0.05
"""Least effect of what a test looks at, on the largest element."""
PROMPTS = random_prompts(LENGTHS)
TYPES = [[int(i > n // 3) for i in range(n)] for n in LENGTHS]


class Whole:
    """A model that computes whole prompts, all in one step. Its layers share one layer's cache."""

    def __init__(self, folder: Path, parallel: ParallelState | None = None, **args: Any) -> None:
        self._bare = BareModel(folder, parallel, num_sequences=len(LENGTHS), **args)

    def states(self, types: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
        """Hidden states of the tokens of each prompt."""
        metadata = step_metadata(dict(enumerate(map(range, LENGTHS))), LENGTHS.count(1))
        if types is not None:
            metadata.token_types = tensor([*chain(*types)])
        caches = self._bare.kv_caches[:1] * len(self._bare.kv_caches)
        with torch.inference_mode():
            states = self._bare.model.forward(tensor([*chain(*PROMPTS)]), caches, metadata)
        return list(states.split(LENGTHS))


def assert_equal(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=ERROR, rtol=ERROR)


def distance(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_hidden_states(name: str, tp_size: int, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name)
    expected = [hidden_states(model, prompt) for prompt in PROMPTS]
    answers, _ = run_ranks(tp_size, lambda parallel: Whole(tmp_path, parallel).states())
    assert_equal(answers[0], expected)
    for other in answers[1:]:
        assert distance(other, answers[0]) == 0
    if name.startswith("bert"):
        typed = [hidden_states(model, *pair) for pair in zip(PROMPTS, TYPES, strict=True)]
        assert_equal(Whole(tmp_path).states(TYPES), typed)


@pytest.mark.parametrize("name", ENCODERS)
def test_oracle_could_tell(name: str, tmp_path: Path) -> None:
    """A wrong model cannot pass: the oracle's states depend on later tokens, on positions, on token
    types and on each token at the border of a window."""
    model = write_encoder(tmp_path / "model", name)
    expected = [hidden_states(model, prompt) for prompt in PROMPTS]
    later = [[*prompt[:-1], 6 + (prompt[-1] - 5) % 313] for prompt in PROMPTS[1:]]
    changed = [hidden_states(model, prompt)[0] for prompt in later]
    assert distance(changed, [states[0] for states in expected[1:]]) > CLEAR
    same = hidden_states(model, [7] * 17)
    if not any(word in name for word in ("modernbert", "gemma")):  # rotary positions are relative
        assert distance(same[1:], same[:-1]) > CLEAR
    if name.startswith("bert"):
        typed = [hidden_states(model, *pair) for pair in zip(PROMPTS, TYPES, strict=True)]
        assert distance(typed, expected) > CLEAR
    for field in ("local_attention", "sliding_window"):
        if field in ENCODERS[name]:
            other = write_encoder(tmp_path / field, name, **{field: ENCODERS[name][field] + 2})
            moved = [hidden_states(other, prompt) for prompt in PROMPTS]
            assert distance(moved, expected) > CLEAR


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3_text"])
@pytest.mark.parametrize(("form", "loss"), [("int8", 0.15), ("int4", 0.7)])
def test_quantized(name: str, form: str, loss: float, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name)
    expected = torch.cat([hidden_states(model, prompt) for prompt in PROMPTS])
    actual = torch.cat(Whole(tmp_path, quantization=form).states())
    error = float((actual - expected).norm() / expected.norm())
    assert loss / 20 < error < loss


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_checkpoints_of_pretraining(name: str, tmp_path: Path) -> None:
    """Models with a head that predicts tokens, and names and buffers of early files."""
    model = write_encoder(tmp_path, name, transformers.AutoModelForMaskedLM)
    expected = [hidden_states(model.base_model, prompt) for prompt in PROMPTS]
    assert_equal(Whole(tmp_path).states(), expected)
    tensors = load_file(tmp_path / "model.safetensors")
    names = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
    old = {key.replace(*names[0]).replace(*names[1]): x for key, x in tensors.items()}
    if name != "modernbert":
        old[f"{name}.embeddings.position_ids"] = torch.arange(8)[None]
        old[f"{name}.pooler.dense.weight"] = torch.zeros(64, 64)
        old[f"{name}.pooler.dense.bias"] = torch.zeros(64)
    torch.save(old, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_equal(Whole(tmp_path).states(), expected)


def test_modernbert_in_fields_of_transformers_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_encoder(tmp_path, "modernbert")
    old = read_hf_config(str(tmp_path), trust_remote_code=False)
    for field, kind in (("global", "full"), ("local", "sliding")):
        theta = old["rope_parameters"][f"{kind}_attention"]["rope_theta"]
        old[f"{field}_rope_theta"] = theta
    old["global_attn_every_n_layers"] = 2
    del old["rope_parameters"], old["layer_types"]
    monkeypatch.setattr(model_files, "read_hf_config", lambda *args: old)
    assert_equal(Whole(tmp_path).states(), [hidden_states(model, prompt) for prompt in PROMPTS])


def test_positions_after_padding(tmp_path: Path) -> None:
    write_encoder(tmp_path, "xlm-roberta")
    args = EngineArgs(str(tmp_path), device="cpu")
    assert args.create_engine_config("cpu").model.max_model_len == MAX_POSITIONS
    with pytest.raises(ConfigError, match=f"the {MAX_POSITIONS} positions"):
        replace(args, max_model_len=MAX_POSITIONS + 1).create_engine_config("cpu")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("roberta", "pad_token_id", None),
        ("modernbert", "local_attention", 0),
    ],
)
def test_refused(name: str, field: str, value: object, tmp_path: Path) -> None:
    write_encoder(tmp_path, name)
    edit_json(tmp_path / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(ConfigError, match=field):
        Whole(tmp_path)
