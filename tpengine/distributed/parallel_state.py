"""The place of a rank in its group, and the interface through which ranks exchange tensors.

Layers get a `ParallelState` as an argument; it is never a global, so that one process can hold the
ranks of two engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tpengine.errors import CollectiveError, ConfigError, EngineError

_DEVICE_TIMEOUT_S = 600.0


class Collectives(Protocol):
    """Exchange of tensors between the ranks of a group.

    All ranks call the same methods in the same order with the same shapes, each from one thread.
    Waits release Python's lock and are bounded. A failure raises `CollectiveError`; the group
    cannot be used any more.

    Attributes:
        can_be_recorded: whether a recorded step can contain calls: on a GPU they only queue work
            on the device, on CPU they note themselves in a `Recording`; the same at all ranks.
    """

    can_be_recorded: bool

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks, with the same bits at all ranks; may overwrite `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, concatenated along the last dimension in rank order."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """`all_gather` at rank 0; elsewhere None, without a wait for the other ranks."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; may overwrite the others'."""

    def abandon(self) -> None:
        """Tells the other ranks, if they can be reached, that this rank has left the group."""

    def close(self) -> None:
        """Frees memory and connections; a second call does nothing."""


class Link(Protocol):
    """One way from a rank to the rank of the same number in the next pipeline stage.

    Waits release Python's lock and are bounded. A failure raises `CollectiveError`.

    Attributes:
        name: of the way that messages take.
    """

    name: str

    def send(self, x: torch.Tensor) -> None:
        """Sends x; may return before the other side takes it. x may be overwritten then."""

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fills `out` with the oldest message that was not received, which has its shape and dtype;
        returns it."""

    def abandon(self) -> None:
        """`close` of a rank that fails: it waits for no work on the device."""
        self.close()

    def close(self) -> None:
        """Ends the waits of both sides with an error; a second call does nothing."""


@dataclass(frozen=True)
class Stage:
    """The place of this rank's group in a pipeline: which layers it has.

    Attributes:
        layers: numbers of its layers; None: all, or not known yet.
        source: brings hidden states from the stage before; None: this is the first.
        target: takes them to the stage after it; None: this is the last.
        sampled: bring the sampled ids from the last stage, or take them to all others; empty: there
            is one stage, or another rank of the last one does so.
    """

    index: int = 0
    count: int = 1
    layers: range | None = None
    source: Link | None = None
    target: Link | None = None
    sampled: tuple[Link, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def describe(self, num_layers: int) -> str:
        """Names the stage, and which of a model's layers it has; empty: it has all."""
        if self.layers is None or len(self.layers) == num_layers:
            return ""
        first, last = self.layers.start, self.layers.stop - 1
        layers = f"layer {last}" if first == last else f"layers {first}-{last}"
        return f"stage {self.index}: {layers} of {num_layers}"

    @property
    def links(self) -> list[Link]:
        """All that there are."""
        return [link for link in (self.source, self.target, *self.sampled) if link is not None]


@dataclass(frozen=True)
class ParallelState:
    """The place of this rank in its tensor-parallel group, and of the group in a pipeline.

    Attributes:
        collectives: None for a group of one rank.
        communicator_bytes: memory that collectives and links hold for this rank.
        timeout_s: bound of a wait for this rank's device, which may itself wait for other ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    collectives: Collectives | None = None
    communicator_bytes: int = 0
    timeout_s: float = _DEVICE_TIMEOUT_S
    stage: Stage = Stage()

    @property
    def rank(self) -> int:
        """Number among the ranks of all stages."""
        return self.stage.index * self.tp_size + self.tp_rank

    @property
    def samples(self) -> bool:
        """Whether this is the rank that samples."""
        return self.stage.is_last and self.tp_rank == 0

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
        """Tells the other ranks that this rank has left the group."""
        if self.collectives is not None:
            self.collectives.abandon()
        for link in self.stage.links:
            link.abandon()

    def close(self) -> None:
        """Frees memory and connections of collectives and links."""
        if self.collectives is not None:
            self.collectives.close()
        for link in self.stage.links:
            link.close()

    @property
    def can_be_recorded(self) -> bool:
        """Whether a recorded step can contain the exchanges of the ranks."""
        return self.tp_size == 1 or self._connected.can_be_recorded

    def all_can(self, here: bool, device: torch.device) -> bool:
        """Whether `here` is true at every rank; all ranks call this.

        Raises:
            CollectiveError: a rank has not answered in time.
        """
        answers = self.all_reduce(torch.tensor([float(here)], device=device))
        self.wait_for_queued(device)
        return float(answers) == self.tp_size

    def wait_for_queued(self, device: torch.device) -> None:
        """Waits until a GPU has finished the exchange that was queued last on its current stream.

        Raises:
            CollectiveError, EngineError: see `wait_for`.
        """
        self.wait_for(end_of_work(device), "an exchange with all ranks")

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits until this rank's device has finished some work.

        Args:
            what: name of the work, for the error.

        Raises:
            CollectiveError: it has not finished in time, in a group of two or more ranks.
            EngineError: the same in a group of one.
        """
        deadline = time.monotonic() + self.timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                said = f"the device of rank {self.rank} has not finished {what} within "
                said += f"{self.timeout_s:g} s"
                if self.tp_size == 1:
                    raise EngineError(f"{said}: a kernel hangs, or the device has failed")
                raise CollectiveError(f"{said}: it waits for a peer, or has failed", None)
            time.sleep(0)  # lets other threads run; a longer sleep would add to every step

    def divide(self, total: int, what: str) -> int:
        """Returns this rank's share of `total`.

        Args:
            what: the name of what is divided, for the error.

        Raises:
            ConfigError: `total` is not divisible; the message lists the group sizes that are.
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
        assert self.collectives is not None, "ranks exchange before they have met"
        return self.collectives


def end_of_work(device: torch.device) -> Callable[[], bool]:
    """Returns a function that tells whether a device has done all work that it was given by now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query
