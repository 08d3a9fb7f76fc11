"""The ops of `quantized` in plain torch, as `reference` has the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpengine.ops.linear_reference import LINEAR_PANEL
from tpengine.ops.reference import local_rows

_STEP = 4
"""Inputs that one instruction multiplies."""

_TRIED_STEPS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""As `kTriedSteps` in csrc."""


NUMBERS, SIGNED, HALVES, PAIRS = range(4)
"""How the numbers of a block lie: as uint8; as int8, which are 128 less; of 4 bits, the first half
of a group in the low halves of the bytes, the second one in the high halves; or so of each pair of
eight groups the first and the second one."""


def numbers_of(blocks: Tensor, layout: int) -> Tensor:
    """Returns the numbers of blocks `[outputs, blocks, bytes]`, uint8 `[outputs, in_features]`."""
    if layout == SIGNED:
        blocks = blocks ^ 128
    elif layout != NUMBERS:
        parts = blocks.unflatten(2, (-1, 32 if layout == PAIRS else 16))
        blocks = torch.stack((parts & 15, parts >> 4), dim=3)
    return blocks.flatten(1)


def pack_groups(
    packed: Tensor,
    numbers: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bits: int,
    group_size: int,
    layout: int,
) -> None:
    """See `ops.quantized_ops.pack_quantized_into`."""
    outputs, groups = scales.shape
    panels = -(-outputs // LINEAR_PANEL)
    q = F.pad(numbers_of(numbers, layout), (0, 0, 0, -outputs % LINEAR_PANEL))
    # A step's four numbers move as one: transposing bytes is 5 x slower.
    steps = q.contiguous().view(torch.int32).view(panels, LINEAR_PANEL, -1).transpose(1, 2)
    if bits == 4:
        steps = steps[..., :16] | (steps[..., 16:] << 4)
    parts = [steps.contiguous().view(torch.uint8).view(panels, groups, -1)]
    for factors in (scales, offsets):
        if factors is not None:
            line = factors.new_zeros(panels * LINEAR_PANEL, groups, dtype=torch.float16)
            line[:outputs] = factors
            by_group = line.view(panels, LINEAR_PANEL, groups).transpose(1, 2).contiguous()
            parts.append(by_group.view(torch.uint8))
    torch.cat(parts, dim=2, out=packed.view(panels, groups, -1))


def dequantize_blocks(out: Tensor, blocks: Tensor, block_type: int) -> None:
    """Computes the values of superblocks of 256 numbers, as the library `gguf` does.

    Args:
        out: float32 `[rows, num_blocks * 256]`; written.
        blocks: uint8 `[rows, num_blocks, block_bytes]`; blocks may be strided.
        block_type: its number in GGUF: 13 (Q5_K) or 14 (Q6_K).

    Raises:
        RuntimeError: type, dtypes, shapes or strides do not fit.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(block_type)
    out.copy_(torch.from_numpy(dequantize(blocks.flatten(1).numpy(), kind)))


def quantize_weight(
    packed: Tensor, weight: Tensor, importance: Tensor | None, bits: int, group_size: int
) -> None:
    """See `ops.quantized_ops.quantize_weight_into`."""
    padded = F.pad(weight.float(), (0, 0, 0, -weight.shape[0] % LINEAR_PANEL))
    q, scales = round_to_groups(padded, bits, group_size, importance)
    pack_groups(packed, q.unflatten(1, (-1, group_size)), scales, None, bits, group_size, NUMBERS)


def round_to_groups(
    weight: Tensor, bits: int, group_size: int, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rounds a float32 weight to groups without offsets; `importance`: see
    `ops.quantized_ops.quantize_weight_into`.

    Returns:
        uint8 `[out_features, num_groups * group_size]` and float16 `[out_features, num_groups]`.
    """
    values = F.pad(weight, (0, -weight.shape[1] % group_size)).unflatten(1, (-1, group_size))
    middle = 1 << (bits - 1)
    if bits == 8:
        steps = values.abs().amax(2) / 127.0
    else:
        known = values.new_ones(weight.shape[1]) if importance is None else importance
        padded = F.pad(known, (0, -weight.shape[1] % group_size), value=1.0)
        steps = _best_steps(values, padded.view(-1, group_size))
    scales = steps.half()
    q = (_round_to(values, scales.float(), middle) + middle).flatten(1).to(torch.uint8)
    return q, scales


def _best_steps(values: Tensor, importance: Tensor) -> Tensor:
    """Returns per output and group the step whose numbers, -8 to 7, have the least square error,
    weighted by inputs, `[num_groups, group_size]`."""
    extreme = values.gather(2, values.abs().argmax(2, keepdim=True)).squeeze(2)
    best, gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for share in _TRIED_STEPS:
        q = _round_to(values, extreme * -0.125 * share, 8)
        product, square = torch.zeros_like(extreme), torch.zeros_like(extreme)
        for k in range(values.shape[2]):
            product = _fused(values[..., k] * importance[:, k], q[..., k], product)
            square = _fused(q[..., k] * importance[:, k], q[..., k], square)
        square = torch.where(square > 0.0, square, 1.0)
        new_gain = product * product / square
        best = torch.where(new_gain > gain, product / square, best)
        gain = torch.maximum(new_gain, gain)
    return torch.where(extreme.isfinite(), best, extreme)


def _round_to(values: Tensor, steps: Tensor, middle: int) -> Tensor:
    inverse = torch.where(steps != 0, torch.tensor(1.0) / steps, 0.0)
    numbers = (values * inverse.unsqueeze(2)).round().clamp(-middle, middle - 1)
    return numbers.nan_to_num(-middle)


def _unpack_groups(
    packed: Tensor, outputs: int, inputs: int, bits: int, group_size: int, offsets: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, `[outputs, groups, group_size]`, as stored less its zero point, and per output and
    group the scale, the zero point if it is the group's own, and the minimum, all float32."""
    groups, numbers = -(-inputs // group_size), group_size * bits * 4
    lines = packed.view(-(-outputs // LINEAR_PANEL), groups, -1)
    steps = lines[..., :numbers].reshape(*lines.shape[:2], group_size // 4, -1, 4)
    if bits == 4:
        steps = torch.cat([steps & 15, steps >> 4], dim=3)
    q = steps.permute(0, 3, 1, 2, 4).reshape(-1, groups, group_size)[:outputs].float()
    tail = lines[..., numbers:].contiguous().view(torch.float16).float()
    factors = tail.view(*lines.shape[:2], -1, LINEAR_PANEL).permute(2, 0, 3, 1)
    scales, *others = factors.reshape(len(factors), -1, groups)[:, :outputs]
    none = torch.zeros_like(scales)
    if offsets == 0:
        return q - (1 << (bits - 1)), scales, none, none
    return q, scales, others[0] if offsets == 1 else none, others[0] if offsets == 2 else none


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` in float32, rounded once: the product is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def _fours(x: Tensor) -> Tensor:
    """Returns the largest magnitude of each four inputs, `[num_rows, num_fours]`."""
    padded = F.pad(x.abs(), (0, -x.shape[1] % _STEP))
    return padded.view(len(x), -1, _STEP).amax(2)


def _limits(x: Tensor) -> Tensor:
    """Returns the magnitude of each row, `[num_rows, 1]`, that becomes 127; see `find_limit` in
    csrc: one four of 32, and at most four, may exceed it."""
    largest = x.abs().amax(dim=1, keepdim=True)
    fours, num_outliers = _fours(x), min(x.shape[1] // 128, 4)
    bits, most = largest.view(torch.int32), torch.zeros_like(largest, dtype=torch.int32)
    for step in (32, 16, 8, 4, 2, 1):
        lower = (bits - ((most + step) << 20)).view(torch.float32)
        fits = (most + step <= 55) & ((fours > lower).sum(1, keepdim=True) <= num_outliers)
        most = most + step * fits.int()
    is_usual = (largest > 1e-30) & (largest <= 3e38)
    return torch.where(is_usual, (bits - (most << 20)).view(torch.float32), largest)


def _high_parts(rounded: Tensor, x: Tensor, limits: Tensor) -> Tensor:
    """Returns the high parts, of the shape of `rounded`: 0 but for fours beyond the limit."""
    beyond = (_fours(x) > limits).repeat_interleave(_STEP, dim=1)
    beyond = F.pad(beyond, (0, rounded.shape[1] - beyond.shape[1]))
    return torch.where(beyond, (rounded / 128.0).round(), 0.0)


def quantized_linear(
    out: Tensor,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    offsets: int,
) -> None:
    """See `ops.quantized_ops.quantized_linear`."""
    inputs, outputs = x.shape[1], out.shape[1]
    parts = _unpack_groups(packed, outputs, inputs, bits, group_size, offsets)
    q, scales, zeros, minima = parts
    groups = scales.shape[1]
    limit = _limits(x.float())
    inverse = torch.where(limit > 0, torch.tensor(127.0) / limit, 0.0)
    rounded = F.pad((x.float() * inverse).round(), (0, groups * group_size - inputs))
    high = _high_parts(rounded, x.float(), limit)
    low = (rounded - 128.0 * high).view(-1, groups, group_size)
    sums = torch.einsum("mgk,ngk->gmn", low.double(), q.double()).float()  # exact before
    rounded = rounded.view(-1, groups, group_size)
    rows = rounded.sum(2)
    minima = minima if offsets == 2 else -zeros * scales
    total = torch.zeros(x.shape[0], outputs)
    for g in range(groups):
        total = _fused(sums[g], scales[:, g], total)
        if offsets:
            total = _fused(rows[:, g : g + 1], minima[:, g], total)
    is_whole = bits == 8 and groups == 1 and not offsets
    apart = torch.zeros_like(total)
    for first in range(0, inputs, inputs if is_whole else _STEP):
        place = slice(first, inputs if is_whole else first + _STEP)
        part = high[:, place].double() @ q.flatten(1)[:, place].double().T
        apart = _fused(part.float(), scales[:, first // group_size], apart)
    total = _fused(apart, torch.tensor(128.0), total)
    start = torch.zeros(outputs) if bias is None else bias.float()
    out.copy_(_fused(total, limit / 127.0, start))


def quantized_embedding(
    out: Tensor,
    packed: Tensor,
    token_ids: Tensor,
    num_embeddings: int,
    bits: int,
    group_size: int,
    offsets: int,
    scale: float = 1.0,
    first: int | None = None,
) -> None:
    """See `ops.quantized_ops.quantized_embedding`."""
    rows, absent = local_rows(token_ids.long(), num_embeddings, first)
    inputs = out.shape[1]
    parts = _unpack_groups(packed, num_embeddings, inputs, bits, group_size, offsets)
    q, scales, zeros, minima = (part[rows] for part in parts)
    weight = _fused(q - zeros.unsqueeze(2), scales.unsqueeze(2), minima.unsqueeze(2))
    out.copy_(weight.flatten(1)[:, :inputs] * scale)
    if absent is not None:
        out.masked_fill_(absent, 0)
