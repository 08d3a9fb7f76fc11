"""What the ranks of `test_load` do: they load their shards and note what that took.

A file of its own, for a rank imports it with all that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.ranks import Rank
from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights
from tpengine.models import loader

open_checkpoint = loader.open_checkpoint


@dataclass(frozen=True)
class LoadReport:
    """What one rank's loading took.

    Attributes:
        asked_bytes: by name of the checkpoint's tensors.
        weights_bytes: as the engine counts them.
        held_bytes: how much more memory of its own the process has than before.
        peak_bytes: how much more it had at most on the way, pages of the mapped file included.
    """

    asked_bytes: dict[str, int]
    weights_bytes: int
    held_bytes: int
    peak_bytes: int


class _CountingSource:
    def __init__(self, source: Any, name: str, asked: Counter[str]) -> None:
        self._source, self._name, self._asked = source, name, asked

    def get_shape(self) -> list[int]:
        shape: list[int] = self._source.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._source[index]
        self._asked[self._name] += part.nbytes
        return part


class _CountingFile:
    def __init__(self, file: Any, asked: Counter[str]) -> None:
        self._file, self._asked = file, asked

    def keys(self) -> list[str]:
        names: list[str] = self._file.keys()
        return names

    def get_slice(self, name: str) -> _CountingSource:
        return _CountingSource(self._file.get_slice(name), name, self._asked)


def load(state: Rank, config: ModelConfig, dtype: torch.dtype = torch.float32) -> LoadReport:
    """Loads this rank's shard; the second time the model of the first is replaced."""
    asked: Counter[str] = Counter()

    @contextmanager
    def counting(path: Path, load_format: str) -> Iterator[_CountingFile]:
        with open_checkpoint(path, load_format) as file:
            yield _CountingFile(file, asked)

    state.kept.clear()
    weights = Weights(dtype, torch.device("cpu"), ParallelState(state.rank, state.size))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(loader, "open_checkpoint", counting)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held, resident = _status("RssAnon"), _status("VmRSS")
        state.kept["model"] = loader.load_model(config, weights)
        peak = _status("VmHWM") - resident
    return LoadReport(dict(asked), weights.num_bytes, _status("RssAnon") - held, peak)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)
