"""Activations: plain ones, and gated ones (`act(gate) * up` on a packed `[num_tokens, 2 * n]`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tpengine.errors import ConfigError
from tpengine.ops import fused

_GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "silu": fused.silu_and_mul,
    "swish": fused.silu_and_mul,
    "gelu": fused.gelu_and_mul,
    "gelu_new": fused.gelu_tanh_and_mul,
    "gelu_pytorch_tanh": fused.gelu_tanh_and_mul,
}


class GatedActivation:
    """The activation that a config names in `hidden_act`.

    Raises:
        ConfigError: no such gated activation.
    """

    def __init__(self, hidden_act: str) -> None:
        if hidden_act not in _GATES:
            raise ConfigError(
                f"hidden_act = {hidden_act!r} is not supported with a gate; supported: "
                f"{', '.join(_GATES)}"
            )
        self._gate = _GATES[hidden_act]

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up `[num_tokens, 2 * n]` to `[num_tokens, n]`."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._gate(out, gate_up)
        return out


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": F.silu,
    "swish": F.silu,
}


def plain_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation that a config names, on a tensor of any shape that it may overwrite.

    Raises:
        ConfigError: no such activation.
    """
    if name not in _PLAIN:
        raise ConfigError(
            f"activation_function = {name!r} is not supported without a gate; supported: "
            f"{', '.join(_PLAIN)}"
        )
    return _PLAIN[name]
