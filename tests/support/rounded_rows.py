"""Rows of inputs as products of 4 and 8 bits round them, and weights as they read them."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import quantized_ops as quantized


def quantize_weight(
    weight: Tensor, form: quantized.QuantizedFormat, importance: Tensor | None = None
) -> quantized.QuantizedWeight:
    result = quantized.empty_quantized(*weight.shape, form)
    quantized.quantize_weight_into(result, weight, importance)
    return result


def rounded_weight(weight: Tensor, form: quantized.QuantizedFormat) -> Tensor:
    """A weight as it is stored (`tests/ops` hold that against the original)."""
    out, ids = torch.empty_like(weight), torch.arange(len(weight), dtype=torch.int32)
    quantized.quantized_embedding(out, quantize_weight(weight, form), ids)
    return out


def limits_of(x: Tensor) -> Tensor:
    """Of the largest magnitude of each row and its neighbours below, by eighths of octaves, the
    least that few enough fours of the row exceed: `[num_rows, 1]`."""
    fours = torch.stack([four.abs().amax(1) for four in x.split(4, dim=1)], dim=1)
    largest = fours.amax(1, keepdim=True)
    bits, limit = largest.view(torch.int32), largest
    for eighths in range(56):
        lower = (bits - (eighths << 20)).view(torch.float32)
        fits = (fours > lower).sum(1, keepdim=True) <= min(x.shape[1] // 128, 4)
        limit = torch.where(fits & (largest > 0), lower, limit)
    return limit


def round_rows(values: Tensor) -> Tensor:
    """Rounds each row, of float32, to steps of its limit / 127."""
    rows = values.flatten(0, -2)
    limits = limits_of(rows).clamp(min=1e-30)
    numbers = (rows * (torch.full_like(limits, 127.0) / limits)).round()
    return (numbers * (limits / 127.0)).view(values.shape)
