"""Which layers a pipeline stage has, and what it says of a checkpoint."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import refused
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from support.variants import VARIANTS
from support.workers import loaded_worker

from tpengine import EngineArgs
from tpengine.bench.harness import shape_folder
from tpengine.distributed.parallel_state import ParallelState, Stage
from tpengine.errors import ModelLoadError
from tpengine.layers.weights import Weights
from tpengine.models.registry import build_model
from tpengine.models.stages import divide, layers_of_stages

FOUR = TinyLlama(64, 4, 2, num_layers=4, tied=True)


@pytest.mark.parametrize(
    ("costs", "num_parts", "ends"),
    [
        ([1] * 12, 3, [4, 8, 12]),
        ([2] * 11 + [7], 2, [7, 12]),  # the head costs as much as two and a half layers
        ([9, 1, 1, 1, 1, 1], 3, [1, 3, 6]),
        ([10, 1, 1, 1], 2, [1, 4]),  # as with experts in the first layer only
        ([1, 1, 1], 3, [1, 2, 3]),
        ([5], 1, [1]),
    ],
)
def test_division(costs: list[int], num_parts: int, ends: list[int]) -> None:
    parts = divide(costs, num_parts)
    assert [part.stop for part in parts] == ends
    assert [part.start for part in parts] == [0, *ends[:-1]]


def test_the_output_head_counts_half() -> None:
    with shape_folder("llama-124m", 64) as folder:  # the head has 3.5 times a layer's numbers
        model = EngineArgs(folder, skip_tokenizer_init=True).create_engine_config("cpu").model
        assert layers_of_stages(model, 2) == [range(7), range(7, 12)]


@pytest.mark.parametrize("model_type", sorted({v.model_type for v in VARIANTS}))
def test_each_tensor_lies_on_one_stage(model_type: str, tmp_path: Path) -> None:
    """But a table that is tied to the head, which lies on two."""
    variant = next(v for v in VARIANTS if v.model_type == model_type)
    variant.write(tmp_path)
    model = EngineArgs(str(tmp_path)).create_engine_config("cpu").model
    layers, held, names = layers_of_stages(model, 2), Counter[str](), set[str]()
    for index in range(2):
        place = ParallelState(stage=Stage(index, 2, layers[index]))
        weights = Weights(torch.float32, torch.device("cpu"), place)
        made = build_model(model, weights)
        assert len(made.layers) == len(layers[index])
        held.update(weights.shards.keys() - weights.elsewhere)
        names |= weights.shards.keys()
    assert held.keys() == names
    twice = {name for name, count in held.items() if count > 1}
    assert twice == {made.embed_tokens.weight_name} & set(weights.repeats.values())


def test_every_stage_lists_what_is_wrong_at_any_of_them(models: ModelShop, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.folder(FOUR), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, file)
    args = {"pipeline_parallel_size": 2, "executor": "processes"}
    config = EngineArgs(str(folder), **args).create_engine_config("cpu")
    for index in range(2):
        words = (
            "missing: model.layers.0.mlp.up_proj.weight | missing: model.layers.3.mlp.up_proj"
            " | unexpected: model.layers.0.mlp.extra.weight | misshapen: model.norm.weight"
        )
        with refused(ModelLoadError, words):
            loaded_worker(config, ParallelState(stage=Stage(index, 2)))
