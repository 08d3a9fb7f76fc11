"""The bytes that a model reports, from which the size of the KV cache is computed."""

from __future__ import annotations

import pytest
import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.gpu_quantized import WORKSPACE_BYTES
from tpengine.layers.linear import ReplicatedLinear
from tpengine.layers.weights import LoadedTensor, Weights
from tpengine.models.bloom import rank_alibi_slopes

CPU = torch.device("cpu")


def make_weights(tp_size: int = 1, quantization: str | None = None) -> Weights:
    return Weights(torch.float32, CPU, ParallelState(0, tp_size), quantization)


# two panels of 32 outputs: 36 inputs, filled up to 64, and a scale each, or one per group of 32
@pytest.mark.parametrize(
    ("kind", "num_bytes"), [("int8", 2 * 32 * (64 + 2)), ("int4", 2 * 32 * 2 * (16 + 2))]
)
@pytest.mark.parametrize(("on_gpu", "shared_bytes"), [(False, 0), (True, WORKSPACE_BYTES)])
def test_quantized_layers(
    kind: str, num_bytes: int, on_gpu: bool, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.layers.gpu_quantized.is_on_gpu", lambda weights: on_gpu)
    weights = make_weights(quantization=kind)
    for name in ("first", "second"):
        ReplicatedLinear(weights, name, 36, 40, bias=True)
        weights.read(f"{name}.weight", LoadedTensor(torch.randn(40, 36)))
    weights.finish()
    assert weights.num_bytes == 2 * (num_bytes + 40 * 4) + shared_bytes


@pytest.mark.parametrize("tp_size", [1, 2])
def test_alibi_slopes(tp_size: int) -> None:
    weights = make_weights(tp_size)
    assert rank_alibi_slopes(weights, 8).shape == (8 // tp_size,)
    assert weights.num_bytes == 4 * 8 // tp_size
