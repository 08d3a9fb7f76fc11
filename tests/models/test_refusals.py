"""A configuration with an unsupported field is refused with an error that names field and value."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.subjects import BY_NAME, Subjects, load
from support.tiny_llama import edit_json

from tpengine.errors import ConfigError, ModelLoadError


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("llama-biases", "hidden_act", "relu6", ["hidden_act", "relu6", "silu"]),
        ("llama-biases", "sliding_window", 24, ["sliding_window", "24"]),
        ("llama-biases", "quantization_config", {"quant_method": "gptq", "bits": 4}, ["gptq"]),
        ("llama-biases", "clip_qkv", 8.0, ["clip_qkv", "8.0"]),
        ("llama-biases", "final_logit_softcapping", 30.0, ["final_logit_softcapping", "30.0"]),
        ("llama-biases", "partial_rotary_factor", 0.5, ["partial_rotary_factor", "0.5"]),
        ("llama-biases", "num_local_experts", 8, ["num_local_experts", "8"]),
        ("llama-biases", "head_dim", 40, ["head_dim", "40", "16"]),
        (
            "llama-biases",
            "architectures",
            ["GPT2LMHeadModel"],
            ["GPT2LMHeadModel", "LlamaForCausalLM"],
        ),
        ("llama-biases", "rope_parameters", {"rope_type": "spiral"}, ["spiral"]),
        ("mistral-window", "attention_bias", True, ["attention_bias", "True"]),
        ("mistral-window", "sliding_window", 0, ["sliding_window", "0"]),
        ("mistral-window", "layer_types", ["full_attention"] * 2, ["layer_types", "Ministral"]),
        ("ministral-layers", "layer_types", ["chunked_attention"] * 3, ["chunked_attention"]),
        ("ministral-layers", "sliding_window", None, ["sliding_window", "None"]),
        ("qwen2-tied", "layer_types", ["sliding_attention"] * 2, ["sliding_window", "None"]),
        ("qwen2-tied", "qkv_bias", False, ["qkv_bias", "False"]),
        ("qwen2-tied", "use_mrope", True, ["use_mrope", "True"]),
        ("qwen2-tied", "dual_chunk_attention_config", {"chunk_size": 8}, ["dual_chunk"]),
        ("qwen3-head-dim", "mlp_bias", True, ["mlp_bias", "True"]),
        ("opt-before", "activation_function", "quick_gelu", ["activation_function", "quick_gelu"]),
        ("opt-before", "hidden_size", 130, ["hidden_size", "130", "4 heads"]),
        ("opt-before", "sliding_window", 24, ["sliding_window", "24"]),
        ("bloom-8-heads", "n_inner", 100, ["n_inner", "100", "512"]),
        ("bloom-8-heads", "sliding_window", 24, ["sliding_window", "24"]),
    ],
)
def test_field_is_refused(
    name: str, field: str, value: Any, words: list[str], subjects: Subjects, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(subjects.folder(BY_NAME[name]), folder)
    load(folder)  # without the change it loads
    edit_json(folder / "config.json", lambda config: config.update({field: value}))
    # transformers may refuse a value itself, while it reads the configuration
    with pytest.raises((ConfigError, ModelLoadError)) as error:
        load(folder)
    for word in words:
        assert word in str(error.value)


def test_slow_but_exact_is_refused(subjects: Subjects, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(subjects.folder(BY_NAME["bloom-8-heads"]), folder)
    change = {"slow_but_exact": True, "pretraining_tp": 2}
    edit_json(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(ConfigError, match="slow_but_exact"):
        load(folder)
