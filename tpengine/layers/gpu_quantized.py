"""A linear layer's weight on a GPU, in groups of 4 or 8 bits; activations stay in 16 bits.

For few rows the kernel dequantises in registers, and reads the weight once for each 16 rows. For
more, pieces of the weight are dequantised into memory that all layers share, small enough to stay
in a GPU's cache, and multiplied by torch. None of this has run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpengine.layers.weights import Weights
from tpengine.ops import weight_only
from tpengine.ops.quantized_ops import QuantizedFormat
from tpengine.ops.weight_only_reference import GPU_PANEL

KERNEL_ROWS = 32
"""Most rows for which the kernel multiplies. By bytes, not measured: dequantising writes and reads
2 bytes a weight, and the kernel reads 0.6 for each 16 rows in 4 bits."""
WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class GpuQuantizedForm:
    """See `layers.quantized_linear.LinearForm`.

    Attributes:
        workspace: uint8; of all layers, which run one after another.
    """

    weight: weight_only.GpuQuantizedWeight
    workspace: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.packed.nbytes

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        if len(x) <= KERNEL_ROWS and _kernel_takes(x):
            weight_only.weight_only_linear(out, x, self.weight, bias)
            return
        rows = self._rows_at_once(x.dtype)
        for first in range(0, self.weight.out_features, rows):
            part = slice(first, min(first + rows, self.weight.out_features))
            columns = self._dequantize(part, x.dtype).t()
            if bias is None:
                torch.mm(x, columns, out=out[:, part])
            else:
                torch.addmm(bias[part], x, columns, out=out[:, part])

    def _rows_at_once(self, dtype: torch.dtype) -> int:
        panel_bytes = GPU_PANEL * self.weight.padded_inputs * dtype.itemsize
        return max(1, self.workspace.numel() // panel_bytes) * GPU_PANEL

    def _dequantize(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns these outputs `[num_outputs, in_features]`, in the workspace."""
        width, count = self.weight.padded_inputs, outputs.stop - outputs.start
        whole = -(-count // GPU_PANEL) * GPU_PANEL
        matrix = self.workspace[: whole * width * dtype.itemsize].view(dtype).view(whole, width)
        weight_only.dequantize_weight(matrix, self.weight, outputs.start)
        return matrix[:count, : self.weight.in_features]


def _kernel_takes(x: torch.Tensor) -> bool:
    whole = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0
    return x.dtype != torch.float32 and whole


def is_on_gpu(weights: Weights) -> bool:
    """Whether weights take the form of this file, not that of a CPU."""
    return weights.device.type != "cpu"


def gpu_quantized_form(
    weight: torch.Tensor, form: QuantizedFormat, weights: Weights
) -> GpuQuantizedForm:
    """Rounds a weight on its device; `weights` counts and keeps what the layers share."""
    packed = weight_only.quantize_for_gpu(weight, form)
    return GpuQuantizedForm(packed, weights.workspace(WORKSPACE_BYTES))
