"""Activations without a gate, and with one: `act(gate) * up` of a packed `[num_tokens, 2 * n]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from tpengine.errors import not_supported
from tpengine.ops import fused_ops as fused

_GELU_TANH = (fused.gelu_tanh, fused.gelu_tanh_and_mul)
_SILU = (fused.silu, fused.silu_and_mul)
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], None], Callable[[Tensor, Tensor], None] | None]]
_ACTIVATIONS = {
    "relu": (fused.relu, None),
    "gelu": (fused.gelu, fused.gelu_and_mul),
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "silu": _SILU,
    "swish": _SILU,
}
"""By the name in a config: the op without a gate, and the op with one; None: there is none."""


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation that a config names; it takes gate and up, `[num_tokens, 2 * n]`, and
    gives `[num_tokens, n]`.

    Raises:
        ConfigError: it is not supported.
    """
    multiply = _ACTIVATIONS[name][1] if name in _ACTIVATIONS else None
    if multiply is None:
        gated = [known for known, (_, op) in _ACTIVATIONS.items() if op is not None]
        raise not_supported(f"hidden_act = {name!r} with a gate", gated)

    return partial(_activate, multiply)


def _activate(multiply: Callable[[Tensor, Tensor], None], gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    multiply(out, gate_up)
    return out


def plain_activation(name: str) -> Callable[[Tensor], None]:
    """Returns the activation that a config names; it works in place on `[num_tokens, n]`.

    Raises:
        ConfigError: it is not supported.
    """
    if name not in _ACTIVATIONS:
        what = f"activation_function (or hidden_act) = {name!r} without a gate"
        raise not_supported(what, _ACTIVATIONS)
    return _ACTIVATIONS[name][0]
