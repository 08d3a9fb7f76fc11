"""Copies of a step's arrays to the device and of its results to the host.

On a GPU there are few copies, from and to pinned memory, and neither side waits for the other. On
CPU there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16

Array = npt.NDArray[np.generic]
Wait = Callable[[Callable[[], bool], str], None]


class Uploads:
    """Sends arrays to the device.

    On a GPU the arrays of a call go as one copy from pinned memory, which neither waits for the
    device nor lets the device wait for the host. On CPU the tensors share the arrays' memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Returns the arrays as tensors on the device, with the same shapes and dtypes."""
        if not self._on_gpu:
            return [torch.from_numpy(array) for array in arrays]
        places, size = layout(arrays)
        # torch gives pinned memory out again only when the copies from it are done.
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pack(buffer.numpy(), arrays, places)
        return unpack(buffer.to(self.device, non_blocking=True), arrays, places)


def layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Returns each array's offset in a buffer, aligned for any dtype, and the buffer's bytes."""
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
    """Returns views of a copy of the buffer, with the arrays' shapes and dtypes."""
    views = []
    for array, place in zip(arrays, places, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(sent[place : place + array.nbytes].view(dtype).view(array.shape))
    return views


class Downloads:
    """Copies results to the host while the host does something else.

    The copies have their own stream, so that they do not wait for work that is launched after them.

    Args:
        wait_for: see `ParallelState.wait_for`.
    """

    def __init__(self, device: torch.device, wait_for: Wait) -> None:
        self._device = device
        self._wait_for = wait_for
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[npt.NDArray[Any]]]:
        """Starts the copies. Returns a function that waits for them and returns the arrays."""
        if self._stream is None or not tensors:
            return lambda: [tensor.numpy() for tensor in tensors]
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
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
