"""Weights in groups of 4 or 8 bits, multiplied with inputs that are rounded to 8 bits per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpengine.ops import quantized_reference
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import op
from tpengine.ops.linear_reference import LINEAR_PANEL
from tpengine.ops.quantized_reference import NUMBERS, numbers_of

_pack_groups = op(quantized_reference.pack_groups, "packed")
dequantize_blocks = op(quantized_reference.dequantize_blocks, "out")
_quantize_weight = op(quantized_reference.quantize_weight, "packed")
_quantized_linear = op(quantized_reference.quantized_linear, "out")
_quantized_embedding = op(quantized_reference.quantized_embedding, "out")

NO_OFFSETS, ZERO_POINTS, MINIMA = range(3)
"""How a weight comes from its stored number q and its group's scale s: `s (q - 8)`, in 8 bits
`s (q - 128)`; `s (q - zero)` with a whole zero per group; or `s q + minimum`."""


class QuantizedFormat(NamedTuple):
    """How weights are stored, in the order in which ops take it.

    Attributes:
        bits: 4 or 8.
        group_size: neighbouring inputs with one scale; a multiple of 32.
        offsets: `NO_OFFSETS`, `ZERO_POINTS` or `MINIMA`.
    """

    bits: int
    group_size: int
    offsets: int = NO_OFFSETS

    def num_groups(self, in_features: int) -> int:
        """Groups of an output; the last one is filled up with zeros."""
        return -(-in_features // self.group_size)


def per_output(in_features: int) -> QuantizedFormat:
    """Returns the format in 8 bits with one scale per output."""
    return QuantizedFormat(8, -(-in_features // 32) * 32)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A packed weight `[out_features, in_features]`.

    Attributes:
        packed: uint8; per panel of 32 outputs and group `[group_size / 4, 32, 4]` numbers, those of
            outputs i and i + 16 in one byte if they have 4 bits, then 32 float16 scales and, if
            there are, 32 float16 offsets.
    """

    packed: Tensor
    format: QuantizedFormat
    out_features: int
    in_features: int

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Returns outputs `start` to `stop` as a view. Both are multiples of 32, or the end."""
        assert start % LINEAR_PANEL == 0
        panels = -(-self.out_features // LINEAR_PANEL)
        packed = self.packed.view(panels, -1)[start // LINEAR_PANEL : -(-stop // LINEAR_PANEL)]
        return QuantizedWeight(packed.flatten(), self.format, stop - start, self.in_features)


def pad_columns(values: Tensor, columns: int) -> Tensor:
    """Returns rows with zeros behind them, up to so many columns; the same tensor if they have
    them, which `F.pad` would copy."""
    missing = columns - values.shape[1]
    return F.pad(values, (0, missing)) if missing else values


def pack_quantized_into(
    weight: QuantizedWeight,
    q: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    layout: int = NUMBERS,
) -> None:
    """Packs a weight that is quantised already. Columns and groups that are missing at the end of
    each row are zero.

    Args:
        weight: from `empty_quantized`; written.
        q: uint8 `[out_features, in_features]`, 0 to 15 or 255; in another layout than `NUMBERS`
            `[out_features, num_blocks, block_bytes]`, see `quantized_reference`.
        scales: float16 `[out_features, num_groups]`.
        offsets: float16, of the same shape, or None; see `QuantizedFormat.offsets`.

    Raises:
        RuntimeError: dtypes or shapes do not fit.
    """
    form = weight.format
    groups = form.num_groups(weight.in_features)
    if missing := groups - scales.shape[1]:
        q, layout = numbers_of(q, layout), NUMBERS
        scales = F.pad(scales, (0, missing))
        offsets = None if offsets is None else F.pad(offsets, (0, missing))
    if layout == NUMBERS:
        q = pad_columns(q, groups * form.group_size).contiguous()
        q = q.unflatten(1, (groups, form.group_size))
    _pack_groups(weight.packed, q, scales, offsets, form.bits, form.group_size, layout)


def quantize_weight_into(
    result: QuantizedWeight, weight: Tensor, importance: Tensor | None = None
) -> None:
    """Rounds a weight to groups without offsets, and packs it.

    In 8 bits a group's scale comes from its largest magnitude; in 4 bits it is the one of a few
    that loses least, and may be negative.

    Args:
        result: from `empty_quantized`; written.
        weight: `[out_features, in_features]`, float32 or bfloat16; in 4 bits groups have at most
            128 inputs.
        importance: float32 `[in_features]`, more than 0: what the square error of an input counts
            when the scale of a group in 4 bits is chosen; None: all count the same.

    Raises:
        RuntimeError: dtype, strides or format do not fit.
    """
    form = result.format
    _quantize_weight(result.packed, weight, importance, form.bits, form.group_size)


def empty_quantized(
    outputs: int, inputs: int, form: QuantizedFormat, arena: HugePageArena | None = None
) -> QuantizedWeight:
    """Allocates an uninitialised weight `[outputs, inputs]`.

    Args:
        arena: memory for the result; None: torch allocates it.
    """
    tail = LINEAR_PANEL * 2 * (1 if form.offsets == NO_OFFSETS else 2)
    group_bytes = LINEAR_PANEL * form.group_size * form.bits // 8 + tail
    count = -(-outputs // LINEAR_PANEL) * form.num_groups(inputs) * group_bytes
    packed = (arena or HugePageArena()).empty(count, torch.uint8)
    return QuantizedWeight(packed, form, outputs, inputs)


def quantized_linear(out: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """`out = x W^T + bias` in 8 bits, or 4 by 8.

    Each row of x is rounded with one scale to 8 bits; up to four fours of neighbouring inputs that
    exceed them, one four in 32, have 14 bits. Sums over a group are exact integers; groups are
    added in float32, in their order. A row's result does not depend on other rows.

    Args:
        out: `[num_rows, out_features]`, float32 or bfloat16; written.
        x: `[num_rows, in_features]`, same dtype.
        bias: `[out_features]`, same dtype, or None.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _quantized_linear(out, x, weight.packed, bias, *weight.format)


def quantized_embedding(
    out: Tensor,
    weight: QuantizedWeight,
    token_ids: Tensor,
    scale: float = 1.0,
    first: int | None = None,
) -> None:
    """Copies rows of the weight, times a factor, as floats.

    Args:
        out: `[num_tokens, in_features]`, float32 or bfloat16; written.
        token_ids: int32 `[num_tokens]`.
        first: see `reference.embedding`.

    Raises:
        RuntimeError: dtypes or shapes do not fit, or an id has no row in the whole table.
    """
    _quantized_embedding(
        out, weight.packed, token_ids, weight.out_features, *weight.format, scale, first
    )
