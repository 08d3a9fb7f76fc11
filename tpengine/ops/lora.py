"""Low-rank additions of many adapters to the rows of one batch (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)

_lora_shrink = torch.ops.tpengine.lora_shrink.default
_lora_expand = torch.ops.tpengine.lora_expand.default


@dataclass(frozen=True)
class LoRARows:
    """The rows of a batch that have an adapter, on the batch's device.

    Attributes:
        rows: int32 `[num_lora_rows]`, rows of the batch; those of one adapter beside each other.
        groups: int32 `[num_groups, 3]`: slot, begin and end in `rows`. A group may be empty, and
            entries of `rows` that are in no group are not read: a recorded step has all places.
    """

    rows: Tensor
    groups: Tensor


def lora_shrink(shrunk: Tensor, x: Tensor, a: Tensor, lora_rows: LoRARows) -> None:
    """`shrunk[i] = x[rows[i]] A[slot]^T`, accumulated in float32.

    Args:
        shrunk: float32 `[num_lora_rows, num_columns]`; written for the rows of groups.
        x: `[num_rows, in_features]`, float32 or bfloat16.
        a: `[num_slots, num_columns, in_features]`, float32 or bfloat16.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _lora_shrink(shrunk, x, a, lora_rows.rows, lora_rows.groups)


def lora_expand(
    out: Tensor,
    shrunk: Tensor,
    b: Tensor,
    lora_rows: LoRARows,
    first_output: int,
    first_column: int,
) -> None:
    """`out[rows[i], first_output:][:n] += shrunk[i, first_column:][:rank] B[slot]^T`.

    Args:
        out: `[num_rows, out_features]`, float32 or bfloat16; other elements stay.
        shrunk: from `lora_shrink`.
        b: `[num_slots, n, rank]`, of one dtype with A.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _lora_expand(out, shrunk, b, lora_rows.rows, lora_rows.groups, first_output, first_column)
