"""Sources of weights in AWQ, GPTQ, compressed-tensors and fp8.

Each gives the values of a part, or its numbers as they are stored. Of the numbers it reads only the
words that hold the part; scales and zero points were read whole before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from tpengine.layers.weights import StoredGroups, TensorSource
from tpengine.ops.quantized_ops import NO_OFFSETS, ZERO_POINTS, QuantizedFormat

_STEP = 32
"""Groups in memory have multiples of so many inputs."""
_SCALE_ERROR = 1e-3
"""A scale that loses more than this share in float16 cannot be stored so."""


class Numbers(Protocol):
    """Unsigned numbers `[outputs, inputs]` or `[outputs, groups]`."""

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """Returns a part, uint8."""


@dataclass(frozen=True, slots=True)
class Words:
    """Numbers of 4 or 8 bits that share words of 32.

    Attributes:
        source: int32.
        dim: dimension of `source` along which the numbers of a word are neighbours.
        is_transposed: whether `source` has inputs or groups before outputs.
        is_halved: whether a word has its even numbers in its lower half, and its odd ones in the
            upper half (AWQ); else all are in the order of their bits.
        is_less_one: whether each number is stored less one.
    """

    source: TensorSource
    bits: int
    dim: int
    is_transposed: bool = False
    is_halved: bool = False
    is_less_one: bool = False

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """See `Numbers`."""
        parts = [columns, rows] if self.is_transposed else [rows, columns]
        wanted, per_word = parts[self.dim], 32 // self.bits
        first = wanted.start // per_word
        parts[self.dim] = slice(first, -(-wanted.stop // per_word))
        words = self.source[tuple(parts)]
        if self.is_less_one:
            # The whole word is added to: where a number was 0, writers borrow from its neighbour.
            words = words + (0x11111111 if self.bits == 4 else 0x01010101)
        numbers: torch.Tensor = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(2)
        if self.is_halved:
            numbers = numbers.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        if self.dim == 0:
            numbers = numbers.transpose(1, 2)
        numbers = numbers.flatten(self.dim, self.dim + 1)
        start = wanted.start - first * per_word
        numbers = numbers.narrow(self.dim, start, wanted.stop - wanted.start)
        return numbers.t() if self.is_transposed else numbers


@dataclass(frozen=True, slots=True)
class SignedBytes:
    """Numbers of 8 bits, stored as int8."""

    source: TensorSource

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """See `Numbers`."""
        return self.source[rows, columns].contiguous().view(torch.uint8) ^ 128


@dataclass(eq=False)
class GroupedTensor:
    """A weight in groups of 4 or 8 bits, see `layers.weights.QuantizedSource`.

    Attributes:
        shape: outputs and inputs.
        group_size: neighbouring inputs with one scale.
        scales: float32 `[outputs, groups]`.
        zeros: zero points, uint8 `[outputs, groups]`; None: they are in the middle. A symmetric
            file may have zero points too.
        groups: int64 `[inputs]`, the group of each input (GPTQ's `desc_act`); None: groups are of
            neighbours.
        is_transposed: whether the model has inputs before outputs.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    numbers: Numbers
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor | None = None
    is_transposed: bool = False

    def __post_init__(self) -> None:
        if self.zeros is not None and bool((self.zeros == self._middle).all()):
            self.zeros = None

    def get_shape(self) -> list[int]:
        """The shape that the model knows."""
        return list(self.shape[::-1] if self.is_transposed else self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns rows `[a:b]`, or a part of their columns `[a:b, c:d]`, in float32."""
        first, second = _part(index, self.get_shape())
        if self.is_transposed:
            return self._values(second, first).t()
        return self._values(first, second)

    def _values(self, outputs: slice, inputs: slice) -> torch.Tensor:
        groups = (self._neighbours() if self.groups is None else self.groups)[inputs]
        values = self.numbers.read(outputs, inputs).contiguous().float()
        values -= self._middle if self.zeros is None else self.zeros[outputs][:, groups]
        return values.mul_(self.scales[outputs][:, groups])

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """See `layers.weights.QuantizedSource`.

        A border inside of a group cuts the groups of the part into smaller ones of equal scales.
        """
        rows, columns = _part((rows, columns), self.shape)
        size, order = _common_size(self.group_size, columns), None
        if self.groups is not None:
            order = self._order if columns == slice(0, self.shape[1]) else None
            size = None if order is None else size
        if size is None or not self._fits_halves:
            return None
        groups = torch.arange(columns.start, columns.stop, size) // self.group_size
        scales = self.scales[rows][:, groups].half()
        q = self.numbers.read(rows, columns)
        offsets = None if self.zeros is None else self.zeros[rows][:, groups].half()
        form = QuantizedFormat(self.bits, size, NO_OFFSETS if offsets is None else ZERO_POINTS)
        return StoredGroups(q if order is None else q[:, order], scales, offsets, form, order)

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _neighbours(self) -> torch.Tensor:
        return torch.arange(self.shape[1]) // self.group_size

    # All parts of a weight have one form, so these are of the whole weight.

    @cached_property
    def _fits_halves(self) -> bool:
        """Whether float16 keeps all scales."""
        return torch.allclose(self.scales.half().float(), self.scales, rtol=_SCALE_ERROR, atol=0)

    @cached_property
    def _order(self) -> torch.Tensor | None:
        """The inputs in the order of their groups; None: these have not all `group_size` inputs."""
        assert self.groups is not None
        order = torch.argsort(self.groups, stable=True)
        return order if torch.equal(self.groups[order], self._neighbours()) else None


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A weight in fp8 with a scale for each block of outputs and inputs.

    It has no form in groups: fp8 numbers are not evenly spaced, so no integers with one scale equal
    them.

    Attributes:
        source: float8 `[outputs, inputs]`.
        scales: float32, of each block.
        block: outputs and inputs of a block.
    """

    source: TensorSource
    scales: torch.Tensor
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        """The shape that the model knows."""
        return self.source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns rows `[a:b]`, or a part of their columns `[a:b, c:d]`, in float32."""
        rows, columns = _part(index, self.get_shape())
        outputs, inputs = self.block
        by_row = torch.arange(rows.start, rows.stop) // outputs
        by_column = torch.arange(columns.start, columns.stop) // inputs
        return self.source[rows, columns].float().mul_(self.scales[by_row][:, by_column])

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """Returns None, see `layers.weights.QuantizedSource`."""
        return None


def _part(index: Any, shape: Iterable[int]) -> tuple[slice, slice]:
    """Returns the rows and the columns that an index names, with their borders."""
    parts = index if isinstance(index, tuple) else (index,)
    sizes = list(shape)
    whole = [*parts, slice(None)][:2]
    rows, columns = (slice(*cut.indices(size)[:2]) for cut, size in zip(whole, sizes, strict=True))
    return rows, columns


def _common_size(group_size: int, columns: slice) -> int | None:
    """Returns the largest size of groups that begin with the part and do not cross a border of the
    file's groups; None: it is no multiple of what the kernels need."""
    first, last = columns.start // group_size, (columns.stop - 1) // group_size
    if first == last:
        size: int = columns.stop - columns.start
        return -(-size // _STEP) * _STEP
    size = math.gcd(group_size, columns.start)
    return size if size % _STEP == 0 else None
