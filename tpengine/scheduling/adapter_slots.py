"""Which adapter is in which slot of the workers: least recently used first out.

A slot that a running request uses is not given away, so a step never has more adapters than there
are slots, and a request keeps its slot until it is preempted or ends. If no slot can be had, the
request waits (`RequestQueues.has_slots`), and `passing.py` says which requests may pass it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from tpengine.messages import AdapterLoad
from tpengine.scheduling.sequence import Request


class AdapterSlots:
    """The slots, and the loads that the next message tells the workers."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._loaded: OrderedDict[bytes, AdapterLoad] = OrderedDict()  # least recently used first
        self._loads: dict[int, AdapterLoad] = {}  # by slot

    def slot_of(self, request: Request) -> int | None:
        """The slot of a running request's adapter; None: it has no adapter."""
        return None if request.adapter is None else self._loaded[request.adapter.key].slot

    def has_room(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether the request's adapter is loaded, or a slot can be given to it."""
        adapter = request.adapter
        if adapter is None or adapter.key in self._loaded or self._free:
            return True
        return len(_used_by(running)) < self._num_slots

    def take(self, request: Request, running: Iterable[Request]) -> None:
        """Loads the adapter of a request that begins to run, unless it is loaded.

        Args:
            running: the other running requests.
        """
        adapter = request.adapter
        if adapter is None:
            return
        key = adapter.key
        if key not in self._loaded:
            if not self._free:
                used = _used_by(running)
                self.forget(next(loaded for loaded in self._loaded if loaded not in used))
            slot = self._free.pop()
            path = str(Path(adapter.request.lora_path).absolute())  # ranks have other folders
            load = AdapterLoad(slot, key, path)
            self._loaded[key] = self._loads[slot] = load
        self._loaded.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Frees the slot of an adapter that gives way, or could not be loaded."""
        self._free.append(self._loaded.pop(key).slot)

    def note_failed(self, keys: Iterable[bytes], loads: Iterable[AdapterLoad]) -> None:
        """Forgets those of a step's loads that failed. Later steps may have given the slot away, or
        load the adapter again."""
        for load in loads:
            if load.key in keys and self._loaded.get(load.key) is load:
                self.forget(load.key)

    def take_loads(self) -> list[AdapterLoad]:
        """The loads of the next message; they are returned only once."""
        loads, self._loads = self._loads, {}
        return list(loads.values())

    def restart(self) -> None:
        """Loads all adapters again, since the workers were lost."""
        self._loads = {load.slot: load for load in self._loaded.values()}


def _used_by(running: Iterable[Request]) -> set[bytes]:
    return {request.adapter.key for request in running if request.adapter is not None}
