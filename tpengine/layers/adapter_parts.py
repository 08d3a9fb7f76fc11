"""What an adapter adds to each linear layer; the driver reads these too, so no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Targets = Mapping[str, tuple[int, int]]
"""Linear layers that can have adapters: outputs and inputs of all ranks, by the name of PEFT."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What an adapter adds to one linear layer: `scaling * x A^T B^T`."""

    rank: int
    scaling: float
