"""Which steps run without Python between their ops: recorded decode steps on CPU, graphs on GPUs.

`Recorder` makes them over a KV cache: those of the model, on CPU also those of steps in which rows
have adapters, and those of the model that makes drafts.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.lora import AdapterLayers
from tpengine.models.registry import CausalLM
from tpengine.ops.recording import has_recordings
from tpengine.worker.decode_recording import MAX_RECORDED_ROWS, DecodeRecording, try_to_record
from tpengine.worker.gpu.attention_plans import GpuAttention
from tpengine.worker.gpu.graphs import CudaCapture, DecodeGraphs, agree_on_graphs

ModelAndCache = tuple[CausalLM, list[KVCache]]
Recorded = DecodeGraphs | DecodeRecording


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """What runs decode steps; None: they run op by op.

    Attributes:
        steps: of the model.
        with_adapters: the same for steps in which a row has an adapter.
        drafts: of the model that makes drafts.
    """

    steps: Recorded | None = None
    with_adapters: Recorded | None = None
    drafts: Recorded | None = None

    def take_bytes(self) -> int:
        """Returns the memory that they take. Graphs are recorded to find it, and destroyed."""
        if isinstance(self.steps, DecodeGraphs):
            with contextlib.closing(self.steps):
                return self.steps.estimate_bytes()
        made = self.steps, self.with_adapters, self.drafts
        return sum(part.num_bytes for part in made if isinstance(part, DecodeRecording))


class Recorder:
    """Makes `RecordedSteps` for one rank.

    Args:
        gpu: None: on CPU.
        adapters: what adds to rows with an adapter; None: the engine serves none.
        entering: see `StageEnds`.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        parallel: ParallelState,
        gpu: GpuAttention | None,
        adapters: AdapterLayers | None,
        entering: torch.Tensor | None,
    ) -> None:
        self._config, self._device, self._parallel = config, device, parallel
        self._gpu, self._adapters, self._entering = gpu, adapters, entering
        self._all_record: bool | None = None

    def record(self, model: ModelAndCache, drafting: ModelAndCache | None = None) -> RecordedSteps:
        """Records decode steps; graphs of a GPU are still to be recorded, by `DecodeGraphs.record`.

        Args:
            drafting: the model that makes drafts; None: there is none.
        """
        steps, with_adapters, drafts = self._make(*model, self._entering), None, None
        if isinstance(steps, DecodeRecording) and self._adapters is not None:
            with_adapters = self._make(*model, self._entering, self._adapters)
        if drafting is not None:
            drafts = self._make(*drafting)
        return RecordedSteps(steps, with_adapters, drafts)

    def _make(
        self,
        model: CausalLM,
        kv_caches: list[KVCache],
        entering: torch.Tensor | None = None,
        adapters: AdapterLayers | None = None,
    ) -> Recorded | None:
        config = self._config
        makes_tokens = config.model.pooling is None
        if config.kernels.enforce_eager or not (model.recordable and makes_tokens):
            return None
        scheduler, encoder = config.scheduler, config.model.encoder
        block_size = config.cache.block_size
        limits = scheduler.max_sampled_rows, scheduler.max_num_batched_tokens
        sizes = min(*limits, MAX_RECORDED_ROWS), -(-scheduler.max_model_len // block_size)
        cross = 0 if encoder is None else -(-encoder.max_len // block_size)

        def forward(token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            hidden = None if entering is None else entering[: len(token_ids)]
            return model.forward(token_ids, kv_caches, metadata, hidden)

        if self._gpu is None:
            if has_recordings() and self._parallel.can_be_recorded:
                return try_to_record(forward, *sizes, adapters, entering, cross)
        elif self._uses_graphs() and encoder is None:
            capture = CudaCapture(self._device)
            return DecodeGraphs(forward, self._gpu.decode_batch, *sizes, self._device, capture)
        return None

    def _uses_graphs(self) -> bool:
        """Whether decode steps become CUDA graphs: the same at every rank."""
        if self._all_record is None:
            self._all_record = agree_on_graphs(self._parallel, self._device)
        return self._all_record
