"""Runs the model, from a step's message to sampled tokens: the worker owns the place, this the
work."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.attention import KVCache, keep_rows
from tpengine.layers.sampler import Sampled, SamplingBatch, sample, sampling_columns
from tpengine.logger import init_logger
from tpengine.messages import PromptLogprobs, StepInput, StepOutput
from tpengine.models.registry import CausalLM
from tpengine.ops.recording import has_recordings
from tpengine.worker.cache_engine import CacheEngine
from tpengine.worker.decode_recording import DecodeRecording, NotRecordableError
from tpengine.worker.dummy_step import dummy_arrays, worst_sampling
from tpengine.worker.gpu.attention_plans import GpuAttention
from tpengine.worker.gpu.graphs import LARGEST_SIZE, Capture, DecodeGraphs, graph_sizes
from tpengine.worker.gpu.run_ahead import BegunStep, divide
from tpengine.worker.input_batch import InputBatch, StepArrays, upload_step
from tpengine.worker.memory import cuda_peak_bytes
from tpengine.worker.prompt_logprobs import (
    PROMPT_SLICE_ROWS,
    PromptRow,
    compute_prompt_logprobs,
    find_prompt_rows,
)
from tpengine.worker.transfers import Downloads, Uploads, end_of_work

logger = init_logger(__name__)


class ModelRunner:
    """The model, its running batch and, once allocated, its KV cache.

    Args:
        gpu: what attention needs there; None: on CPU.

    Attributes:
        works_ahead: whether the device computes while this process does something else, so that
            the step that is likely to come next is begun before it is asked for.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        weights_bytes: int,
        device: torch.device,
        parallel: ParallelState,
        gpu: GpuAttention | None = None,
    ) -> None:
        self.model = model
        self.weights_bytes = weights_bytes
        self._config = config
        self._device = device
        self._parallel = parallel
        self._gpu = gpu
        # Exchanges through the host would hold up this step's answer for the next one's layers.
        self.works_ahead = device.type == "cuda" and parallel.can_be_recorded
        self._begun: BegunStep | None = None
        self._answered_at = 0.0
        self._recorded: DecodeGraphs | DecodeRecording | None = None
        self._downloads = Downloads(device, parallel.wait_for)
        self._batch: InputBatch | None = None
        self._kv_caches: list[KVCache] = []
        self._cache_engine: CacheEngine | None = None

    def drop_recordings(self) -> None:
        """Destroys what was recorded; steps go without from here on."""
        recorded, self._recorded, self._begun = self._recorded, None, None
        if isinstance(recorded, DecodeGraphs):
            recorded.close()

    def detach_cache(self) -> None:
        """Lets go of the cache and of what was recorded over it."""
        self.drop_recordings()
        self._cache_engine = None
        self._kv_caches = []

    def attach_cache(self, cache_engine: CacheEngine) -> None:
        """Hands over the cache; from here on steps can be executed."""
        self.drop_recordings()
        self._cache_engine = cache_engine
        self._kv_caches = cache_engine.kv_caches
        self._batch = InputBatch(
            self._config.scheduler.max_num_seqs,
            self._config.scheduler.max_model_len,
            self._config.cache.block_size,
            Uploads(self._device, self._parallel.wait_for),
        )

    def execute(self, step: StepInput) -> StepOutput:
        """Computes all rows of the step and samples where it says so.

        Rank 0 samples, and all ranks feed themselves with its ids. What else was found out about
        a sample (log probabilities, candidates, errors) is in rank 0's answer only.
        """
        batch = self._batch
        cache_engine = self._cache_engine
        assert batch is not None, "execute before attach_cache"
        assert cache_engine is not None
        batch.apply(step)
        if step.block_moves:
            cache_engine.move(step.block_moves)
        prompt_rows = find_prompt_rows(step, batch)
        last_positions = batch.last_positions(step)
        samples_here = step.sample_rows and self._parallel.tp_rank == 0
        sampling = batch.sampling_batch(step) if samples_here else None
        if sampling is not None and self._gpu is not None and sampling.temperature.any():
            sampling.on_device = batch.uploads.send(sampling_columns(sampling))
        begun, self._begun = self._begun, None
        # Prompts' log probabilities need every token's hidden state; and a row that is sampled for
        # several sequences would go through the last layer as many times.
        rows = step.sample_rows
        selects_late = bool(prompt_rows) or len(set(rows)) < len(rows)
        forward = self._continue(step, batch, begun, None if selects_late else last_positions)
        start = time.perf_counter()
        if begun is not None and not begun.is_done():  # it has been at it since the last answer
            start = self._answered_at
        hidden = forward()
        output = StepOutput(step.step, [])
        finish_prompts = self._start_prompt_logprobs(hidden, prompt_rows)
        sampled_ids = np.empty(0, np.int64)
        if step.sample_rows:
            if selects_late:
                hidden = keep_rows(hidden, last_positions)
            sampled = self._sample(self.model.compute_logits(hidden), sampling, step)
            finish = self._downloads.start([sampled.token_ids, *sampled.findings.tensors])
            batch.note_computed(step)
            if self.works_ahead and step.next_slots:
                self._begin_next(step, batch, sampled.token_ids)
            sampled_ids, *arrays = finish()
            output.token_ids = sampled_ids.tolist()
            found = sampled.findings.read(arrays)
            output.logprobs, output.candidates = found.logprobs, found.candidates
            output.errors = found.errors
        else:
            batch.note_computed(step)
        output.prompt_logprobs = finish_prompts()
        self._answered_at = time.perf_counter()
        output.model_s = self._answered_at - start
        batch.append(step, sampled_ids)
        return output

    def _continue(
        self,
        step: StepInput,
        batch: InputBatch,
        begun: BegunStep | None,
        wanted: torch.Tensor | None,
    ) -> Callable[[], torch.Tensor]:
        """Sends to the device what it has not computed yet of a step. What this returns computes
        that, and gives the hidden states of the tokens that are wanted; None: of all."""
        if begun is None:
            arrays = batch.arrays(step.slots, step.num_scheduled_tokens)
            return self._prepare(arrays, batch, wanted=wanted)
        left, hidden = divide(step, begun), begun.hidden
        if left.source is None:
            return lambda: keep_rows(hidden, wanted)
        source = batch.uploads.send([left.source])[0]
        if not left.slots:
            return lambda: keep_rows(hidden.index_select(0, source), wanted)
        hidden = hidden.clone()  # a graph writes its next result to the same place
        forward = self._prepare(batch.arrays(left.slots, left.num_scheduled_tokens), batch)
        return lambda: keep_rows(torch.cat([hidden, forward()]).index_select(0, source), wanted)

    def _begin_next(self, step: StepInput, batch: InputBatch, sampled: torch.Tensor) -> None:
        """Runs the model on what was just sampled, whose ids only the device knows yet.

        Args:
            sampled: int64, in the order of `step.sample_slots`.
        """
        if step.next_slots != step.sample_slots:
            places = {slot: place for place, slot in enumerate(step.sample_slots)}
            chosen = np.array([places[slot] for slot in step.next_slots])
            sampled = sampled.index_select(0, batch.uploads.send([chosen])[0])
        arrays = batch.arrays(step.next_slots, [1] * len(step.next_slots))
        hidden = self._prepare(arrays, batch, sampled)()
        self._begun = BegunStep(step.next_slots.copy(), hidden, end_of_work(self._device))

    def _prepare(
        self,
        arrays: StepArrays,
        batch: InputBatch,
        sampled: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Sends rows' inputs to the device; what it returns runs the model on them.

        Args:
            sampled: their ids, where the device alone knows them.
            wanted: the tokens whose hidden states it gives; None: all.
        """
        if self._recorded is not None and self._recorded.fits(arrays):
            assert self._cache_engine is not None
            self._cache_engine.kv_caches.wait()  # a recording does not go through the layers
            run = self._recorded.prepare(arrays, batch.uploads, sampled)
            return lambda: keep_rows(run(), wanted)
        token_ids, metadata = upload_step(arrays, batch.uploads)
        metadata.wanted_rows = wanted
        if sampled is not None:
            token_ids = sampled.int()
        if self._gpu is not None:
            metadata.gpu = self._gpu.batch(arrays, metadata.query_start_loc, batch.uploads)
        return lambda: self.model.forward(token_ids, self._kv_caches, metadata)

    def record_graphs(self, capture: Capture) -> None:
        """Records the graphs of decode steps over the attached cache; they are used from here on.

        Raises:
            GraphCaptureError: see `DecodeGraphs.record`.
        """
        graphs = self.make_graphs(self._kv_caches, capture)
        start = time.perf_counter()
        self._recorded = graphs  # before they are all there: whoever fails drops them
        graphs.record()
        logger.info(
            "CUDA graphs of %d batch sizes up to %d recorded in %.1f s",
            len(graphs.sizes),
            graphs.sizes[-1],
            time.perf_counter() - start,
        )

    def record_decodes(self) -> None:
        """Records decode steps over the attached cache, on CPU; they are used from here on."""
        self._recorded = self.make_recording(self._kv_caches)

    def make_recording(self, kv_caches: list[KVCache]) -> DecodeRecording | None:
        """The model's decode steps over some cache, on CPU; None: not all of it can be recorded."""
        if not has_recordings() or not self._parallel.can_be_recorded:
            return None
        try:
            return DecodeRecording(
                lambda token_ids, metadata: self.model.forward(token_ids, kv_caches, metadata),
                self._most_rows,
                self._max_blocks,
            )
        except NotRecordableError as error:
            logger.debug("decode steps run op by op: %s", error)
            return None

    def make_graphs(self, kv_caches: list[KVCache], capture: Capture) -> DecodeGraphs:
        """Graphs of the model over some cache, none of them recorded."""
        gpu = self._gpu
        return DecodeGraphs(
            lambda token_ids, metadata: self.model.forward(token_ids, kv_caches, metadata),
            lambda: None if gpu is None else gpu.decode_batch(),
            graph_sizes(self._most_rows),
            self._max_blocks,
            self._device,
            capture,
        )

    @property
    def _most_rows(self) -> int:
        """Rows of the largest decode step that is recorded; a larger one hides its launches."""
        scheduler = self._config.scheduler
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, LARGEST_SIZE)

    @property
    def _max_blocks(self) -> int:
        return -(-self._config.scheduler.max_model_len // self._config.cache.block_size)

    def _sample(
        self, logits: torch.Tensor, sampling: SamplingBatch | None, step: StepInput
    ) -> Sampled:
        """Rank 0 samples from its logits; the others (sampling is None) learn the ids."""
        if sampling is None:
            ids = torch.empty(len(step.sample_slots), dtype=torch.int64, device=self._device)
            return Sampled(self._parallel.broadcast(ids))
        if sampling.edits is not None and sampling.edits.processors:
            # Functions of users, which may wait for their logits without a bound.
            self._parallel.wait_for(end_of_work(self._device), "a step")
        sampled = sample(logits, sampling)
        sampled.token_ids = self._parallel.broadcast(sampled.token_ids)
        return sampled

    def _start_prompt_logprobs(
        self, hidden: torch.Tensor, rows: list[PromptRow]
    ) -> Callable[[], dict[int, PromptLogprobs]]:
        """Computes them; what it returns waits for the answer."""
        if not rows:
            return dict
        logits_rows = self._max_logits_rows
        pending = compute_prompt_logprobs(hidden, rows, self.model.compute_logits, logits_rows)
        finish = self._downloads.start(pending.tensors)
        return lambda: pending.read(finish())

    @property
    def _max_logits_rows(self) -> int:
        """Rows of logits that are held at once: those that are sampled, or a slice of a prompt
        whose log probabilities are wanted. The memory profile is taken with as many."""
        scheduler = self._config.scheduler
        num_rows = max(scheduler.max_num_seqs, PROMPT_SLICE_ROWS)
        return min(num_rows, scheduler.max_num_batched_tokens)

    def run_worst_case(self, kv_caches: list[KVCache]) -> int:
        """Runs the most expensive step that the scheduler may ask for, over a cache of one block.

        Writes go nowhere and every row reads block 0, so that what is measured is the activations
        alone.

        Returns:
            On a GPU the peak of the model's activations, without logits and sampling, in bytes.
        """
        scheduler = self._config.scheduler
        num_tokens = scheduler.max_num_batched_tokens
        num_seqs = min(scheduler.max_num_seqs, num_tokens)
        if self._gpu is not None:  # whose attention may take more for long prompts than for many
            longest = scheduler.max_model_len
            self._run_dummy(np.array([longest] * max(1, num_tokens // longest)), kv_caches)
        ends = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
        return self._run_dummy(np.diff(ends), kv_caches, self._max_logits_rows)

    def warm_up(self) -> None:
        """Runs one prompt and one decode, so that the first request does not pay for set-up."""
        tokens = min(self._config.scheduler.max_num_batched_tokens, 32)
        self._run_dummy(np.array([tokens], np.int32), self._kv_caches)
        self._run_dummy(np.array([1], np.int32), self._kv_caches)

    def _run_dummy(
        self, query_lens: np.ndarray, kv_caches: list[KVCache], num_logits_rows: int = 1
    ) -> int:
        # Lengths stay within what one block per table column can hold.
        scheduler = self._config.scheduler
        longest = min(scheduler.max_model_len, scheduler.max_num_batched_tokens)
        query_lens = np.minimum(np.sort(query_lens), longest).astype(np.int32)
        arrays = dummy_arrays(query_lens, self._config.cache.block_size)
        uploads = Uploads(self._device, self._parallel.wait_for)
        token_ids, metadata = upload_step(arrays, uploads)
        if self._gpu is not None:
            metadata.gpu = self._gpu.batch(arrays, metadata.query_start_loc, uploads)
        hidden = self.model.forward(token_ids, kv_caches, metadata)
        model_peak = cuda_peak_bytes(self._device)
        num_rows = max(len(query_lens), num_logits_rows)
        last = uploads.send([np.resize(np.cumsum(query_lens) - 1, num_rows)])[0]
        logits = self.model.compute_logits(hidden.index_select(0, last))
        if self._parallel.tp_rank == 0:
            sample(logits, worst_sampling(num_rows))
        return model_peak
