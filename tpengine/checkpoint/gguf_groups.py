"""Blocks of quantised types of GGUF as groups of 32 numbers, without a change of any number.

Types whose groups have 16 values, or 5 bits and a minimum, are not here: their values are rounded
to 8 bits, which is closer than their own numbers are to the weights.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpengine.layers.weights import StoredGroups, check_scales
from tpengine.ops.quantized_ops import MINIMA, QuantizedFormat
from tpengine.ops.quantized_reference import HALVES, NUMBERS, PAIRS, SIGNED, numbers_of

Unpacked = tuple[Tensor, Tensor, Tensor | None, int]
"""Of blocks `[rows, num_blocks, block_bytes]`: what holds the numbers, uint8, in three dimensions
too; scales and minima, float16 `[rows, num_groups]`; the layout of the numbers."""

GROUP_SIZE = 32

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MIDDLE = 128
"""Number that stands for 0 in 8 bits."""


def _halfs(blocks: Tensor, at: int) -> Tensor:
    return blocks.view(torch.float16)[..., at // 2]


def _q4_0(blocks: Tensor) -> Unpacked:
    return blocks[..., 2:], _halfs(blocks, 0), None, HALVES


def _q4_1(blocks: Tensor) -> Unpacked:
    return blocks[..., 4:], _halfs(blocks, 0), _halfs(blocks, 2), HALVES


def _q5_0(blocks: Tensor) -> Unpacked:
    places = torch.arange(8, dtype=torch.uint8)
    high = (blocks[..., 2:6].unsqueeze(3) >> places & 1).flatten(1)
    numbers = (numbers_of(blocks[..., 6:], HALVES) | high << 4) + (_MIDDLE - 16)
    return numbers.unflatten(1, (-1, GROUP_SIZE)), _halfs(blocks, 0), None, NUMBERS


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[..., 2:], _halfs(blocks, 0), None, SIGNED


def _iq4_nl(blocks: Tensor) -> Unpacked:
    table = (torch.tensor(_IQ4_NL, dtype=torch.int16) + _MIDDLE).to(torch.uint8)
    numbers = table[numbers_of(blocks[..., 2:], HALVES).int()]
    return numbers.unflatten(1, (-1, GROUP_SIZE)), _halfs(blocks, 0), None, NUMBERS


def _q4_k(blocks: Tensor) -> Unpacked:
    """A superblock: 8 groups, whose scales and minima have 6 bits and two factors in float16. A
    group's own two are rounded to float16."""
    scale, minimum = (_halfs(blocks, at).float().unsqueeze(2) for at in (0, 2))
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = scale * torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], dim=2)
    minima = minimum * torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], dim=2)
    check_scales(torch.stack((scales, minima)))
    return blocks[..., 16:], scales.half().flatten(1), minima.neg().half().flatten(1), PAIRS


_UNPACK: dict[str, tuple[QuantizedFormat, Callable[[Tensor], Unpacked]]] = {
    "Q4_0": (QuantizedFormat(4, GROUP_SIZE), _q4_0),
    "Q4_1": (QuantizedFormat(4, GROUP_SIZE, MINIMA), _q4_1),
    "Q5_0": (QuantizedFormat(8, GROUP_SIZE), _q5_0),
    "Q8_0": (QuantizedFormat(8, GROUP_SIZE), _q8_0),
    "Q4_K": (QuantizedFormat(4, GROUP_SIZE, MINIMA), _q4_k),
    "IQ4_NL": (QuantizedFormat(8, GROUP_SIZE), _iq4_nl),
}
EXACT_TYPES = frozenset(_UNPACK)
"""Types whose numbers are kept."""


def unpack(kind: str, blocks: Tensor, columns: slice) -> StoredGroups:
    """Returns rows of a matrix as groups.

    Args:
        kind: one of `EXACT_TYPES`.
        blocks: uint8 `[rows, num_blocks, block_bytes]`.
        columns: of the rows of these blocks; whole groups.
    """
    form, unpack_blocks = _UNPACK[kind]
    q, scales, offsets, layout = unpack_blocks(blocks)
    first, last = columns.start // GROUP_SIZE, columns.stop // GROUP_SIZE
    if last - first < scales.shape[1]:  # the part has a border inside of a block
        scales = scales[:, first:last]
        offsets = None if offsets is None else offsets[:, first:last]
        return StoredGroups(numbers_of(q, layout)[:, columns], scales, offsets, form)
    if layout == NUMBERS:
        q = q.flatten(1)
    return StoredGroups(q, scales, offsets, form, layout=layout)
