"""The work of the ranks in `test_load`: load a shard, and report how many bytes that took.

It stands in a file of its own, because each rank imports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resident import status_bytes

from distributed.ranks import Rank
from tpengine.checkpoint import loader
from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights

read_tensors = loader.read_tensors


@dataclass(frozen=True)
class LoadReport:
    """Bytes that one rank read and held.

    Attributes:
        asked_bytes: bytes read of each tensor of the checkpoint, by name.
        weights_bytes: as `Weights.num_bytes` counts them.
        held_bytes: growth of the process's anonymous memory.
        peak_bytes: largest growth of its resident memory, pages of the mapped file included.
    """

    asked_bytes: dict[str, int]
    weights_bytes: int
    held_bytes: int
    peak_bytes: int


class _CountingSource:
    def __init__(self, source: Any, name: str, asked: Counter[str]) -> None:
        self._source, self._name, self._asked = source, name, asked

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._source[index]
        self._asked[self._name] += part.nbytes
        return part


def load(state: Rank, config: ModelConfig, dtype: torch.dtype = torch.float32) -> LoadReport:
    """Loads this rank's shard; a second call replaces the model of the first."""
    asked: Counter[str] = Counter()

    def counting(path: Path) -> Iterator[tuple[str, _CountingSource]]:
        for name, source in read_tensors(path):
            yield name, _CountingSource(source, name, asked)

    state.kept.clear()
    weights = Weights(dtype, torch.device("cpu"), ParallelState(state.rank, state.size))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(loader, "read_tensors", counting)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held, resident = status_bytes("RssAnon"), status_bytes("VmRSS")
        state.kept["model"] = loader.load_model(config, weights)
        peak = status_bytes("VmHWM") - resident
    return LoadReport(dict(asked), weights.num_bytes, status_bytes("RssAnon") - held, peak)
