"""Fills a model's parameters from a checkpoint, each rank reading only its own slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tpengine.config import ModelConfig
from tpengine.errors import ModelLoadError
from tpengine.layers.weights import Weights, WeightShard
from tpengine.models.checkpoint import TensorSource, checkpoint_files, open_checkpoint
from tpengine.models.registry import CausalLM, build_model

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
        _Filling(Path(config.model), config.load_format, weights, model).run()
    weights.finish()
    return model


def _fill_dummy(weights: Weights, seed: int) -> None:
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    for shard in weights.shards.values():
        if len(shard.full_shape) == 1:  # norms and biases: neutral enough
            shard.target.fill_(1.0)
        else:
            shard.target.normal_(0.0, _DUMMY_STD, generator=generator)


class _Filling:
    """One walk over the files of a checkpoint."""

    def __init__(self, folder: Path, load_format: str, weights: Weights, model: CausalLM) -> None:
        self._folder = folder
        self._load_format = load_format
        self._shards = weights.shards
        self._repeats = weights.repeats
        self._model = model
        self._missing = set(weights.shards)
        self._found_repeats: list[tuple[Path, str]] = []
        self._problems: list[str] = []

    def run(self) -> None:
        for path in checkpoint_files(self._folder, self._load_format):
            with open_checkpoint(path, self._load_format) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    self._take(path, name, file.get_slice(name))
        for path, name in self._found_repeats:
            with open_checkpoint(path, self._load_format) as file:
                self._compare(path, name, file.get_slice(name))
        for name in sorted(self._missing):
            self._problems.append(f"missing: {name} {list(self._shards[name].full_shape)}")
        if self._problems:
            raise ModelLoadError(
                f"the weights in {self._folder} do not fit the model "
                f"({len(self._problems)} tensors):\n  " + "\n  ".join(self._problems)
            )

    def _take(self, path: Path, name: str, source: TensorSource) -> None:
        wanted = name if name in self._shards else self._model.base_prefix + name
        if wanted in self._missing:
            self._missing.remove(wanted)
            self._read(path, name, source, self._shards[wanted])
        elif name in self._repeats:
            self._found_repeats.append((path, name))
        elif not name.endswith(self._model.ignored_weights):
            self._problems.append(f"unexpected: {name} in {path.name}")

    def _compare(self, path: Path, name: str, source: TensorSource) -> None:
        original = self._repeats[name]
        loaded = self._shards[original]
        again = replace(loaded, target=torch.zeros_like(loaded.target))
        num_problems = len(self._problems)
        self._read(path, name, source, again)
        if len(self._problems) == num_problems and not torch.equal(again.target, loaded.target):
            self._problems.append(
                f"contradiction: {name} in {path.name} differs from {original}, and config.json "
                "ties them (tie_word_embeddings); set it to false to use both"
            )

    def _read(self, path: Path, name: str, source: TensorSource, shard: WeightShard) -> None:
        shape = tuple(source.get_shape())
        if shape != shard.full_shape:
            self._problems.append(
                f"misshapen: {name} in {path.name} is {list(shape)}, "
                f"the model needs {list(shard.full_shape)}"
            )
            return
        target = shard.target
        if shard.dim is None:
            target.copy_(source[:] if shape else source[...])
            return
        part = slice(shard.start, shard.start + shard.length)
        if shard.split:
            target.copy_(source[part].unflatten(0, shard.split))
            return
        if shard.length < target.shape[shard.dim]:
            target.zero_()
            target = target.narrow(shard.dim, 0, shard.length)
        if shard.length:
            target.copy_(source[part] if shard.dim == 0 else source[:, part])
