"""Which rank this is, and how ranks talk: an object that layers are handed, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tpengine.errors import ConfigError


class Collectives(Protocol):
    """What tensor-parallel layers need of the other ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of `x`, the same on all."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, concatenated along the last dimension in rank order."""


@dataclass(frozen=True)
class ParallelState:
    """The place of this rank in its tensor-parallel group.

    Two engines in one process each have their own. With one rank there is nobody to talk to and
    `collectives` is None.
    """

    tp_rank: int = 0
    tp_size: int = 1
    collectives: Collectives | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return x if self.collectives is None else self.collectives.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        return x if self.collectives is None else self.collectives.all_gather(x)

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total` equal things.

        Raises:
            ConfigError: they cannot be divided; the message lists the sizes that can.
        """
        if total % self.tp_size:
            sizes = [str(n) for n in range(1, total + 1) if total % n == 0]
            raise ConfigError(
                f"{total} {what} cannot be divided over tensor_parallel_size = {self.tp_size}; "
                f"sizes that can: {', '.join(sizes)}"
            )
        return total // self.tp_size
