"""The work of the ranks in `test_bits`: run steps, and record the bits of every exchange.

A file of its own, for a rank imports it with all that it needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch

from distributed.ranks import Rank
from distributed.worker_tasks import steps
from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import Collectives
from tpengine.worker.worker import Worker

NUM_BLOCKS = 32


def digest(x: torch.Tensor) -> str:
    """Hash of the tensor's bits."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@dataclass
class Noted:
    """Digests in the order of the exchanges.

    Attributes:
        given: (operation, what this rank gave).
        held: (operation, what it then held), where all ranks are to hold the same.
        gathered: at rank 0, the part of each rank in what was gathered.
    """

    given: list[tuple[str, str]] = field(default_factory=list)
    held: list[tuple[str, str]] = field(default_factory=list)
    gathered: list[list[str]] = field(default_factory=list)


class NotingCollectives:
    """Passes every call on and records its result."""

    can_be_recorded = False  # it reads the results

    def __init__(self, inner: Collectives, size: int) -> None:
        self._inner = inner
        self._size = size
        self.noted = Noted()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._noted("all_reduce", x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._noted("all_gather", x)

    def _noted(self, operation: str, x: torch.Tensor) -> torch.Tensor:
        self.noted.given.append((operation, digest(x)))
        result: torch.Tensor = getattr(self._inner, operation)(x)
        self.noted.held.append((operation, digest(result)))
        return result

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        result = self._inner.broadcast(x)  # other ranks pass uninitialised memory
        self.noted.held.append(("broadcast", digest(result)))
        return result

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        self.noted.given.append(("gather", digest(x)))
        found = self._inner.gather(x)
        if found is not None:
            self.noted.gathered.append([digest(part) for part in found.chunk(self._size, dim=-1)])
        return found

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        pass  # the group is used by later tests


def run_noting(state: Rank, config: EngineConfig, kind: str) -> Noted:
    """Runs the steps of `worker_tasks` on a new worker, connected by the group `kind`."""
    group = state[kind]
    assert group.collectives is not None
    notes = NotingCollectives(group.collectives, state.size)
    parallel = replace(config.parallel, tensor_parallel_size=state.size)
    worker = Worker(replace(config, parallel=parallel), replace(group, collectives=notes))
    worker.init_device()
    torch.set_num_threads(1)
    worker.load_model()
    worker.init_cache_engine(NUM_BLOCKS)
    notes.noted = Noted()
    for step in steps():
        worker.execute_model(step)
    return notes.noted
