"""Which rank this is, and how ranks talk: an object that layers are handed, never a global."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tpengine.errors import CollectiveError, ConfigError, EngineError

_DEVICE_TIMEOUT_S = 600.0


class Collectives(Protocol):
    """How a rank exchanges tensors with the others.

    All ranks call the same methods in the same order with the same shapes, from one thread each;
    Python's lock is free while they wait. Every wait is bounded. A failure is a `CollectiveError`,
    after which the group is of no use any more.

    Attributes:
        can_be_recorded: whether calls only queue work on the device, so that a CUDA graph can hold
            them; the same at all ranks.
    """

    can_be_recorded: bool

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of `x`, in rank order and the same bits on all; may overwrite `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, concatenated along the last dimension in rank order."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """At rank 0 what `all_gather` returns; elsewhere None, without waiting for the others."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; may overwrite the others'."""

    def abandon(self) -> None:
        """Tells the others, as far as it can be told, that this rank takes part no more."""

    def close(self) -> None:
        """Lets go of memory and connections; a second call does nothing."""


@dataclass(frozen=True)
class ParallelState:
    """The place of this rank in its tensor-parallel group.

    Two engines in one process each have their own. With one rank there is nobody to talk to and
    `collectives` is None.

    Attributes:
        communicator_bytes: of memory that the collectives hold for this rank.
        timeout_s: of a wait for this rank's device, which may wait for the others.
    """

    tp_rank: int = 0
    tp_size: int = 1
    collectives: Collectives | None = None
    communicator_bytes: int = 0
    timeout_s: float = _DEVICE_TIMEOUT_S

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may overwrite `x`."""
        return x if self.tp_size == 1 else self._connected.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        return x if self.tp_size == 1 else self._connected.all_gather(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenation over ranks along the last dimension at rank 0; elsewhere None."""
        return x if self.tp_size == 1 else self._connected.gather(x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; may overwrite the others'."""
        return x if self.tp_size == 1 else self._connected.broadcast(x)

    def abandon(self) -> None:
        """Tells the others that this rank takes part no more."""
        if self.collectives is not None:
            self.collectives.abandon()

    def close(self) -> None:
        """Lets go of what connects this rank with the others."""
        if self.collectives is not None:
            self.collectives.close()

    @property
    def can_be_recorded(self) -> bool:
        """Whether a CUDA graph can hold what the ranks tell each other."""
        return self.tp_size == 1 or self._connected.can_be_recorded

    def all_can(self, here: bool, device: torch.device) -> bool:
        """Whether something can be done at every rank; all of them ask.

        Raises:
            CollectiveError: not all have answered in time.
        """
        answers = self.all_reduce(torch.tensor([float(here)], device=device))
        self.wait_for_queued(device)
        return float(answers) == self.tp_size

    def wait_for_queued(self, device: torch.device) -> None:
        """Waits until a GPU has done the exchange that was queued last on its current stream.

        Raises:
            CollectiveError, EngineError: see `wait_for`.
        """
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.wait_for(event.query, "an exchange with all ranks")

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits until this rank's device has done something.

        Raises:
            CollectiveError: it has not in time, with several ranks; EngineError with one.
        """
        deadline = time.monotonic() + self.timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                said = f"the device of rank {self.tp_rank} has not finished {what} within "
                said += f"{self.timeout_s:g} s"
                if self.tp_size == 1:
                    raise EngineError(f"{said}: a kernel hangs, or the device has failed")
                raise CollectiveError(f"{said}: it waits for a peer, or has failed", None)
            time.sleep(0)  # lets other threads run; a sleep would add to every step

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

    @property
    def _connected(self) -> Collectives:
        if self.collectives is None:
            raise EngineError(
                f"rank {self.tp_rank} of {self.tp_size} is not connected to the others"
            )
        return self.collectives
