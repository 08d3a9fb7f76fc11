"""Random weights in groups of 4 and 8 bits, as they are stored on a GPU and as they are meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpengine.ops.quantized_ops import MINIMA, ZERO_POINTS, QuantizedFormat, per_output
from tpengine.ops.weight_only import GpuQuantizedWeight
from tpengine.ops.weight_only_reference import pack_panels, packed_bytes

from .cases import generator

INPUTS = 328  # no whole number of steps, groups or batches of loads
FORMATS = [
    *(QuantizedFormat(4, size, kind) for size in (32, 64, 128) for kind in range(3)),
    QuantizedFormat(4, 96, ZERO_POINTS),
    *(QuantizedFormat(8, 32, kind) for kind in range(3)),
    per_output(INPUTS),
]


@dataclass(frozen=True)
class Case:
    """A random weight: as it is stored, as it is meant (float64), and packed."""

    values: Tensor
    weight: GpuQuantizedWeight


def pack_groups(q: Tensor, scales: Tensor, offsets: Any, form: QuantizedFormat) -> Any:
    """Packs a weight that is quantised already."""
    packed = q.new_empty(packed_bytes(*q.shape, *form))
    pack_panels(packed, 0, len(q), q, scales, offsets, form.bits)
    return GpuQuantizedWeight(packed, form, *q.shape)


def make_case(form: QuantizedFormat, outputs: int, inputs: int = INPUTS) -> Case:
    gen = generator(outputs)
    middle, groups = 1 << (form.bits - 1), form.num_groups(inputs)
    q = torch.randint(0, 2 * middle, (outputs, inputs), generator=gen, dtype=torch.uint8)
    scales = (torch.randn(outputs, groups, generator=gen) * 0.01).half()
    offsets = torch.randn(outputs, groups, generator=gen).half()
    if form.offsets == ZERO_POINTS:
        offsets = torch.randint(0, 2 * middle + 1, scales.shape, generator=gen).half()
    packed = pack_groups(q, scales, offsets if form.offsets else None, form)
    each = [part.double().repeat_interleave(form.group_size, 1)[:, :inputs]
            for part in (scales, offsets)]  # fmt: skip
    if form.offsets == MINIMA:
        return Case(q.double() * each[0] + each[1], packed)
    zeros = each[1] if form.offsets == ZERO_POINTS else middle
    return Case((q.double() - zeros) * each[0], packed)
