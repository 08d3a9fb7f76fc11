"""The bytes that a model reports, from which the size of the KV cache is computed."""

from __future__ import annotations

import pytest
import torch
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.layers.linear import ReplicatedLinear
from tpengine.layers.weights import LoadedTensor, Weights
from tpengine.models.bloom import rank_alibi_slopes
from tpengine.models.loader import load_model

CPU = torch.device("cpu")


def make_weights(tp_size: int = 1, quantization: str | None = None) -> Weights:
    return Weights(torch.float32, CPU, ParallelState(0, tp_size), quantization)


# two panels of 32 outputs: 36 inputs, filled up to 64, and a scale each, or one per group of 32
@pytest.mark.parametrize(
    ("kind", "num_bytes"), [("int8", 2 * 32 * (64 + 2)), ("int4", 2 * 32 * 2 * (16 + 2))]
)
def test_quantized_layer(kind: str, num_bytes: int) -> None:
    weights = make_weights(quantization=kind)
    ReplicatedLinear(weights, "layer", 36, 40, bias=True)
    weights.read("layer.weight", LoadedTensor(torch.randn(40, 36)))
    weights.finish()
    assert weights.num_bytes == num_bytes + 40 * 4


@pytest.mark.parametrize("tp_size", [1, 2])
def test_alibi_slopes(tp_size: int) -> None:
    weights = make_weights(tp_size)
    assert rank_alibi_slopes(weights, 8).shape == (8 // tp_size,)
    assert weights.num_bytes == 4 * 8 // tp_size


def test_rotary_table_counts_once(models: ModelShop) -> None:
    def loaded_bytes(max_model_len: int) -> int:
        args = EngineArgs(str(models.folder(PLAIN)), max_model_len=max_model_len)
        weights = make_weights()
        load_model(args.create_engine_config("cpu").model, weights)
        return weights.num_bytes

    assert PLAIN.num_layers > 1
    assert loaded_bytes(600) - loaded_bytes(200) == 400 * PLAIN.head_dim * 4
