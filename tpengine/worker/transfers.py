"""What goes up to the device and comes down in a step, in few copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_FIRST_BYTES = 1 << 20
_NUM_BUFFERS = 8
"""A buffer is free again when its copy is done. Behind a step that was begun early there may be the
few copies of another."""

Array = npt.NDArray[np.generic]
Wait = Callable[[Callable[[], bool], str], None]


class Uploads:
    """Sends a step's arrays to the device.

    On a GPU all of a call go as one copy from pinned memory, which neither waits for the device nor
    lets the device wait for the host. On CPU the tensors are the arrays themselves.

    Args:
        wait_for: see `ParallelState.wait_for`.
    """

    def __init__(self, device: torch.device, wait_for: Wait) -> None:
        self.device = device
        self._wait_for = wait_for
        self._on_gpu = device.type == "cuda"
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS
        self._events: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, of their shapes and dtypes."""
        if not self._on_gpu:
            return [torch.from_numpy(array) for array in arrays]
        places, size = layout(arrays)
        turn = self._next
        self._next = (turn + 1) % _NUM_BUFFERS
        event = self._events[turn]
        if event is not None:
            self._wait_for(event.query, "an upload")
        buffer = self._buffers[turn]
        if buffer is None or len(buffer) < size:
            capacity = max(_FIRST_BYTES, 2 * size)
            buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
            self._buffers[turn] = buffer
        pack(buffer.numpy(), arrays, places)
        sent = buffer[:size].to(self.device, non_blocking=True)
        event = self._events[turn] = event or torch.cuda.Event()
        event.record()
        return unpack(sent, arrays, places)


def end_of_work(device: torch.device) -> Callable[[], bool]:
    """Asks whether a device has done all that it was given until now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


def layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins in a buffer, aligned for any dtype, and the bytes of all."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(size, _ALIGNMENT)


def pack(buffer: npt.NDArray[np.uint8], arrays: Sequence[Array], places: Sequence[int]) -> None:
    """Writes the arrays to their places."""
    for array, place in zip(arrays, places, strict=True):
        target = buffer[place : place + array.nbytes].view(array.dtype)
        target.reshape(array.shape)[...] = array


def unpack(
    sent: torch.Tensor, arrays: Sequence[Array], places: Sequence[int]
) -> list[torch.Tensor]:
    """Views of a copy of the buffer, shaped like the arrays."""
    views = []
    for array, place in zip(arrays, places, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(sent[place : place + array.nbytes].view(dtype).view(array.shape))
    return views


class Downloads:
    """Brings what was sampled to the host while the host does something else.

    The copies have a stream of their own, so that they do not wait for what is launched after them.

    Args:
        wait_for: see `ParallelState.wait_for`.
    """

    def __init__(self, device: torch.device, wait_for: Wait) -> None:
        self._device = device
        self._wait_for = wait_for
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
        """Starts the copies; what it returns waits for their end, and gives the arrays."""
        if self._stream is None or not tensors:
            return lambda: [tensor.numpy() for tensor in tensors]
        hosts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)

        def finish() -> list[npt.NDArray[Any]]:
            self._wait_for(event.query, "a step")
            return [host.numpy() for host in hosts]

        return finish
