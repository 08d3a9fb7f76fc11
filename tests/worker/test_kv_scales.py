"""Scales of K and V for an fp8 cache, of a checkpoint and of a file, on the way of a GPU; without a
card the ops are the references.

A power of two as a scale is exact. So a model whose K and V are larger by the scales must give the
tokens of the first model; without them its K and V are beyond what e4m3 holds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, open_engine, serve
from support.gpu_walk import GpuWalk, walk_the_gpus_way
from support.messages import refused, said
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs, config
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.layers import gpu_attention
from tpengine.ops import attention_ops, cache_ops
from tpengine.ops.library import REFERENCES

NAMES = ("{}_scale", "attn.{}_scale", "{0}_proj.{0}_scale", "{}_proj.output_scale", "kv_scale")
"""Ends of the names of tensors; {} stands for k and v."""
SECOND = 4.0
"""By what the scales of the second rank's heads are larger still."""
PROMPTS = [[5 + 7 * place % 400 for place in range(length)] for length in (40, 17, 3)]


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    for name in ("paged_attention", "rotary_write_kv_cache", "gather_kv"):
        place: Any = {"gather_kv": gpu_attention, "paged_attention": attention_ops}
        monkeypatch.setattr(place.get(name, cache_ops), name, REFERENCES[name])
    monkeypatch.setattr(config, "check_kv_cache_dtype", lambda wanted, device: None)
    return walk_the_gpus_way(monkeypatch)


def enlarged(
    models: ModelShop, folder: Path, pattern: str = "", second: float = 1.0, held: float = 0.0
) -> Path:
    """A model like `PLAIN` whose K and V are larger by the scales of the layers, in the second half
    of the heads by `second` more.

    Args:
        pattern: of the tensors that have the scales, or `held`; empty: there are none.
    """
    shutil.copytree(models.folder(PLAIN), folder)
    weights = load_file(folder / "model.safetensors")
    for layer, k in enumerate((1024.0, 4096.0)):
        prefix, v = f"model.layers.{layer}.self_attn.", k if pattern == "kv_scale" else k / 2
        for name, scale, power in (("q", k, -1), ("k", k, 1), ("v", v, 1), ("o", v, -1)):
            halves = weights[f"{prefix}{name}_proj.weight"].chunk(2, dim=int(name == "o"))
            halves[0].mul_(scale**power)
            halves[1].mul_((scale * second) ** power)
        if pattern:
            weights[prefix + pattern.format("k")] = torch.tensor(held or k)
            weights[prefix + pattern.format("v")] = torch.tensor(held or v)
    save_file(weights, folder / "model.safetensors")
    return folder


def write_scales(path: Path, num_ranks: int = 1, **changed: Any) -> str:
    ranks = {str(r): {"0": 1024.0 * SECOND**r, "1": 4096.0 * SECOND**r} for r in range(num_ranks)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks} | changed
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return str(path)


def tokens(folder: Path, tp_size: int = 1, **args: Any) -> list[tuple[int, ...]]:
    args = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 16, "max_model_len": 64, **args}
    if tp_size > 1:  # the configuration knows their number
        args |= {"tensor_parallel_size": tp_size, "executor": "processes"}
    with open_engine(folder, tp_size, num_device_blocks_override=32, **args) as engine:
        return [out.outputs[0].token_ids for out in serve(engine, PROMPTS, greedy(12))]


@pytest.mark.parametrize("pattern", NAMES)
def test_scales_of_a_checkpoint(
    models: ModelShop, tmp_path: Path, walk: GpuWalk, pattern: str
) -> None:
    expected = tokens(models.folder(PLAIN))
    assert tokens(enlarged(models, tmp_path / "scaled", pattern)) == expected
    assert min(walk.gathers, walk.prefills, walk.replays) > 0
    if pattern == NAMES[0]:
        assert tokens(enlarged(models, tmp_path / "bare")) != expected


@pytest.mark.parametrize("tp_size", [1, 2])
def test_scales_of_a_file_replace_those_of_the_checkpoint(
    models: ModelShop, tmp_path: Path, walk: GpuWalk, tp_size: int, caplog: Any
) -> None:
    folder = enlarged(models, tmp_path / "scaled", "kv_scale", SECOND ** (tp_size - 1), held=3.0)
    file = write_scales(tmp_path / "scales.json", tp_size)
    with said(caplog) as messages, caplog.at_level("INFO", "tpengine"):
        own = tokens(folder, tp_size, quantization_param_path=file)
    assert own == tokens(models.folder(PLAIN), tp_size)
    assert messages.count("fp8 KV cache: scales from quantization_param_path") == 1


def test_other_caches_need_no_scales(
    models: ModelShop, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The tensors are not read, whatever they hold."""
    plain = enlarged(models, tmp_path / "plain")
    folder = enlarged(models, tmp_path / "scaled", NAMES[0], held=-1.0)
    for kind in ("auto", "int8"):
        assert tokens(folder, kv_cache_dtype=kind) == tokens(plain, kv_cache_dtype=kind)
    request.getfixturevalue("walk")
    with refused(
        ModelLoadError, "0.self_attn.k_scale | is -1.0 | above 0 | quantization_param_path"
    ):
        tokens(folder)


@pytest.mark.parametrize(
    ("changed", "args", "words"),
    [
        ({"dtype": "e5m2"}, {}, "scales.json': kv_cache.dtype is 'e5m2', not 'float8_e4m3fn'"),
        ({"scaling_factor": {}}, {}, "the ranks of tensor_parallel_size, 0 to 0 | it has none"),
        ({"scaling_factor": {"0": {"0": 1.0}}}, {}, "layers of the model, 0 to 1, it has 0;"),
        ({"scaling_factor": {"0": {"0": 1.0, "1": 0}}}, {}, "layer 1 on rank 0 is 0 | above 0"),
        ({}, {"kv_cache_dtype": "auto"}, "no effect with kv_cache_dtype = 'auto' | use 'fp8', or"),
        ({}, {"quantization_param_path": Path("/a/b")}, "'/a/b' is no file; name one | out"),
        ({}, {"model": config.EMBEDDED_MODEL}, "layers of the model, 0 to 3, it has 0, 1; make it"),
    ],
)
def test_a_file_that_does_not_fit(
    models: ModelShop, tmp_path: Path, changed: Any, args: dict[str, Any], words: str
) -> None:
    path = write_scales(tmp_path / "scales.json", **changed)
    fields = {"model": str(models.folder(PLAIN)), "quantization_param_path": path}
    with refused((ConfigError, ModelLoadError), f"quantization_param_path = | {words}"):
        EngineArgs(**{**fields, "kv_cache_dtype": "fp8", **args}).create_engine_config("cuda")
