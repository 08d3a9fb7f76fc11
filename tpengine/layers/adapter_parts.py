"""What an adapter adds to each linear layer; the driver reads these too, so no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Targets = Mapping[str, tuple[int, int] | None]
"""Linear layers that can have adapters: outputs and inputs of all ranks, by the name of PEFT; and
what is not the text half of the checkpoint: None, by the checkpoint's name."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What an adapter adds to one linear layer: `scaling * x A^T B^T`.

    Attributes:
        name: of the layer in the adapter's files.
    """

    name: str
    rank: int
    scaling: float
