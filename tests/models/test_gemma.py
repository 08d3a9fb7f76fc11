"""Gemma: rotary fields as transformers 4 writes them, and norm weights in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from support.subjects import BY_NAME, LONGEST, Subjects

from tpengine import EngineArgs
from tpengine.checkpoint.loader import load_model
from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights
from tpengine.models.gemma import Gemma3ForCausalLM, GemmaForCausalLM
from tpengine.models.llama import Blueprint

NAME = "gemma3_text-ropes"


def _parts(subjects: Subjects, dtype: str, name: str = NAME) -> tuple[ModelConfig, Weights]:
    args = EngineArgs(str(subjects.folder(BY_NAME[name])), dtype=dtype, max_model_len=LONGEST)
    weights = Weights(getattr(torch, dtype), torch.device("cpu"), ParallelState(0, 1))
    return args.create_engine_config("cpu").model, weights


def test_rotary_fields_of_transformers_4(subjects: Subjects) -> None:
    config, weights = _parts(subjects, "float32")
    old: dict[str, Any] = dict(config.hf_config)
    rope = old.pop("rope_parameters")
    full = dict(rope["full_attention"])
    old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    old["rope_theta"] = full.pop("rope_theta")
    old["rope_scaling"] = full

    def tables(config: ModelConfig) -> list[torch.Tensor]:
        blueprint = Blueprint(config, weights, Gemma3ForCausalLM.traits(config))
        return Gemma3ForCausalLM.rotary_tables(blueprint)

    new, old_tables = tables(config), tables(replace(config, hf_config=old))
    assert not torch.equal(new[0], new[1])
    assert all(torch.equal(a, b) for a, b in zip(new, old_tables, strict=True))
    assert weights.num_bytes == 2 * (new[0].nbytes + new[1].nbytes), "layers share the tables"


def test_the_old_name_of_the_activation(subjects: Subjects) -> None:
    """Of Gemma 1. transformers replaces it too, if it is the one that reads config.json."""
    config, _ = _parts(subjects, "float32", "gemma-biases")
    fields = {**config.hf_config, "hidden_act": "gelu"}
    traits = GemmaForCausalLM.traits(replace(config, hf_config=fields))
    assert traits.activation == "gelu_pytorch_tanh"


def test_norm_weights_lose_no_digit(subjects: Subjects) -> None:
    """1 + weight in bfloat16 would round most weights."""
    config, weights = _parts(subjects, "bfloat16")
    model = load_model(config, weights)
    assert isinstance(model, Gemma3ForCausalLM)
    tensors = load_file(subjects.folder(BY_NAME[NAME]) / "model.safetensors")
    expected = 1 + tensors["model.norm.weight"].bfloat16().float()
    assert torch.equal(model.norm.weight, expected)
    assert not torch.equal(expected.bfloat16().float(), expected)
