"""Activations without a gate, and with one: `act(gate) * up` of a packed `[num_tokens, 2 * n]`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpengine.errors import ConfigError
from tpengine.ops import fused_ops as fused

_GATES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "silu": fused.silu_and_mul,
    "swish": fused.silu_and_mul,
    "gelu": fused.gelu_and_mul,
    "gelu_new": fused.gelu_tanh_and_mul,
    "gelu_pytorch_tanh": fused.gelu_tanh_and_mul,
}


class GatedActivation:
    """The gated activation that a config names in `hidden_act`.

    Raises:
        ConfigError: it is not supported.
    """

    def __init__(self, hidden_act: str) -> None:
        if hidden_act not in _GATES:
            raise ConfigError(
                f"hidden_act = {hidden_act!r} is not supported with a gate; supported: "
                f"{', '.join(_GATES)}"
            )
        self._gate = _GATES[hidden_act]

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up `[num_tokens, 2 * n]` to `[num_tokens, n]`."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._gate(out, gate_up)
        return out


_PLAIN: dict[str, Callable[[Tensor], None]] = {
    "relu": fused.relu,
    "gelu": fused.gelu,
    "gelu_new": fused.gelu_tanh,
    "gelu_fast": fused.gelu_tanh,
    "gelu_pytorch_tanh": fused.gelu_tanh,
    "silu": fused.silu,
    "swish": fused.silu,
}


def plain_activation(name: str) -> Callable[[Tensor], None]:
    """Returns the activation that a config names; it works in place on `[num_tokens, n]`.

    Raises:
        ConfigError: it is not supported.
    """
    if name not in _PLAIN:
        raise ConfigError(
            f"activation_function (or hidden_act) = {name!r} is not supported without a gate; "
            f"supported: {', '.join(_PLAIN)}"
        )
    return _PLAIN[name]
