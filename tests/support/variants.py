"""Small random models of every family, one for each feature that a configuration can enable.

Weights are large, norms are not one and biases are not zero, so that every part matters.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

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
_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_GEMMA = {**_LLAMA, "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 50}
_OPT = {
    "hidden_size": 128,
    "ffn_dim": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
_SHAPES = {
    "bloom": {"n_layer": 2, "tie_word_embeddings": False},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": {"n_layer": 2, "n_positions": MAX_POSITIONS, "tie_word_embeddings": True},
    "gpt_neox": {**_OPT, "intermediate_size": 154},
    "opt": _OPT,
}
"""By model type; other models have `_LLAMA`."""
_TIED = {"tie_word_embeddings": True}
_TIED_BIASES = {**_TIED, "attention_bias": True, "mlp_bias": True}
_WINDOWS = {"sliding_window": WINDOW}
_NO_WINDOWS = {"sliding_window": None}
_SOME_WINDOWS = {
    **_WINDOWS,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_ALL_FULL = {"layer_types": ["full_attention"] * 3}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.0 + 0.4 * i for i in range(12)],
    "partial_rotary_factor": 0.75,
}
"""For heads of 32 elements of which three quarters are rotated, as in Phi-4-mini."""


def _rope(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": 10000.0}}


_HALF = _rope({"rope_type": "default", "partial_rotary_factor": 0.5})
_UNSCALED = _rope({"rope_type": "default"})


def _local_rope(theta: float) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": theta}
    full = {**LINEAR_ROPE, "rope_theta": 1e6}
    return {"rope_parameters": {"sliding_attention": local, "full_attention": full}}


def _heads(num_heads: int, num_kv_heads: int = 1, **sizes: int) -> dict[str, int]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, **sizes}


def _experts(number: int, chosen: int, inner: int) -> dict[str, int]:
    return {
        "num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": inner
    }  # fmt: skip


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
        config = transformers.AutoConfig.for_model(self.model_type, **{**_COMMON, **self.config})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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


def _variant(name: str, ablation: dict[str, Any] | None = None, /, **fields: Any) -> Variant:
    """A variant, whose name begins with its model type.

    Args:
        fields: those of `Variant`, and of the configuration in addition to the type's shape.
    """
    model_type = name.partition("-")[0]
    own = {key: fields.pop(key) for key in _OWN_FIELDS & fields.keys()}
    if _SHAPES.get(model_type) is _GEMMA:
        # Larger embeddings, which the model multiplies, would outweigh all layers.
        own["embedding_scale"] = 0.2
    config = {**_SHAPES.get(model_type, _LLAMA), **fields}
    return Variant(name, model_type, config, ablation or {}, **own)


_OWN_FIELDS = {"old_spelling", "bias_std"}
VARIANTS = [
    _variant("llama-biases", attention_bias=True, mlp_bias=True),
    _variant("llama-tied-6-to-1", **_TIED, **_heads(6, hidden_size=96, head_dim=80)),
    _variant("llama-7-to-1", **_heads(7, hidden_size=112, head_dim=112)),
    _variant("llama-linear", _UNSCALED, head_dim=96, **_rope(LINEAR_ROPE)),
    _variant("llama-dynamic", **_rope({"rope_type": "dynamic", "factor": 2.0})),
    _variant(
        "llama-llama3-old", {"rope_scaling": None}, old_spelling="rope_type", **_rope(LLAMA3_ROPE)
    ),
    _variant("llama-yarn-old", {"rope_scaling": None}, old_spelling="type", **_rope(_YARN)),
    _variant("mistral-window", _NO_WINDOWS, **_WINDOWS, head_dim=48),
    _variant("mistral-no-window", **_NO_WINDOWS),
    _variant("ministral-layers", _ALL_FULL, **_SOME_WINDOWS, head_dim=64),
    _variant("qwen2-tied", **_TIED, num_attention_heads=8),
    _variant(
        "qwen2-upper-windows",
        _ALL_FULL,
        **_WINDOWS,
        num_hidden_layers=3,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    _variant("qwen2-yarn", _UNSCALED, **_rope({**_YARN, "attention_factor": 1.3})),
    _variant("qwen3-head-dim", hidden_size=96, head_dim=64),
    _variant(
        "qwen3-layers-biases",
        _ALL_FULL,
        **_SOME_WINDOWS,
        use_sliding_window=True,
        attention_bias=True,
        head_dim=32,
    ),
    _variant("gemma-biases", hidden_act="gelu", attention_bias=True, head_dim=48),
    _variant(
        "gemma2-caps",
        {"attn_logit_softcapping": None},
        **_TIED,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
        hidden_size=112,
        head_dim=80,
    ),
    _variant(
        "gemma2-layers-biases",
        _ALL_FULL,
        **_heads(6, hidden_size=96, head_dim=32),
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        final_logit_softcapping=None,
    ),
    _variant("gemma3_text-ropes", _local_rope(1e6), **_SOME_WINDOWS, **_local_rope(50.0)),
    _variant(
        "gemma3_text-256",
        {"query_pre_attn_scalar": 256},
        **_SOME_WINDOWS,
        **_TIED,
        head_dim=256,
        num_key_value_heads=1,
        final_logit_softcapping=4.0,
    ),
    _variant("phi3-window", _NO_WINDOWS, **_WINDOWS, intermediate_size=154),
    _variant("phi3-partial", {"rope_parameters": {}}, num_key_value_heads=4, **_HALF),
    _variant(
        "phi3-longrope-short-old",
        old_spelling="type",
        original_max_position_embeddings=MAX_POSITIONS,
        **_rope({**_LONGROPE, "factor": 4.0}),
    ),
    # transformers takes the short factors up to the original length, and at position 0 no factor
    # changes anything.
    _variant(
        "phi3-longrope-long",
        **_TIED,
        original_max_position_embeddings=1,
        **_rope({**_LONGROPE, "attention_factor": 1.3}),
    ),
    _variant("gpt2-8-heads", n_embd=128, n_head=8, n_inner=154, activation_function="relu"),
    _variant(
        "gpt2-layer-scale",
        {"scale_attn_by_inverse_layer_idx": False},
        n_embd=192,
        n_head=4,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    _variant(
        "gpt2-untied-unscaled",
        {"scale_attn_weights": True},
        n_embd=96,
        n_head=6,
        scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
    _variant(
        "mixtral-odd",
        {"num_experts_per_tok": 2},
        num_local_experts=5,
        num_experts_per_tok=3,
        intermediate_size=92,
    ),
    _variant("mixtral-window", _NO_WINDOWS, **_WINDOWS, num_local_experts=4),
    _variant(
        "qwen2_moe-shared",
        {"norm_topk_prob": True},
        num_experts=6,
        moe_intermediate_size=52,
        shared_expert_intermediate_size=106,
        norm_topk_prob=False,
    ),
    _variant(
        "qwen2_moe-layers",
        {"norm_topk_prob": False},
        **_SOME_WINDOWS,
        **_experts(5, 3, 48),
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[1],
        use_sliding_window=True,
    ),
    _variant(
        "qwen3_moe-sparse-step",
        {"num_experts_per_tok": 2},
        **_experts(7, 3, 40),
        decoder_sparse_step=2,
        norm_topk_prob=True,
        head_dim=48,
    ),
    _variant(
        "qwen3_moe-window",
        _NO_WINDOWS,
        **_WINDOWS,
        **_experts(4, 2, 40),
        use_sliding_window=True,
        attention_bias=True,
        head_dim=32,
    ),
    _variant(
        "granite-odd",
        {"residual_multiplier": 1.0},
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.25,
        logits_scaling=1.7,
        intermediate_size=154,
    ),
    _variant(
        "granite-tied-biases",
        {"attention_multiplier": 0.6},
        **_TIED_BIASES,
        attention_multiplier=0.1,
        num_key_value_heads=1,
    ),
    _variant("olmo2-odd", intermediate_size=154),
    _variant(
        "olmo2-biases-6-to-1", **_heads(6, hidden_size=96), bias_std=0.05, attention_bias=True
    ),
    _variant(
        "smollm3-odd", {"no_rope_layers": [1, 1]}, no_rope_layers=[1, 0], intermediate_size=154
    ),
    _variant(
        "smollm3-window-biases",
        _ALL_FULL,
        **_WINDOWS,
        **_TIED_BIASES,
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 0, 1],
        use_sliding_window=True,
    ),
    _variant("gpt_neox-odd", {"use_parallel_residual": False}),
    _variant(
        "gpt_neox-sequential-half",
        {"rope_parameters": {}},
        intermediate_size=192,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        attention_bias=False,
        **_HALF,
    ),
    _variant("opt-before", {"do_layer_norm_before": False}),
    # Larger biases would make the logits independent of the tokens.
    _variant(
        "opt-after-projected", word_embed_proj_dim=80, do_layer_norm_before=False, bias_std=0.05
    ),
    _variant(
        "opt-no-final-norm", {"_remove_final_layer_norm": False}, _remove_final_layer_norm=True
    ),
    _variant(
        "opt-no-bias-gelu",
        {"activation_function": "relu"},
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
    ),
    _variant("bloom-8-heads", hidden_size=128, n_head=8),
    _variant("bloom-12-heads", hidden_size=192, n_head=12),
    _variant(
        "bloom-residual-after-norm",
        hidden_size=96,
        n_head=6,
        bias_std=0.05,
        apply_residual_connection_post_layernorm=True,
    ),
]
PADDED = [
    _variant("llama-heads-of-100", hidden_size=96, head_dim=100),
    _variant("qwen3-heads-of-36", hidden_size=96, head_dim=36),
    _variant("gemma2-heads-of-40", hidden_size=112, head_dim=40, attn_logit_softcapping=1.5),
    _variant("gpt2-heads-of-25", n_embd=100, n_head=4),
    _variant("gpt_neox-heads-of-20", hidden_size=80),  # of which 5 elements are rotated
    _variant("opt-heads-of-20", hidden_size=80),
    _variant("bloom-heads-of-12", hidden_size=48, n_head=4),
]
"""Heads whose size is no multiple of 16; the tests of all families do not run them."""
