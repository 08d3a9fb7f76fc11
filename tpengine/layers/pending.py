"""Answers that are on the device still.

Whoever reads a tensor of a GPU (`tolist`, `item`, `if`) waits until the device has done all that it
was given before, without a bound: behind a lost rank's collective for ever. So layers read nothing.
What the host wants to know leaves them as tensors, which the worker brings over together, and waits
for once, while the device has its next step to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Pending(Generic[Answer]):
    """What will be known when some tensors are on the host.

    Attributes:
        tensors: to be brought there.
        read: makes the answer of the arrays that they have become.
    """

    tensors: list[torch.Tensor]
    read: Callable[[Sequence[Array]], Answer]

    def now(self) -> Answer:
        """The answer, of tensors on CPU."""
        return self.read([tensor.numpy() for tensor in self.tensors])


def known(answer: Answer) -> Pending[Answer]:
    """An answer for which the device is not needed."""
    return Pending([], lambda arrays: answer)


def together(parts: Sequence[Pending[Any]]) -> Pending[list[Any]]:
    """The answers of all, in their order."""

    def read(arrays: Sequence[Array]) -> list[Any]:
        left = iter(arrays)
        return [part.read(list(islice(left, len(part.tensors)))) for part in parts]

    return Pending([tensor for part in parts for tensor in part.tensors], read)
