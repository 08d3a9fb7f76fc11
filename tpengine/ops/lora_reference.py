"""The op of `lora` in plain torch, and the layout of adapters that csrc reads on CPU and GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LORA_TILE = 4
"""Columns of A's result that lie together: 64 bytes of each in turn (`kLoRATile` in csrc)."""
LORA_PANEL = 16
"""Outputs of B that lie together, those of each rank in turn (`kLoRAPanel` in csrc)."""
_LINE_BYTES = 64


def tile_shape(rank: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns the shape of A for one part: `[rank / 4, lines, 4, inputs of a line]`."""
    line = _LINE_BYTES // dtype.itemsize
    return num_blocks(rank, LORA_TILE), num_blocks(in_features, line), LORA_TILE, line


def num_blocks(size: int, block: int) -> int:
    """Returns how many blocks hold `size`."""
    return -(-size // block)


def pack_a(a: Tensor) -> Tensor:
    """Returns A `[rank, in_features]` as tiles, with zeros beyond both sizes; see `tile_shape`."""
    tiles, lines, _, line = tile_shape(len(a), a.shape[1], a.dtype)
    padded = _padded(a, tiles * LORA_TILE, lines * line)
    return padded.view(tiles, LORA_TILE, lines, line).transpose(1, 2).contiguous()


def pack_b(b: Tensor) -> Tensor:
    """Returns B `[out_features, rank]` as panels `[panels, rank, 16]`, with zeros beyond both.

    The rank is rounded up to a multiple of 4; a slot holds the panels of its rank without gaps.
    """
    outputs, rank = (num_blocks(*dim) for dim in zip(b.shape, (LORA_PANEL, LORA_TILE), strict=True))
    padded = _padded(b, outputs * LORA_PANEL, rank * LORA_TILE)
    return padded.view(outputs, LORA_PANEL, -1).transpose(1, 2).contiguous()


def _padded(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    if matrix.shape == (num_rows, num_columns):
        return matrix.contiguous()
    return F.pad(matrix, (0, num_columns - matrix.shape[1], 0, num_rows - len(matrix)))


def _unpack_a(tiles: Tensor, rank: int, in_features: int) -> Tensor:
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1] * tiles.shape[3])[:rank, :in_features]


def _unpack_b(panels: Tensor, rank: int, out_features: int) -> Tensor:
    padded = num_blocks(rank, LORA_TILE) * LORA_TILE
    packed = panels.reshape(-1)[: len(panels) * padded * LORA_PANEL].view(-1, padded, LORA_PANEL)
    return packed.transpose(1, 2).reshape(-1, padded)[:out_features, :rank]


def add_lora(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    first_outputs: Tensor,
    rows: Tensor,
    groups: Tensor,
    shrunk: Tensor,
) -> None:
    """See `ops.lora_ops.add_lora`."""
    first, columns = first_outputs.tolist(), shrunk.unflatten(1, (a.shape[1], -1))
    for slot, begin, end in groups.tolist():
        own, panel = rows[begin:end].long(), 0
        for part, rank in enumerate(ranks[slot].tolist()):
            size = first[part + 1] - first[part]
            panels = slice(panel, panel := panel + num_blocks(size, LORA_PANEL))
            if rank == 0 or begin == end:
                continue
            result = columns[begin:end, part, :rank]
            result.copy_(x[own].float() @ _unpack_a(a[slot, part], rank, x.shape[1]).float().t())
            added = result @ _unpack_b(b[slot, panels], rank, size).float().t()
            outputs = slice(first[part], first[part + 1])
            out[own, outputs] = (out[own, outputs].float() + added).to(out.dtype)
