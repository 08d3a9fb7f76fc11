"""Workers on the CPU that take a GPU's way: gathered context, a library's kernels for prompts,
padded decode batches at fixed addresses, steps begun before the driver asks. Its ops are the same
there, only graphs are replayed by hand, and sampled ids reach the host when they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tpengine.config import SchedulerConfig
from tpengine.engine_args import EngineArgs
from tpengine.layers import gpu_attention
from tpengine.layers.gpu_attention import SdpaBackend
from tpengine.messages import StepInput
from tpengine.worker import model_runner
from tpengine.worker.gpu.attention_plans import GpuAttention, attention_layers
from tpengine.worker.gpu.graphs import Capture, DecodeGraphs, Recorded, Run
from tpengine.worker.gpu.run_ahead import BegunStep, Division
from tpengine.worker.model_runner import ModelRunner
from tpengine.worker.worker import Worker


class GpuWalk:
    """Counts what a run went through.

    Attributes:
        begun, taken: rows that were computed before the driver asked, and of them those that it
            then asked for.
        whole: steps of which nothing was left to compute.
        early: steps that were begun before the ids of the step before had come.
    """

    def __init__(self) -> None:
        self.begun = self.taken = self.whole = self.early = 0
        self.sizes: list[int] = []
        self.replays = 0
        self.gathers = 0
        self.prefills = 0

    def captures(self) -> Capture:
        """In place of a rank's graphs: the runs themselves, over the memory that a graph would
        read."""
        outputs: list[torch.Tensor] = []

        def capture(run: Run) -> Recorded:
            output = run()
            outputs.append(output)

            def replay() -> torch.Tensor:
                self.replays += 1
                result = run()
                for other in outputs:  # graphs share their memory
                    other.fill_(float("nan"))
                return output.copy_(result)

            return Recorded(replay, lambda: None)

        return capture

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """In place of copies on a stream of their own."""
        begun = self.begun

        def finish() -> list[np.ndarray]:
            self.early += self.begun > begun
            return [tensor.numpy() for tensor in tensors]

        return finish


def walk_the_gpus_way(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    """From here on every worker takes the GPU's way."""
    walk = GpuWalk()
    load, open_cache = Worker.load_model, Worker.init_cache_engine
    settle, begin, divide = (
        EngineArgs._scheduler_config,
        ModelRunner._begin_next,
        model_runner.divide,
    )

    def load_model(self: Worker) -> None:
        load(self)
        model = self._require_runner().model
        assert len(list(attention_layers(model))) == self._config.model.num_layers
        attention = GpuAttention(model, self._config, self._dtype, self._cache_dtype, self._device)
        self._runner = ModelRunner(self._config, model, 0, self._device, self._parallel, attention)
        self._runner.works_ahead = True
        self._runner._downloads.start = walk.download  # type: ignore[method-assign]

    def scheduler_config(self: EngineArgs, *args: Any) -> SchedulerConfig:
        return replace(settle(self, *args), looks_ahead=self.async_scheduling)

    def begin_next(self: ModelRunner, step: StepInput, *args: Any) -> None:
        walk.begun += len(step.next_slots)
        begin(self, step, *args)

    def count_taken(step: StepInput, begun: BegunStep) -> Division:
        left = divide(step, begun)
        walk.taken += len(step.slots) - len(left.slots)
        walk.whole += not left.slots
        return left

    def init_cache_engine(self: Worker, *args: Any) -> None:
        open_cache(self, *args)
        if not self._config.kernels.enforce_eager:
            with torch.inference_mode():
                self._require_runner().record_graphs(walk.captures())

    def record(self: DecodeGraphs, sizes: Any = None, original: Any = DecodeGraphs.record) -> None:
        walk.sizes += self.sizes
        original(self, sizes)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            setattr(walk, name, getattr(walk, name) + 1)
            return function(*args)

        return call

    monkeypatch.setattr(EngineArgs, "_scheduler_config", scheduler_config)
    monkeypatch.setattr(ModelRunner, "_begin_next", begin_next)
    monkeypatch.setattr(model_runner, "divide", count_taken)
    monkeypatch.setattr(Worker, "load_model", load_model)
    monkeypatch.setattr(Worker, "init_cache_engine", init_cache_engine)
    monkeypatch.setattr(DecodeGraphs, "record", record)
    monkeypatch.setattr(gpu_attention, "gather_kv", counted("gathers", gpu_attention.gather_kv))
    monkeypatch.setattr(SdpaBackend, "forward", counted("prefills", SdpaBackend.forward))
    return walk
