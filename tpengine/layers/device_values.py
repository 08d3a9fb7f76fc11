"""Values on their way between host and device, without a wait for either.

Reading a tensor of a GPU (`tolist`, `item`, `if`) waits without a bound until the device has
finished all work that was queued before; after the loss of a rank this includes a collective that
never ends. So layers read nothing. They return a `Pending`: tensors, and a function that turns
their values into the answer. The worker copies all these tensors to the host together, and waits
for them once, while the device computes the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Answer = TypeVar("Answer")


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Returns the array as a tensor on the device; on CPU it shares the array's memory.

    The copy starts from pinned memory, which torch keeps until the copy is done. A copy from other
    memory would wait until the device has finished all earlier work, perhaps a whole step.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Pending(Generic[Answer]):
    """An answer that is known as soon as some tensors are on the host.

    Attributes:
        tensors: the tensors to copy to the host.
        read: computes the answer from their values, given as arrays in the same order.
    """

    tensors: list[torch.Tensor]
    read: Callable[[Sequence[Array]], Answer]

    def now(self) -> Answer:
        """Returns the answer; the tensors must be on the CPU."""
        return self.read([tensor.numpy() for tensor in self.tensors])


def known(answer: Answer) -> Pending[Answer]:
    """Wraps an answer that needs nothing from the device."""
    return Pending([], lambda arrays: answer)


def together(parts: Sequence[Pending[Any]]) -> Pending[list[Any]]:
    """Combines parts into one; its answer is the list of their answers, in order."""

    def read(arrays: Sequence[Array]) -> list[Any]:
        left = iter(arrays)
        return [part.read(list(islice(left, len(part.tensors)))) for part in parts]

    return Pending([tensor for part in parts for tensor in part.tensors], read)
