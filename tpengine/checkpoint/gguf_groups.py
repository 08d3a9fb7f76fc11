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

Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""Of blocks `[n, block_bytes]`: numbers uint8 `[n, block]`, scales and minima float16
`[n, block / 32]`."""

GROUP_SIZE = 32

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MIDDLE = 128
"""Number that stands for 0 in 8 bits."""


def _halfs(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of the bytes of each row, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _q4_0(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[:, 2:]), _halfs(blocks, 0), None


def _q4_1(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _halfs(blocks, 0), _halfs(blocks, 2)


def _q5_0(blocks: Tensor) -> Unpacked:
    places = torch.arange(8, dtype=torch.uint8)
    high = (blocks[:, 2:6].unsqueeze(2) >> places & 1).flatten(1)
    return (_nibbles(blocks[:, 6:]) | high << 4) + (_MIDDLE - 16), _halfs(blocks, 0), None


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, 2:] ^ _MIDDLE, _halfs(blocks, 0), None


def _iq4_nl(blocks: Tensor) -> Unpacked:
    table = torch.tensor(_IQ4_NL, dtype=torch.int16) + _MIDDLE
    return table.to(torch.uint8)[_nibbles(blocks[:, 2:]).int()], _halfs(blocks, 0), None


def _q4_k(blocks: Tensor) -> Unpacked:
    """A superblock: 8 groups, whose scales and minima have 6 bits and two factors in float16. A
    group's own two are rounded to float16."""
    scale, minimum = _halfs(blocks, 0).float(), _halfs(blocks, 2).float()
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], dim=1)
    pairs = blocks[:, 16:].view(-1, 4, 32)
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
    check_scales(torch.stack((scale * scales, minimum * minima)))
    return numbers, (scale * scales).half(), (minimum * minima).neg().half()


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


def unpack(kind: str, blocks: Tensor, num_rows: int, columns: slice) -> StoredGroups:
    """Returns rows of a matrix as groups.

    Args:
        kind: one of `EXACT_TYPES`.
        blocks: uint8 `[num_blocks, block_bytes]`, of all rows one after another.
        columns: of the rows of these blocks; whole groups.
    """
    form, unpack_blocks = _UNPACK[kind]
    q, *factors = unpack_blocks(blocks)
    groups = slice(columns.start // GROUP_SIZE, columns.stop // GROUP_SIZE)
    scales, offsets = (None if x is None else x.reshape(num_rows, -1)[:, groups] for x in factors)
    assert scales is not None
    return StoredGroups(q.reshape(num_rows, -1)[:, columns], scales, offsets, form)
