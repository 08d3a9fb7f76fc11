"""Small random models of every family, one for each feature that a configuration can enable.

Weights are large, norms are not one and biases are not zero, so that every part matters.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny_llama import INITIALIZER_RANGE, LINEAR_ROPE, LLAMA3_ROPE, edit_json, spell_old

WINDOW = 24
VOCAB_SIZE = 319
"""Not divisible by 2, 3 or 4."""
MAX_POSITIONS = 448
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_OPT_SHAPE = {
    "hidden_size": 128,
    "ffn_dim": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
_BLOOM_SHAPE = {"n_layer": 2, "tie_word_embeddings": False}
_GEMMA_SHAPE = {
    **_LLAMA_SHAPE,
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 50,
}
_NEOX_SHAPE = {**_OPT_SHAPE, "intermediate_size": 154}
_TIED_BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
_GPT2_SHAPE = {"n_layer": 2, "n_positions": MAX_POSITIONS, "tie_word_embeddings": True}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.0 + 0.4 * i for i in range(12)],
}
"""For heads of 32 elements of which three quarters are rotated, as in Phi-4-mini."""
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_ALL_FULL = ["full_attention"] * 3


def _rope(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": 10000.0}}


_HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
_UNSCALED = _rope({"rope_type": "default"})


@dataclass(frozen=True)
class Variant:
    """One model.

    Attributes:
        config: fields of its configuration in addition to the common ones.
        ablation: fields of `config.json` without which the oracle must answer otherwise: proof
            that the variant's point acts; empty where it is no field that can be taken away.
        old_spelling: writes the rope fields as transformers 4 did, the kind under this key.
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
        config = AutoConfig.for_model(self.model_type, **{**_COMMON, **self.config})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith(".bias"):
                        parameter.normal_(0.0, self.bias_std)
                    elif "norm" in name or "ln_" in name:
                        parameter.uniform_(0.5, 1.5)
                    elif name == "model.embed_tokens.weight":
                        parameter.mul_(self.embedding_scale)
                    elif name == "lm_head.weight" and not config.tie_word_embeddings:
                        parameter.mul_(3.0)  # larger differences of logits: fewer near-ties
        model.save_pretrained(folder)
        if (key := self.old_spelling) is not None:
            edit_json(folder / "config.json", lambda config: spell_old(config, key))

    def write_ablated(self, folder: Path, target: Path) -> None:
        """Writes the same weights with the fields of `ablation` changed."""
        shutil.copytree(folder, target)
        edit_json(target / "config.json", lambda config: config.update(self.ablation))


def _variant(
    name: str,
    shape: dict[str, Any],
    ablation: dict[str, Any] | None = None,
    old_spelling: str | None = None,
    bias_std: float = INITIALIZER_RANGE,
    embedding_scale: float = 1.0,
    **fields: Any,
) -> Variant:
    model_type, config = name.partition("-")[0], {**shape, **fields}
    stds = bias_std, embedding_scale
    return Variant(name, model_type, config, ablation or {}, old_spelling, *stds)


def _llama(name: str, ablation: dict[str, Any] | None = None, **fields: Any) -> Variant:
    return _variant(name, _LLAMA_SHAPE, ablation, **fields)


def _gemma(name: str, ablation: dict[str, Any], **fields: Any) -> Variant:
    # Larger embeddings, which the model multiplies, would outweigh all layers.
    return _variant(name, _GEMMA_SHAPE, ablation, embedding_scale=0.2, **fields)


def _local_rope(theta: float) -> dict[str, Any]:
    local, scaled = {"rope_type": "default", "rope_theta": theta}, LINEAR_ROPE
    full = {**scaled, "rope_theta": 1e6}
    return {"rope_parameters": {"sliding_attention": local, "full_attention": full}}


def _opt(name: str, ablation: dict[str, Any] | None = None, **fields: Any) -> Variant:
    return _variant(f"opt-{name}", _OPT_SHAPE, ablation, **fields)


def _bloom(name: str, hidden_size: int, heads: int, **fields: Any) -> Variant:
    return _variant(f"bloom-{name}", _BLOOM_SHAPE, hidden_size=hidden_size, n_head=heads, **fields)


def _phi(name: str, ablation: dict[str, Any] | None = None, **fields: Any) -> Variant:
    return _variant(f"phi3-{name}", _LLAMA_SHAPE, ablation, **fields)


def _gpt2(
    name: str, size: int, heads: int, ablation: dict[str, Any] | None = None, **fields: Any
) -> Variant:
    return _variant(f"gpt2-{name}", _GPT2_SHAPE, ablation, n_embd=size, n_head=heads, **fields)


VARIANTS = [
    _llama("llama-biases", attention_bias=True, mlp_bias=True),
    _llama(
        "llama-tied-6-to-1",
        tie_word_embeddings=True,
        hidden_size=96,
        head_dim=80,
        num_attention_heads=6,
        num_key_value_heads=1,
    ),
    _llama(
        "llama-7-to-1", hidden_size=112, head_dim=112, num_attention_heads=7, num_key_value_heads=1
    ),
    _llama("llama-linear", _UNSCALED, head_dim=96, **_rope(LINEAR_ROPE)),
    _llama("llama-dynamic", **_rope({"rope_type": "dynamic", "factor": 2.0})),
    _llama(
        "llama-llama3-old", {"rope_scaling": None}, old_spelling="rope_type", **_rope(LLAMA3_ROPE)
    ),
    _llama("llama-yarn-old", {"rope_scaling": None}, old_spelling="type", **_rope(_YARN)),
    _llama("mistral-window", {"sliding_window": None}, sliding_window=WINDOW, head_dim=48),
    _llama("mistral-no-window", sliding_window=None),
    _llama(
        "ministral-layers",
        {"layer_types": _ALL_FULL},
        num_hidden_layers=3,
        layer_types=_ALTERNATING,
        sliding_window=WINDOW,
        head_dim=64,
    ),
    _llama("qwen2-tied", tie_word_embeddings=True, num_attention_heads=8),
    _llama(
        "qwen2-upper-windows",
        {"layer_types": _ALL_FULL},
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    _llama("qwen2-yarn", _UNSCALED, **_rope({**_YARN, "attention_factor": 1.3})),
    _llama("qwen3-head-dim", hidden_size=96, head_dim=64),
    _llama(
        "qwen3-layers-biases",
        {"layer_types": _ALL_FULL},
        num_hidden_layers=3,
        layer_types=_ALTERNATING,
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
        head_dim=32,
    ),
    _llama("gemma-biases", hidden_act="gelu", attention_bias=True, head_dim=48),
    _gemma(
        "gemma2-caps",
        {"attn_logit_softcapping": None},
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
        tie_word_embeddings=True,
        hidden_size=112,
        head_dim=80,
    ),
    _gemma(
        "gemma2-layers-biases",
        {"layer_types": _ALL_FULL},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        head_dim=32,
        num_attention_heads=6,
        hidden_size=96,
        num_key_value_heads=1,
        final_logit_softcapping=None,
    ),
    _gemma("gemma3_text-ropes", _local_rope(1e6), layer_types=_ALTERNATING, **_local_rope(50.0)),
    _gemma(
        "gemma3_text-256",
        {"query_pre_attn_scalar": 256},
        layer_types=_ALTERNATING,
        tie_word_embeddings=True,
        head_dim=256,
        num_key_value_heads=1,
        final_logit_softcapping=4.0,
    ),
    _phi("window", {"sliding_window": None}, sliding_window=WINDOW, intermediate_size=154),
    _phi("partial", {"rope_parameters": {}}, num_key_value_heads=4, **_rope(_HALF)),
    _phi(
        "longrope-short-old",
        old_spelling="type",
        original_max_position_embeddings=MAX_POSITIONS,
        **_rope({**_LONGROPE, "partial_rotary_factor": 0.75, "factor": 4.0}),
    ),
    # transformers takes the short factors up to the original length, and at position 0 no factor
    # changes anything.
    _phi(
        "longrope-long",
        tie_word_embeddings=True,
        original_max_position_embeddings=1,
        **_rope({**_LONGROPE, "partial_rotary_factor": 0.75, "attention_factor": 1.3}),
    ),
    _gpt2("8-heads", 128, 8, n_inner=154, activation_function="relu"),
    _gpt2(
        "layer-scale",
        192,
        4,
        {"scale_attn_by_inverse_layer_idx": False},
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    _gpt2(
        "untied-unscaled",
        96,
        6,
        {"scale_attn_weights": True},
        scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
    _llama(
        "mixtral-odd",
        {"num_experts_per_tok": 2},
        num_local_experts=5,
        num_experts_per_tok=3,
        intermediate_size=92,
    ),
    _llama("mixtral-window", {"sliding_window": None}, sliding_window=WINDOW, num_local_experts=4),
    _llama(
        "qwen2_moe-shared",
        {"norm_topk_prob": True},
        num_experts=6,
        moe_intermediate_size=52,
        shared_expert_intermediate_size=106,
        norm_topk_prob=False,
    ),
    _llama(
        "qwen2_moe-layers",
        {"norm_topk_prob": False},
        num_hidden_layers=3,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    _llama(
        "qwen3_moe-sparse-step",
        {"num_experts_per_tok": 2},
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        head_dim=48,
    ),
    _llama(
        "qwen3_moe-window",
        {"sliding_window": None},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
        head_dim=32,
    ),
    _llama(
        "granite-odd",
        {"residual_multiplier": 1.0},
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.25,
        logits_scaling=1.7,
        intermediate_size=154,
    ),
    _llama(
        "granite-tied-biases",
        {"attention_multiplier": 0.6},
        attention_multiplier=0.1,
        num_key_value_heads=1,
        **_TIED_BIASES,
    ),
    _llama("olmo2-odd", intermediate_size=154),
    _llama(
        "olmo2-biases-6-to-1",
        bias_std=0.05,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=1,
        attention_bias=True,
    ),
    _llama("smollm3-odd", {"no_rope_layers": [1, 1]}, no_rope_layers=[1, 0], intermediate_size=154),
    _llama(
        "smollm3-window-biases",
        {"layer_types": _ALL_FULL},
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 0, 1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        **_TIED_BIASES,
    ),
    _variant("gpt_neox-odd", _NEOX_SHAPE, {"use_parallel_residual": False}),
    _variant(
        "gpt_neox-sequential-half",
        {**_NEOX_SHAPE, "intermediate_size": 192, "hidden_act": "gelu_new"},
        {"rope_parameters": {}},
        use_parallel_residual=False,
        attention_bias=False,
        **_rope(_HALF),
    ),
    _opt("before", {"do_layer_norm_before": False}),
    # Larger biases would make the logits independent of the tokens.
    _opt("after-projected", word_embed_proj_dim=80, do_layer_norm_before=False, bias_std=0.05),
    _opt("no-final-norm", {"_remove_final_layer_norm": False}, _remove_final_layer_norm=True),
    _opt(
        "no-bias-gelu",
        {"activation_function": "relu"},
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
    ),
    _bloom("8-heads", 128, 8),
    _bloom("12-heads", 192, 12),
    _bloom(
        "residual-after-norm", 96, 6, bias_std=0.05, apply_residual_connection_post_layernorm=True
    ),
]
