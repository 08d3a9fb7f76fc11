"""Fills a model's parameters from a checkpoint, each rank reading only its own slices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tpengine.config import ModelConfig
from tpengine.errors import ModelLoadError
from tpengine.layers.weights import Weights, WeightShard
from tpengine.logger import init_logger
from tpengine.models.registry import CausalLM, build_model

logger = init_logger(__name__)

_DUMMY_STD = 0.02


def load_model(config: ModelConfig, weights: Weights) -> CausalLM:
    """Builds the model and fills it as `config.load_format` says.

    Raises:
        ConfigError: the architecture is not supported.
        ModelLoadError: files are missing, broken, or do not hold what the model needs; one error
            lists every missing, unexpected and misshapen tensor.
    """
    model = build_model(config, weights)
    if config.load_format == "dummy":
        _fill_dummy(weights, config.seed)
    else:
        _fill_from_files(Path(config.model), weights, model.ignored_weights)
    weights.finish()
    return model


def _fill_dummy(weights: Weights, seed: int) -> None:
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    for shard in weights.shards.values():
        if shard.target.dim() == 1:  # norms and biases: neutral enough
            shard.target.fill_(1.0)
        else:
            shard.target.normal_(0.0, _DUMMY_STD, generator=generator)


def _fill_from_files(folder: Path, weights: Weights, ignored: tuple[str, ...]) -> None:
    missing = dict(weights.shards)
    problems: list[str] = []
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    shard = missing.pop(name, None)
                    if shard is not None:
                        problems += _read(file, name, shard, path.name)
                    elif not name.endswith(ignored):
                        problems.append(f"unexpected: {name} in {path.name}")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} cannot be read: {error}; the file is damaged or was not copied whole"
            ) from error
    problems += [f"missing: {name} {list(s.full_shape)}" for name, s in missing.items()]
    if problems:
        raise ModelLoadError(
            f"the weights in {folder} do not fit the model ({len(problems)} tensors):\n  "
            + "\n  ".join(problems)
        )


def _read(file: safe_open, name: str, shard: WeightShard, file_name: str) -> list[str]:
    source = file.get_slice(name)
    shape = tuple(source.get_shape())
    if shape != shard.full_shape:
        return [
            f"misshapen: {name} in {file_name} is {list(shape)}, "
            f"the model needs {list(shard.full_shape)}"
        ]
    target = shard.target
    if shard.dim is None:
        target.copy_(source[:] if shape else file.get_tensor(name))
        return []
    part = slice(shard.start, shard.start + shard.length)
    if shard.length < target.shape[shard.dim]:
        target.zero_()
        target = target.narrow(shard.dim, 0, shard.length)
    if shard.length:
        target.copy_(source[part] if shard.dim == 0 else source[:, part])
    return []


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one.

    Raises:
        ModelLoadError: there are none, the index is broken, names a file outside the folder, or
            one that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        whole = folder / "model.safetensors"
        found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelLoadError(
                f"{folder} has no *.safetensors files; convert the weights to safetensors, or "
                "use load_format='dummy' for random ones"
            )
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is not a valid index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index} names {name!r}, which lies outside the folder")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelLoadError(
            f"{folder} lacks {len(absent)} of the {len(names)} files that its index names: "
            f"{', '.join(absent)}"
        )
    return [folder / name for name in names]
