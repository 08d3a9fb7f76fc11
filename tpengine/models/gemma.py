"""Gemma 1, 2 and 3, text only (https://arxiv.org/abs/2403.08295, https://arxiv.org/abs/2408.00118,
https://arxiv.org/abs/2503.19786): a Llama with scaled embeddings, and with norm weights that the
checkpoint stores as distances from 1.

Gemma 2 adds norms of what attention and MLP give, windows in some of the layers, and soft caps.
Gemma 3 has norms of query and key heads in place of the caps of attention logits, and its layers
with a window rotate by a frequency of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.norm import QKNorm
from tpengine.layers.weights import Weights
from tpengine.models.llama import Blueprint, LlamaForCausalLM, LlamaTraits, rotary_table
from tpengine.models.registry import half_windows, layer_windows, require, unsupported

_OLD_THETAS = {"sliding_attention": "rope_local_base_freq"}
_FOUR_NORMS = (
    ("before_attention", "input_layernorm"),
    ("after_attention", "post_attention_layernorm"),
    ("before_mlp", "pre_feedforward_layernorm"),
    ("after_mlp", "post_feedforward_layernorm"),
)


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma 1: no windows, no caps."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "sliding_window", None, None)
        act = config.hf_config["hidden_act"]
        # Published configurations say "gelu", and the models were trained with its tanh form.
        return _traits(config, activation="gelu_pytorch_tanh" if act == "gelu" else act)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """`layer_types` says which layers have the window."""

    own_fields: tuple[str, ...] = ("attn_logit_softcapping", "final_logit_softcapping")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.final_softcap = _softcap(config, "final_logit_softcapping")

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        scalar = config.hf_config["query_pre_attn_scalar"]
        if not scalar > 0:
            raise unsupported(config, "query_pre_attn_scalar", scalar, "numbers above 0")
        return _traits(
            config,
            activation=config.hf_config["hidden_activation"],
            windows=layer_windows(config),
            scale=scalar**-0.5,
            softcap=_softcap(config, "attn_logit_softcapping"),
            norms=_FOUR_NORMS,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `LlamaForCausalLM.compute_logits`."""
        logits, cap = super().compute_logits(hidden), self.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """`layer_types` gives the windows, as in Gemma 2, and the rotary embedding. In EmbeddingGemma
    (https://arxiv.org/abs/2509.20354) a token also sees those after it."""

    own_fields = ("final_logit_softcapping", "use_bidirectional_attention")

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        traits = replace(super().traits(config), qk_norm=QKNorm)
        if not config.hf_config.get("use_bidirectional_attention"):
            return traits
        return replace(traits, windows=half_windows(config), is_bidirectional=True)

    @classmethod
    def rotary_tables(cls, blueprint: Blueprint) -> Sequence[Tensor | None]:
        """See `LlamaForCausalLM.rotary_tables`; one table with a window and one without."""
        config, weights, traits = blueprint
        return rotary_tables_by_window(config, weights, traits.windows, _OLD_THETAS)


def _traits(config: ModelConfig, **traits: Any) -> LlamaTraits:
    """Returns these traits, and those that all members of the family have."""
    scale = config.hidden_size**0.5
    common = replace(LlamaForCausalLM.biases(config), centered_norms=True, embedding_scale=scale)
    return replace(common, **traits)


def _softcap(config: ModelConfig, field: str) -> float | None:
    cap: float | None = config.hf_config.get(field)
    if cap is not None and not (isinstance(cap, (int, float)) and cap > 0):
        raise unsupported(config, field, cap, "null and numbers above 0")
    return cap


def rotary_tables_by_window(
    config: ModelConfig,
    weights: Weights,
    windows: Sequence[int | None],
    old_thetas: Mapping[str, str],
) -> list[Tensor]:
    """Computes each layer's cosines and sines, of a model whose layers with a window rotate by
    another frequency than those without.

    Args:
        windows: of the layers.
        old_thetas: see `_rotary_fields`.
    """
    tables = {
        kind: rotary_table(config, weights, _rotary_fields(config, kind, old_thetas))
        for kind in ("full_attention", "sliding_attention")
    }
    return [
        tables["full_attention" if window is None else "sliding_attention"] for window in windows
    ]


def _rotary_fields(
    config: ModelConfig, layer_type: str, old_thetas: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the configuration with the rotary fields of these layers only.

    transformers 5 writes `rope_parameters` for each layer type. Earlier versions wrote a theta
    under a name of its own for some types, by `old_thetas`, and other layers as other families do.
    """
    hf = dict(config.hf_config)
    nested = hf.get("rope_parameters")
    if nested:
        if not isinstance(nested.get(layer_type), Mapping):
            raise unsupported(config, "rope_parameters", nested, "one entry for each layer type")
        return hf | {"rope_parameters": nested[layer_type]}
    if layer_type in old_thetas:
        return hf | {"rope_scaling": None, "rope_theta": hf[old_thetas[layer_type]]}
    return hf
