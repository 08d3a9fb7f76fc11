"""Workers on the CPU that run the code path of a GPU: gathered context, a library's kernels for
prompts, padded decode batches at fixed addresses, steps launched on ids that are on their way.

The ops are the same on the CPU. Substitutes replay the graphs and copy the sampled ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import with_steps_in_flight
from tpengine.config import EngineConfig
from tpengine.engine_args import EngineArgs
from tpengine.layers import gpu_attention as gpu_attention_layer
from tpengine.layers.gpu_attention import SdpaBackend
from tpengine.messages import StepInput
from tpengine.worker.gpu import graphs
from tpengine.worker.gpu.attention_plans import GpuAttention, attention_layers
from tpengine.worker.gpu.graphs import Capture, DecodeGraphs, Recorded, Run
from tpengine.worker.input_batch import StepArrays
from tpengine.worker.model_runner import ModelRunner
from tpengine.worker.recorder import Recorder
from tpengine.worker.transfers import Downloads
from tpengine.worker.worker import Worker


class GpuWalk:
    """Counts what happens in a run.

    Attributes:
        ahead: rows whose token only the device knew when they were launched.
        whole: steps with such rows alone.
        early: steps that were launched before the ids of the previous step had arrived.
    """

    def __init__(self) -> None:
        self.ahead = self.whole = self.early = 0
        self.sizes: list[int] = []
        self.replays = 0
        self.gathers = 0
        self.prefills = 0

    def captures(self) -> Capture:
        """Replaces CUDA graphs: a replay runs the model again over the memory that a graph would
        read."""
        outputs: list[torch.Tensor] = []

        def capture(run: Run) -> Recorded:
            output = run()
            outputs.append(output)

            def replay() -> torch.Tensor:
                self.replays += 1
                result = run()
                for other in outputs:  # graphs share memory
                    other.fill_(float("nan"))
                return output.copy_(result)

            return Recorded(replay, lambda: None)

        return capture

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """Replaces copies on a separate stream."""
        ahead = self.ahead

        def finish() -> list[np.ndarray]:
            self.early += self.ahead > ahead
            return [tensor.numpy() for tensor in tensors]

        return finish


def gpu_attention(worker: Worker, model: Any) -> GpuAttention:
    """Replaces `Worker._make_gpu_attention`: makes on the CPU what attention needs on a GPU."""
    assert len(list(attention_layers(model))) == worker._config.model.num_layers
    return GpuAttention(
        model, worker._config, worker._dtype, worker._cache_dtype, torch.device("cpu")
    )


def record_graphs(
    monkeypatch: pytest.MonkeyPatch,
    make_capture: Callable[[torch.device], Capture],
    num_bytes: int = 0,
) -> None:
    """Has workers on the CPU record graphs from now on, which take so many bytes of a device."""
    growth = SimpleNamespace(num_bytes=lambda: num_bytes)
    monkeypatch.setattr(Worker, "_make_gpu_attention", gpu_attention)
    monkeypatch.setattr(Recorder, "_uses_graphs", lambda self: True)
    monkeypatch.setattr("tpengine.worker.recorder.CudaCapture", make_capture)
    monkeypatch.setattr(graphs, "CudaGrowth", lambda device: growth)


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    return walk_the_gpus_way(monkeypatch)


def walk_the_gpus_way(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    """Makes every worker run the code path of a GPU from now on."""
    walk = GpuWalk()
    configure, find_ids = EngineArgs.create_engine_config, ModelRunner._ids_in_flight

    def with_two_steps(self: EngineArgs, device: str) -> EngineConfig:
        num_steps = 1 if self.async_scheduling is False else 2
        return with_steps_in_flight(configure(self, device), num_steps)

    def count_ids(self: ModelRunner, step: StepInput, arrays: StepArrays) -> Any:
        token_ids = find_ids(self, step, arrays)
        if token_ids is not None:
            pending = self._pending[-1]
            sampled = set(pending.step.sample_slots) - pending.freed_slots
            count = len(sampled.intersection(step.slots))
            walk.ahead += count
            walk.whole += count == len(step.slots)
        return token_ids

    def record(self: DecodeGraphs, original: Any = DecodeGraphs.record) -> None:
        walk.sizes += self.sizes
        original(self)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            setattr(walk, name, getattr(walk, name) + 1)
            return function(*args)

        return call

    monkeypatch.setattr(EngineArgs, "create_engine_config", with_two_steps)
    monkeypatch.setattr(ModelRunner, "_ids_in_flight", count_ids)
    record_graphs(monkeypatch, lambda device: walk.captures())
    monkeypatch.setattr(Worker, "_works_ahead", True)
    monkeypatch.setattr(Downloads, "start", lambda self, tensors: walk.download(tensors))
    monkeypatch.setattr(DecodeGraphs, "record", record)
    monkeypatch.setattr(
        gpu_attention_layer, "gather_kv", counted("gathers", gpu_attention_layer.gather_kv)
    )
    monkeypatch.setattr(SdpaBackend, "run", counted("prefills", SdpaBackend.run))
    return walk
