"""A configuration with an unsupported field is refused with an error that names field and value."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused
from support.subjects import BY_NAME, Subjects, load
from support.tiny_llama import edit_json

from tpengine.errors import ConfigError, ModelLoadError


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("llama-biases", "hidden_act", "relu6", "hidden_act | relu6 | silu"),
        ("llama-biases", "sliding_window", 24, "sliding_window | 24"),
        ("llama-biases", "quantization_config", {"quant_method": "exl2"}, "exl2 | gptq"),
        ("llama-biases", "quantization_config", 4, "quantization_config = 4 in config.json"),
        ("llama-biases", "clip_qkv", 8.0, "clip_qkv | 8.0"),
        ("llama-biases", "final_logit_softcapping", 30.0, "final_logit_softcapping | 30.0"),
        ("llama-biases", "partial_rotary_factor", 0.5, "partial_rotary_factor | 0.5"),
        ("llama-biases", "num_local_experts", 8, "num_local_experts | 8"),
        ("llama-biases", "head_dim", 272, "head_dim | 272 | up to 256"),
        ("llama-biases", "head_dim", 25, "head_dim = 25 is odd"),
        (
            "llama-biases",
            "architectures",
            ["RwkvForCausalLM"],
            "RwkvForCausalLM | LlamaForCausalLM",
        ),
        ("llama-biases", "rope_parameters", {"rope_type": "spiral"}, "spiral"),
        ("mistral-window", "attention_bias", True, "attention_bias | True"),
        ("mistral-window", "sliding_window", 0, "sliding_window | 0"),
        ("mistral-window", "layer_types", ["full_attention"] * 2, "layer_types | Ministral"),
        ("ministral-layers", "layer_types", ["chunked_attention"] * 3, "chunked_attention"),
        ("ministral-layers", "sliding_window", None, "sliding_window | None"),
        ("qwen2-tied", "layer_types", ["sliding_attention"] * 2, "sliding_window | None"),
        ("qwen2-tied", "qkv_bias", False, "qkv_bias | False"),
        ("qwen2-tied", "use_mrope", True, "use_mrope | True"),
        ("qwen2-tied", "dual_chunk_attention_config", {"chunk_size": 8}, "dual_chunk"),
        ("qwen3-head-dim", "mlp_bias", True, "mlp_bias | True"),
        ("gemma-biases", "use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("gemma-biases", "sliding_window", 24, "sliding_window | 24"),
        ("gemma2-caps", "attn_logit_softcapping", 0.0, "attn_logit_softcapping | 0.0"),
        ("gemma3_text-256", "attn_logit_softcapping", 9.0, "attn_logit_softcapping | 9.0"),
        ("gemma3_text-256", "layer_types", ["chunked_attention"] * 3, "chunked_attention"),
        ("gemma2-caps", "query_pre_attn_scalar", 0, "query_pre_attn_scalar | 0"),
        ("mixtral-odd", "num_experts_per_tok", 0, "num_experts_per_tok = 0"),
        ("mixtral-odd", "num_local_experts", 0, "0 experts"),
        ("qwen3_moe-window", "num_experts_per_tok", 99, "num_experts_per_tok = 99"),
        ("mixtral-odd", "hidden_act", "gelu", "hidden_act | gelu | silu"),
        ("qwen2_moe-shared", "use_mrope", True, "use_mrope | True"),
        ("qwen3_moe-window", "sliding_window", 0, "sliding_window | 0"),
        ("opt-before", "num_experts", 4, "num_experts | 4"),
        ("opt-before", "activation_function", "quick_gelu", "activation_function | quick_gelu"),
        ("opt-before", "hidden_size", 130, "hidden_size | 130 | 4 heads"),
        ("opt-before", "sliding_window", 24, "sliding_window | 24"),
        ("phi3-window", "attention_bias", True, "attention_bias | True"),
        ("phi3-partial", "rope_parameters", {"rope_type": "linear", "factor": 2.0}, "linear"),
        ("phi3-partial", "rope_parameters", {"partial_rotary_factor": 2.0}, "= 2.0 | at most 1"),
        ("granite-odd", "residual_multiplier", 0.0, "residual_multiplier | 0.0 | above 0"),
        ("olmo2-odd", "mlp_bias", True, "mlp_bias | True"),
        ("olmo2-odd", "residual_multiplier", 0.5, "residual_multiplier | 0.5"),
        ("smollm3-odd", "no_rope_layers", [1], "no_rope_layers | [1] | lists of 2"),
        ("smollm3-odd", "layer_types", ["sliding_attention"] * 2, "sliding_window | None"),
        ("gpt_neox-odd", "hidden_act", "quick_gelu", "hidden_act | quick_gelu"),
        ("gpt2-8-heads", "activation_function", "tanh", "activation_function | tanh"),
        ("gpt2-8-heads", "add_cross_attention", True, "add_cross_attention | True"),
        ("bloom-8-heads", "n_inner", 100, "n_inner | 100 | 512"),
        ("bloom-8-heads", "sliding_window", 24, "sliding_window | 24"),
    ],
)
def test_field_is_refused(
    name: str, field: str, value: Any, words: str, subjects: Subjects, tmp_path: Path
) -> None:
    folder = shutil.copytree(subjects.folder(BY_NAME[name]), tmp_path / "model")
    load(folder)  # without the change it loads
    edit_json(folder / "config.json", lambda config: config.update({field: value}))
    # transformers may refuse a value itself, while it reads the configuration
    with refused((ConfigError, ModelLoadError), words):
        load(folder)


def test_log_says_what_8_bits_omit(subjects: Subjects, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tpengine"):
        load(subjects.folder(BY_NAME["mixtral-odd"]), quantization="int8")
    assert "quantization = 'int8': experts and their routers stay in float32" in caplog.text


def test_slow_but_exact_is_refused(subjects: Subjects, tmp_path: Path) -> None:
    folder = shutil.copytree(subjects.folder(BY_NAME["bloom-8-heads"]), tmp_path / "model")
    change = {"slow_but_exact": True, "pretraining_tp": 2}
    edit_json(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(ConfigError, match="slow_but_exact"):
        load(folder)
