"""Ranks that kill themselves at a moment that the test names, once it asks for that."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from executor.sabotage import RANK_VARIABLE, kill_self, sleep_long

_COUNTS, _ORDER = struct.Struct("<ii"), struct.Struct("<ii24s")
Order = tuple[int, str, int]
"""A rank, the moment, and how often it passes before the rank dies."""


class Orders:
    """Orders to die, in a file that the test and all ranks have mapped. Each counts from the moment
    on at which the one before it was obeyed."""

    def __init__(self, path: Path | str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def make(cls, path: Path) -> Orders:
        path.write_bytes(bytes(mmap.PAGESIZE))
        return cls(path)

    @property
    def num_left(self) -> int:
        """Orders that were not obeyed."""
        num_obeyed, count = _COUNTS.unpack_from(self._memory)
        return count - num_obeyed

    def give(self, orders: Sequence[Order]) -> None:
        """Takes the place of all orders before, while no rank computes."""
        for place, (rank, moment, passes) in enumerate(orders):
            _ORDER.pack_into(self._memory, self._at(place), rank, passes, moment.encode())
        self._memory[: _COUNTS.size] = _COUNTS.pack(0, len(orders))

    def take(self, rank: int, moment: str) -> bool:
        """Whether a rank that is at this moment dies now."""
        num_obeyed, count = _COUNTS.unpack_from(self._memory)
        if num_obeyed == count:
            return False
        at = self._at(num_obeyed)
        wanted, passes, name = _ORDER.unpack_from(self._memory, at)
        if (wanted, name.rstrip(b"\0").decode()) != (rank, moment):
            return False
        if passes:
            _ORDER.pack_into(self._memory, at, rank, passes - 1, name)
            return False
        self._memory[: _COUNTS.size] = _COUNTS.pack(num_obeyed + 1, count)
        return True

    def _at(self, place: int) -> int:
        return _COUNTS.size + place * _ORDER.size


def install(path: str, worker: Any) -> None:
    """In a rank's process: has it obey. `worker` is the module `tpengine.worker.worker`."""
    from tpengine.distributed.shared_memory import SharedMemoryCollectives
    from tpengine.executor import rank as frames
    from tpengine.ops import cache_ops
    from tpengine.ops.recording import Recording

    orders, rank = Orders(path), int(os.environ[RANK_VARIABLE])

    def replace(
        owner: Any,
        name: str,
        moment: str,
        die: Callable[[], None] = kill_self,
        is_due: Callable[..., bool] = lambda *_: True,
    ) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_due(*args) and orders.take(rank, moment):
                die()
            return function(*args, **kwargs)

        setattr(owner, name, run)

    replace(cache_ops, "copy_across", "swap")
    replace(cache_ops, "copy_blocks", "copy")
    replace(cache_ops, "rotary_write_kv_cache", "write")
    replace(SharedMemoryCollectives, "_run", "between")
    replace(SharedMemoryCollectives, "_run", "collective", kill_in_native_code)
    replace(Recording, "run", "recorded", kill_in_native_code)
    replace(frames, "encode", "answer")
    replace(worker.Worker, "execute_model", "step", is_due=lambda _, step: step.step > 0)
    replace(worker.Worker, "execute_model", "batch", is_due=lambda _, step: step.step == 0)
    replace(
        worker.Worker, "execute_model", "hang batch", sleep_long, lambda _, step: step.step == 0
    )
    replace(worker.Worker, "load_model", "hang load_model", sleep_long)
    for name in ("connect", "init_device", "load_model", "init_cache_engine"):
        replace(worker.Worker, name, name)


def kill_in_native_code() -> None:
    """Another thread kills the process, as soon as it gets its turn: then this one is in the native
    code that it calls next."""
    begins = threading.Event()
    threading.Thread(target=lambda: (begins.wait(), kill_self())).start()
    begins.set()
