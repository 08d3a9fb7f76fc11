"""The ops of `lora` in plain torch, as `reference` has the others."""

from __future__ import annotations

from torch import Tensor


def lora_shrink(shrunk: Tensor, x: Tensor, a: Tensor, rows: Tensor, groups: Tensor) -> None:
    """See `ops.lora.lora_shrink`."""
    for slot, begin, end in groups.tolist():
        own = rows[begin:end].long()
        shrunk[begin:end] = x[own].float() @ a[slot].float().t()


def lora_expand(
    out: Tensor,
    shrunk: Tensor,
    b: Tensor,
    rows: Tensor,
    groups: Tensor,
    first_output: int,
    first_column: int,
) -> None:
    """See `ops.lora.lora_expand`."""
    columns = slice(first_column, first_column + b.shape[2])
    outputs = slice(first_output, first_output + b.shape[1])
    for slot, begin, end in groups.tolist():
        own = rows[begin:end].long()
        added = shrunk[begin:end, columns] @ b[slot].float().t()
        out[own, outputs] = (out[own, outputs].float() + added).to(out.dtype)
