"""Angles of rotary embeddings against transformers' formulas."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from support.messages import refused
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tpengine.errors import ConfigError
from tpengine.layers.rotary import build_cos_sin_cache

HEAD_DIM = 96
LONGEST = 256
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 64,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "llama3", "factor": 32.0, **LLAMA3, "high_freq_factor": 2.0},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 2.0},
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 4, "beta_slow": 4, "truncate": False},
    {**YARN, "original_max_position_embeddings": 8},
    LONGROPE,
    {**LONGROPE, "factor": 16.0, "original_max_position_embeddings": LONGEST},
    {**LONGROPE, "attention_factor": 0.7},
]


def new_style(scaling: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": theta}, "max_position_embeddings": LONGEST}


def build(config: dict[str, Any]) -> torch.Tensor:
    return build_cos_sin_cache(config, HEAD_DIM, LONGEST, torch.device("cpu"))


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_angles_equal_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    oracle = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    init = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    inverse, magnitude = init(oracle, torch.device("cpu"), seq_len=LONGEST)
    angles = torch.outer(torch.arange(LONGEST).float(), inverse)
    expected = torch.cat([angles.cos(), angles.sin()], dim=1) * magnitude
    torch.testing.assert_close(build(new_style(scaling, theta)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("original", "factors"), [(LONGEST - 1, "long"), (LONGEST, "short")])
def test_longrope_says_which_factors_it_takes(
    original: int, factors: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tpengine"), "propagate", True)
    scaling = {**LONGROPE, "original_max_position_embeddings": original}
    with caplog.at_level("INFO", "tpengine.layers.rotary"):
        actual = build(new_style(scaling, 1e4))
    assert torch.equal(actual, build(new_style({**scaling, "rope_type": "su"}, 1e4)))
    assert f"longrope: {factors}_factor " in caplog.text
    assert f"max_model_len = {LONGEST} is " in caplog.text


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_old_spelling_means_the_same(scaling: dict[str, Any], key: str) -> None:
    spelled = {key if name == "rope_type" else name: value for name, value in scaling.items()}
    partial = spelled.pop("partial_rotary_factor", None)
    old = {
        "rope_scaling": spelled,
        "rope_theta": 5e5,
        "partial_rotary_factor": partial,
        "max_position_embeddings": LONGEST,
    }
    assert torch.equal(build(old), build(new_style(scaling, 5e5)))


def test_without_scaling() -> None:
    bare = {"rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": LONGEST}
    plain = build(bare)
    assert torch.equal(plain, build(new_style({"rope_type": "default"}, 5e5)))
    assert not torch.equal(plain, build({"max_position_embeddings": LONGEST}))


def test_original_length_is_the_longest_unless_named() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    named = {**scaling, "original_max_position_embeddings": LONGEST}
    assert torch.equal(build(new_style(scaling, 1e4)), build(new_style(named, 1e4)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (new_style({"rope_type": "ntk"}, 1e4), "ntk | yarn"),
        (new_style({"rope_type": ["yarn"]}, 1e4), "['yarn'] | linear"),
        (new_style({**LONGROPE, "long_factor": [1.0] * 5}, 1e4), "long_factor | 48 numbers"),
        (new_style({**LONGROPE, "long_factor": [0.0] * 48}, 1e4), "long_factor | above 0"),
        (new_style({**LONGROPE, "long_factor": [math.nan] * 48}, 1e4), "long_factor | above 0"),
        (new_style({"partial_rotary_factor": 0.0}, 1e4), "partial_rotary_factor | above 0"),
        (new_style({}, math.inf), "rope_theta | above 0 | inf"),
        (new_style({}, -1e4), "rope_theta | above 0"),
        (new_style({"partial_rotary_factor": 2.0}, 1e4), "partial_rotary_factor | at most 1"),
        (new_style({"rope_type": "linear"}, 1e4), "linear | factor | None"),
        (new_style({"rope_type": "linear", "factor": 0}, 1e4), "factor | 0"),
        (new_style({"rope_type": "default", "mrope_section": [1, 2]}, 1e4), "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {**new_style({"rope_type": "dynamic", "factor": 2.0}, 1e4),
             "max_position_embeddings": LONGEST - 1},
            f"dynamic | {LONGEST - 1} | {LONGEST} | max_model_len",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(config: dict[str, Any], words: str) -> None:
    with refused(ConfigError, words):
        build(config)
