"""Workers on the CPU that take a GPU's way: gathered context, a library's kernels for prompts,
padded decode batches at fixed addresses. Its ops are the same there, only graphs are replayed by
hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpengine.layers import gpu_attention
from tpengine.layers.prefill import SdpaBackend
from tpengine.worker.cuda_graph import DecodeGraphs, Run
from tpengine.worker.gpu import GpuAttention, attention_layers
from tpengine.worker.model_runner import ModelRunner
from tpengine.worker.worker import Worker


class GpuWalk:
    """Counts what a run went through."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0
        self.gathers = 0
        self.prefills = 0

    def capture(self, run: Run) -> Run:
        """In place of a graph: the run itself, over the memory that a graph would read."""
        run()

        def replay() -> torch.Tensor:
            self.replays += 1
            return run()

        return replay


def walk_the_gpus_way(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    """From here on every worker takes the GPU's way."""
    walk = GpuWalk()
    load, open_cache = Worker.load_model, Worker.init_cache_engine

    def load_model(self: Worker) -> None:
        load(self)
        model = self._require_runner().model
        assert len(list(attention_layers(model))) == self._config.model.num_layers
        attention = GpuAttention(model, self._config, self._dtype, self._cache_dtype, self._device)
        self._runner = ModelRunner(self._config, model, 0, self._device, self._parallel, attention)

    def init_cache_engine(self: Worker, *args: Any) -> None:
        open_cache(self, *args)
        if not self._config.cuda.enforce_eager:
            with torch.inference_mode():
                self._require_runner().record_graphs(walk.capture)

    def record(self: DecodeGraphs, sizes: Any = None, original: Any = DecodeGraphs.record) -> None:
        walk.sizes += self.sizes
        original(self, sizes)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            setattr(walk, name, getattr(walk, name) + 1)
            return function(*args)

        return call

    monkeypatch.setattr(Worker, "load_model", load_model)
    monkeypatch.setattr(Worker, "init_cache_engine", init_cache_engine)
    monkeypatch.setattr(DecodeGraphs, "record", record)
    monkeypatch.setattr(gpu_attention, "gather_kv", counted("gathers", gpu_attention.gather_kv))
    monkeypatch.setattr(SdpaBackend, "forward", counted("prefills", SdpaBackend.forward))
    return walk
