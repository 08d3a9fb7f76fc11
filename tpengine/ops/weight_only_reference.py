"""The ops of `weight_only` in plain torch, and the layout that csrc/cuda/quantized reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GPU_PANEL = 32
"""Outputs that lie together."""
GPU_STEP = 32
"""Inputs that lie together."""

_ORDER = {4: (0, 4, 3, 5, 1, 6, 7, 2, 8), 8: (0, 4, 1, 3, 5, 6, 7, 2, 8)}
"""By bits: from `[panels, 2, 2, 8 outputs g, steps, 4 pieces t, 2, 2, 2]`, the numbers as outputs
and inputs count them, to the order of memory. The last dimensions share a word of 32 bits."""
_SHIFTS = {4: (0, 16, 4, 20, 8, 24, 12, 28), 8: (0, 16, 8, 24)}
_TURN = 3
"""Bits by which a word is turned left, see `unpack_field` in csrc."""
_WORD = (1 << 32) - 1


def num_blocks(size: int, block: int) -> int:
    """Returns how many blocks hold `size`."""
    return -(-size // block)


def packed_bytes(outputs: int, inputs: int, bits: int, group_size: int, offsets: int) -> int:
    """Returns the size of a packed weight."""
    panels = num_blocks(outputs, GPU_PANEL)
    factors = num_blocks(inputs, group_size) * 2 * (2 if offsets else 1)
    numbers = num_blocks(inputs, GPU_STEP) * GPU_STEP * bits // 8
    return panels * GPU_PANEL * (numbers + factors)


def pack_panels(
    packed: Tensor,
    first_output: int,
    outputs: int,
    q: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bits: int,
) -> None:
    """Writes some panels of a weight of `outputs` outputs; see `ops.weight_only.pack_groups`."""
    rows, steps = num_blocks(q.shape[0], GPU_PANEL), num_blocks(q.shape[1], GPU_STEP)
    panels = slice(first_output // GPU_PANEL, first_output // GPU_PANEL + rows)
    padded = F.pad(q, (0, steps * GPU_STEP - q.shape[1], 0, rows * GPU_PANEL - q.shape[0]))
    lanes = padded.view(rows, 2, 2, 8, steps, 4, 2, 2, 2).permute(_ORDER[bits])
    fields = lanes.reshape(-1, len(_SHIFTS[bits]))
    words = torch.zeros(len(fields), dtype=torch.int64, device=q.device)
    for i, shift in enumerate(_SHIFTS[bits]):
        words |= fields[:, i].long() << shift
    words = (words << _TURN | words >> (32 - _TURN)) & _WORD
    numbers, factors = _parts(packed, outputs, steps, bits)
    numbers[panels] = words.unsqueeze(1).view(torch.uint8)[:, :4].reshape(rows, -1)
    lines = [_by_group(part, rows) for part in (scales, offsets) if part is not None]
    factors[panels] = torch.stack(lines, dim=2).reshape(rows, -1)


def _parts(packed: Tensor, outputs: int, steps: int, bits: int) -> tuple[Tensor, Tensor]:
    """Returns views of the numbers, uint8, and the factors, float16, both by panel."""
    panels = num_blocks(outputs, GPU_PANEL)
    end = panels * steps * GPU_STEP * GPU_PANEL * bits // 8
    return packed[:end].view(panels, -1), packed[end:].view(torch.float16).view(panels, -1)


def _by_group(factors: Tensor, panels: int) -> Tensor:
    """`[rows, groups]` to `[panels, groups, 8, 4]`: rows g, g + 8, g + 16, g + 24 together."""
    padded = F.pad(factors.half(), (0, 0, 0, panels * GPU_PANEL - factors.shape[0]))
    return padded.view(panels, 4, 8, -1).permute(0, 3, 2, 1)


def _unpack(
    packed: Tensor, outputs: int, inputs: int, bits: int, group_size: int, offsets: int
) -> Tensor:
    """Returns the weight with its padding, float32: multiples of 32 outputs and inputs."""
    panels, steps = num_blocks(outputs, GPU_PANEL), num_blocks(inputs, GPU_STEP)
    numbers, factors = _parts(packed, outputs, steps, bits)
    words = numbers.reshape(-1).view(torch.int32).long() & _WORD
    words = (words >> _TURN | words << (32 - _TURN)) & _WORD
    fields = torch.stack([words >> shift & (1 << bits) - 1 for shift in _SHIFTS[bits]], dim=1)
    sizes = (panels, 2, 2, 8, steps, 4, 2, 2, 2)
    lanes = fields.view([sizes[dim] for dim in _ORDER[bits]])
    back = [_ORDER[bits].index(dim) for dim in range(len(sizes))]
    q = lanes.permute(back).reshape(panels * GPU_PANEL, -1).float()
    kinds = 2 if offsets else 1
    lines = factors.view(panels, -1, kinds, 8, 4).permute(2, 0, 4, 3, 1).float()
    by_output = lines.reshape(kinds, panels * GPU_PANEL, -1)
    factors = by_output.repeat_interleave(group_size, dim=2)[:, :, : q.shape[1]]
    scales = factors[0]
    if offsets == 2:  # rounded once: the product is exact in float64
        return (q.double() * scales.double() + factors[1].double()).float()
    zeros = factors[1] if offsets == 1 else torch.full_like(scales, 1 << (bits - 1))
    return q.sub_(zeros).mul_(scales)


def weight_only_linear(
    out: Tensor,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    offsets: int,
) -> None:
    """See `ops.weight_only.weight_only_linear`."""
    outputs, inputs = out.shape[1], x.shape[1]
    weight = _unpack(packed, outputs, inputs, bits, group_size, offsets)[:outputs, :inputs]
    out.copy_(F.linear(x.float(), weight, None if bias is None else bias.float()))


def dequantize_weight(
    out: Tensor,
    packed: Tensor,
    first_output: int,
    out_features: int,
    bits: int,
    group_size: int,
    offsets: int,
) -> None:
    """See `ops.weight_only.dequantize_weight`."""
    weight = _unpack(packed, out_features, out.shape[1], bits, group_size, offsets)
    out.copy_(weight[first_output : first_output + len(out)])
