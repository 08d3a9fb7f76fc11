"""Runs the model: one step, from the driver's message to sampled tokens: `ModelRunner.execute`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState, end_of_work
from tpengine.layers import sampler
from tpengine.layers.attention import AttentionMetadata, keep_rows
from tpengine.layers.device_values import Pending, known, together
from tpengine.messages import StepInput, StepOutput
from tpengine.models.registry import CausalLM
from tpengine.ops.lora_ops import LoRARows
from tpengine.worker.adapter_store import AdapterStore, group_rows
from tpengine.worker.cache_engine import CacheEngine
from tpengine.worker.decode_recording import DecodeRecording
from tpengine.worker.device import cuda_peak_bytes
from tpengine.worker.draft_model import DraftModel
from tpengine.worker.encoder_pass import EncoderPass
from tpengine.worker.gpu.attention_plans import GpuAttention
from tpengine.worker.gpu.graphs import DecodeGraphs
from tpengine.worker.input_batch import InputBatch, StepArrays, upload_step
from tpengine.worker.picture_store import PictureStore
from tpengine.worker.pooling_slots import PoolingSlots
from tpengine.worker.prompt_logprobs import (
    PROMPT_SLICE_ROWS,
    PromptLogprobSlots,
    PromptRow,
    compute_prompt_logprobs,
)
from tpengine.worker.sampling_state import SamplingSlots
from tpengine.worker.stage_ends import StageEnds
from tpengine.worker.transfers import Downloads, Uploads


@dataclass(slots=True)
class OutputRows:
    """The hidden states that a step needs.

    Attributes:
        wanted: int64 `[num_wanted]`, the tokens whose hidden states the model returns; None: all.
        sampled: int64 `[num_samples]`, of these hidden states the ones that are sampled; None: all.
        prompt_rows: rows that compute log probabilities of their prompt.
    """

    wanted: torch.Tensor | None
    sampled: torch.Tensor | None
    prompt_rows: list[PromptRow]


@dataclass(slots=True)
class PendingAnswer:
    """A step's results, on their way from the device.

    Attributes:
        token_ids: int64 `[num_samples]`, on the device.
        read: waits for the copies; returns sampled ids (int64 `[num_samples]`), `Findings`, log
            probabilities of prompts by row, and, if the model does not generate, what it gives in
            the place of tokens, see `StepOutput.pooled`; in this order.
    """

    token_ids: torch.Tensor | None
    read: Callable[[], list[Any]]


@dataclass(slots=True)
class _PendingStep:
    """A step whose sampled ids are not in the batch: the device, or the last stage, may still
    compute them.

    Attributes:
        start: when it was launched, in seconds of `time.perf_counter`.
        behind: see `StepOutput`.
        freed_slots: by steps after it; other sequences may have these slots now.
    """

    step: StepInput
    answer: PendingAnswer
    start: float
    load_results: dict[bytes, str | None]
    behind: list[int] = field(default_factory=list)
    freed_slots: set[int] = field(default_factory=set)


class ModelRunner:
    """The model over one KV cache, with its running batch.

    Args:
        gpu: what attention needs on a GPU; None: on CPU.
        adapters: None: the engine serves no adapters.
        works_ahead: whether a step's answer may wait until the next step was launched.
        pictures: None: prompts are text alone.
        ends: of a pipeline stage.

    Attributes:
        batch: the running batch.
        recorded: runs decode steps without Python between their ops; None: steps run op by op.
        recorded_adapters: the same for steps in which a row has an adapter.
        draft_model: None: drafts come from the driver.
        uploads: sends arrays to the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        cache_engine: CacheEngine,
        device: torch.device,
        parallel: ParallelState,
        ends: StageEnds,
        gpu: GpuAttention | None = None,
        adapters: AdapterStore | None = None,
        works_ahead: bool = False,
        pictures: PictureStore | None = None,
    ) -> None:
        self.model = model
        self.cache_engine = cache_engine
        self.device = device
        self.recorded: DecodeGraphs | DecodeRecording | None = None
        self.recorded_adapters: DecodeGraphs | DecodeRecording | None = None
        self.draft_model: DraftModel | None = None
        self._adapters = adapters
        self._works_ahead = works_ahead
        self._pictures = pictures
        self._ends = ends
        self._pending: deque[_PendingStep] = deque()
        self._finished_at = 0.0
        self.uploads = Uploads(device)
        self._downloads = Downloads(device, parallel.wait_for)
        self._scheduler = config.scheduler
        self._parallel = parallel
        self._gpu = gpu
        self._pooling = PoolingSlots(config, model, device) if config.model.pooling else None
        self._processed = config.model.logprobs_mode == "processed_logprobs"
        self._prompt_logprobs = PromptLogprobSlots(self._processed)
        lookahead = config.scheduler.lookahead
        self._num_forced = 0  # most tokens that a grammar forces, for drafts of the driver
        if lookahead is not None and lookahead.draft_model is None and parallel.samples:
            self._num_forced = lookahead.num_speculative_tokens
        most, vocab_size = config.model.max_logprobs, config.model.vocab_size
        self._max_logprobs = vocab_size if most == -1 else min(most, vocab_size)
        limits = config.scheduler.max_num_seqs, config.scheduler.max_model_len
        block_size, num_kept = config.cache.block_size, config.num_kept_tokens
        sizes, has_axes = (*limits, block_size), bool(config.model.picture_rope)
        encoder = config.model.encoder
        self._encoder = None if encoder is None else EncoderPass(encoder, model, block_size, device)
        others = self._processed, has_axes, 0 if encoder is None else encoder.max_len
        self.batch = InputBatch(*sizes, self.uploads, num_kept, *others)

    def drop_recording(self) -> None:
        """Destroys what was recorded; later steps run op by op."""
        recorded, self.recorded, self.recorded_adapters = self.recorded, None, None
        if isinstance(recorded, DecodeGraphs):
            recorded.close()

    def execute(self, step: StepInput) -> list[StepOutput]:
        """Computes all rows of a step and samples where the step says so.

        Rank 0 of the last stage samples, and every rank appends the sampled ids to its batch. Log
        probabilities, candidates and errors are in its answer only. The other stages have done
        their part when the last one has their hidden states.

        A GPU that works ahead runs the model on the ids that the step before sampled while these
        are on their way to the host; sampling waits for them.

        Returns:
            The answers that are there, oldest first: this step's, or, of a GPU that works ahead,
            that of the step before.
        """
        is_last = self._parallel.stage.is_last
        if not is_last:
            for _ in range(self._ends.num_needed([p.step for p in self._pending], step)):
                self.finish()
        start = time.perf_counter()
        load_results = self.apply(step)
        tower_s = time.perf_counter() - start if step.num_awaited_rows else 0.0
        if not step.slots:  # the tower had its turn, or blocks were moved
            outputs = self.finish() if is_last else []
            alone = StepOutput(step.step, [], model_s=tower_s, load_results=load_results)
            return [*outputs, alone]
        if not is_last:
            self._pass_on(step)
            return [StepOutput(step.step, [], load_results=load_results)]
        start, behind = time.perf_counter(), list[int]()
        if self.draft_model is not None and step.drafts:
            behind = self.draft_model.guess(step)
        if self._encoder is not None:
            self._encoder.run(step, self.cache_engine.kv_caches, self._upload)
        before_s = time.perf_counter() - start + tower_s
        inputs, has_all_ids = self.prepare_outputs(step), not self._pending
        # Before the layers, if it can be: the masks of grammars are made while these run.
        parameters = self._sampling_parameters(step) if has_all_ids else None
        forward = self.prepare_rows(step, inputs.wanted)
        start = time.perf_counter() - before_s
        hidden = forward()
        outputs = self.finish()
        if not has_all_ids:
            parameters = self._sampling_parameters(step)
        answer = self.sample(step, inputs, parameters, hidden)
        self._pending.append(_PendingStep(step, answer, start, load_results, behind))
        return outputs if self._works_ahead else [*outputs, *self.finish()]

    def _pass_on(self, step: StepInput) -> None:
        """Computes the layers of a stage that is not the last, for all tokens of a step."""
        self._ends.pass_on(self.prepare_rows(step)())
        self.batch.note_computed(step)
        if step.sample_rows:
            take_ids = self._ends.ids_of(step)
            answer = PendingAnswer(None, lambda: [take_ids(), sampler.Findings(), {}])
            self._pending.append(_PendingStep(step, answer, 0.0, {}))

    def finish(self) -> list[StepOutput]:
        """Waits for the step that was begun first, if there is one, and appends its ids to the
        batch; returns its answer."""
        if not self._pending:
            return []
        pending = self._pending.popleft()
        sampled_ids, findings, prompt_logprobs, *pooled = pending.answer.read()
        self._ends.send_ids(sampled_ids)
        now = time.perf_counter()
        model_s = now - max(pending.start, self._finished_at)  # the device takes one after another
        self._finished_at = now
        rejected = self.batch.append(pending.step, sampled_ids, pending.freed_slots)
        forced = {}
        grammars = self.batch.sampling.edits.grammars
        if self._num_forced and not grammars.is_empty:
            texts = self.batch.token_ids, self.batch.num_tokens
            sample_slots = pending.step.sample_slots
            forced = grammars.find_forced(sample_slots, rejected, *texts, self._num_forced)
        return [
            StepOutput(
                step=pending.step.step,
                token_ids=sampled_ids.tolist(),
                logprobs=findings.logprobs,
                model_s=model_s,
                candidates=findings.candidates,
                prompt_logprobs=prompt_logprobs,
                errors=findings.errors,
                load_results=pending.load_results,
                rejected=rejected,
                forced=forced,
                behind=pending.behind,
                pooled=pooled[0] if pooled else {},
                chosen_logprobs=findings.chosen_logprobs,
            )
        ]

    def apply(self, step: StepInput) -> dict[bytes, str | None]:
        """Brings adapters, pictures, batch and cache up to date with the driver; returns
        `StepOutput.load_results`."""
        results: dict[bytes, str | None] = {}
        if self._adapters is not None:
            results |= self._adapters.load(step.adapter_loads)
        if self._pictures is not None:
            results |= self._pictures.apply(step)
        for pending in self._pending:
            pending.freed_slots.update(step.freed_slots)
        self.batch.apply(step)
        self._prompt_logprobs.apply(step)
        self.cache_engine.move(step.block_moves, step.step)
        if self.draft_model is not None:
            self.draft_model.apply(step)
        return results

    def prepare_outputs(self, step: StepInput) -> OutputRows:
        """Finds the tokens whose hidden states a step needs."""
        prompt_rows = self._prompt_logprobs.rows(step, self.batch)
        last_tokens = self.batch.last_positions(step)
        # Log probabilities of a prompt need the hidden states of all tokens; and a row that several
        # sequences share would pass the last layer once for each of them.
        if self._pooling is not None and self._pooling.wants_all:
            return OutputRows(None, None, [])
        if prompt_rows or len(set(step.sample_rows)) < len(step.sample_rows):
            return OutputRows(None, last_tokens, prompt_rows)
        return OutputRows(last_tokens, None, prompt_rows)

    def prepare_rows(
        self, step: StepInput, wanted: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """Waits for hidden states of the stage before, if there is one, and sends the inputs of
        rows to the device. Returns a function that runs the model over them:
        hidden states `[num_wanted, hidden_size]`, valid until the model runs again.

        Args:
            wanted: int64, the tokens whose hidden states are returned; None: all.
        """
        slots, num_rows = step.slots, len(step.slots)
        entering = self._ends.receive(sum(step.num_scheduled_tokens))
        arrays = self.batch.step_arrays(step)
        token_ids = self._ids_in_flight(step, arrays)
        grouped = None
        if self._adapters is not None:
            grouped = group_rows(self.batch.adapter_slots[slots], arrays.num_scheduled_tokens)
        pictures = None
        if self._pictures is not None:
            pictures = self._pictures.of_step(step, arrays, self.batch)
        recorded = self.recorded if grouped is None else self.recorded_adapters
        if pictures is not None:  # a recording has no such inputs
            recorded = None
        if recorded is not None and arrays.num_decodes == num_rows <= recorded.max_rows:
            self.cache_engine.kv_caches.wait()  # a recording does not iterate over the layers
            recorded.write(arrays, self.uploads, token_ids)
            if isinstance(recorded, DecodeRecording) and grouped is not None:
                recorded.write_adapters(*grouped)
            return lambda: keep_rows(recorded.run(num_rows), wanted)
        sent_ids, metadata = self._upload(arrays)
        ids = sent_ids if token_ids is None else token_ids.int()
        if pictures is not None:
            entering = pictures.enter(self.model, ids, metadata, self.uploads, entering)
        if grouped is None and pictures is None:
            metadata.wanted_rows = wanted
            return lambda: self._forward(ids, metadata, entering)
        # The last layer keeps all rows, so that all layers have the same ones.
        lora_rows = None if grouped is None else LoRARows(*self.uploads.send(grouped))
        return lambda: keep_rows(self._forward(ids, metadata, entering, lora_rows), wanted)

    def _ids_in_flight(self, step: StepInput, arrays: StepArrays) -> torch.Tensor | None:
        """The token ids of a step's rows, int64 `[num_tokens]`, with those that the step before
        samples, which only the device knows; None: the batch knows all of them."""
        pending = self._pending[-1] if self._pending else None
        if pending is None or pending.answer.token_ids is None:
            return None
        sampled, num_decodes = pending.step.sample_slots, arrays.num_decodes
        if step.slots == sampled and num_decodes == len(sampled) and not pending.freed_slots:
            return pending.answer.token_ids
        places = {s: at for at, s in enumerate(sampled) if s not in pending.freed_slots}
        sources = np.full(len(arrays.token_ids), -1)
        sources[:num_decodes] = [places.get(slot, -1) for slot in step.slots[:num_decodes]]
        in_batch, source = self.uploads.send([arrays.token_ids, sources])
        in_flight = pending.answer.token_ids[source.clamp(min=0)]
        return torch.where(source < 0, in_batch, in_flight)

    def _forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        entering: torch.Tensor | None,
        lora_rows: LoRARows | None = None,
    ) -> torch.Tensor:
        """Runs the model; `[num_wanted, hidden_size]`.

        Args:
            entering: see `CausalLM.forward`.
            lora_rows: rows that have an adapter; None: no row has one.
        """
        caches = self.cache_engine.kv_caches
        if lora_rows is None:
            return self.model.forward(token_ids, caches, metadata, entering)
        assert self._adapters is not None
        with self._adapters.layers.applied(lora_rows):
            return self.model.forward(token_ids, caches, metadata, entering)

    def _sampling_parameters(self, step: StepInput) -> sampler.SamplingBatch | None:
        """Of each sample; None: another rank samples, or the step samples nothing."""
        if not step.sample_rows or not self._parallel.samples:
            return None
        parameters = self.batch.sampling_batch(step)
        if self._gpu is not None and parameters.temperature.any():
            parameters.on_device = self.uploads.send(sampler.sampling_columns(parameters))
        return parameters

    def sample(
        self,
        step: StepInput,
        inputs: OutputRows,
        parameters: sampler.SamplingBatch | None,
        hidden: torch.Tensor,
    ) -> PendingAnswer:
        """Samples, starts the copies of all results to the host, and marks the step's tokens as
        computed. Does not wait for the device.

        Args:
            hidden: `[num_wanted, hidden_size]`, of the tokens `inputs.wanted`.
        """
        if self._pooling is not None:
            read = self._pooling.start(step, self.batch, hidden, self._downloads)
            self.batch.note_computed(step)
            return PendingAnswer(None, read)
        prompts = compute_prompt_logprobs(
            hidden, inputs.prompt_rows, self.model.compute_logits, self._max_logits_rows
        )
        token_ids, ids, findings = None, known(np.empty(0, np.int64)), known(sampler.Findings())
        if step.sample_rows:
            logits = self.model.compute_logits(keep_rows(hidden, inputs.sampled))
            sampled = self._choose(logits, parameters, step)
            token_ids, findings = sampled.token_ids, sampled.findings
            ids = Pending([token_ids], lambda arrays: arrays[0])
        results = together([ids, findings, prompts])
        wait = self._downloads.start(results.tensors)
        self.batch.note_computed(step)
        return PendingAnswer(token_ids, lambda: results.read(wait()))

    def _choose(
        self, logits: torch.Tensor, parameters: sampler.SamplingBatch | None, step: StepInput
    ) -> sampler.Sampled:
        """Rank 0 samples from its logits; the other ranks receive the ids."""
        if parameters is None:
            ids = torch.empty(len(step.sample_slots), dtype=torch.int64, device=self.device)
            return sampler.Sampled(self._parallel.broadcast(ids))
        if parameters.edits is not None and parameters.edits.processors:
            # Functions of users may read their logits, and would wait for them without a bound.
            self._parallel.wait_for(end_of_work(self.device), "a step")
        sampled = sampler.sample(logits, parameters)
        sampled.token_ids = self._parallel.broadcast(sampled.token_ids)
        return sampled

    def run_worst_case(self) -> int:
        """Runs the most expensive step that the scheduler may ask for. One block is enough: writes
        go nowhere and every row reads block 0, so that only the activations take memory.

        Returns:
            On a GPU the peak memory of the model's activations, without logits and sampling, in
            bytes; 0 on CPU.
        """
        num_tokens = self._scheduler.max_num_batched_tokens
        num_seqs = min(self._scheduler.max_num_seqs, num_tokens)
        if self._gpu is not None:  # its attention may need more for long prompts than for many
            longest = self._scheduler.max_model_len
            num_prompts = min(max(1, num_tokens // longest), num_seqs)
            self._run_dummy(np.array([longest] * num_prompts))
        if self._encoder is not None:
            self._encoder.run_longest(num_tokens, self.cache_engine.kv_caches, self._upload)
        ends = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
        return self._run_dummy(np.diff(ends), self._max_logits_rows)

    def warm_up(self) -> None:
        """Runs one prompt and one decode, so that the first request does not pay for set-up."""
        self._run_dummy(np.array([min(self._scheduler.max_num_batched_tokens, 32)]))
        self._run_dummy(np.array([1]))

    @property
    def _max_logits_rows(self) -> int:
        """Rows of logits that are held at once: those that are sampled, or a slice of a prompt
        whose log probabilities are wanted. The worst case runs with as many."""
        num_rows = max(self._scheduler.max_sampled_rows, PROMPT_SLICE_ROWS)
        return min(num_rows, self._scheduler.max_num_batched_tokens)

    def _run_dummy(self, query_lens: npt.NDArray[np.integer[Any]], num_logits_rows: int = 1) -> int:
        """Runs new sequences of these lengths in the batch, which is still empty; returns what
        `run_worst_case` does."""
        # A block table has a column for each block up to this length.
        longest = min(self._scheduler.max_model_len, self._scheduler.max_num_batched_tokens)
        lengths = np.minimum(np.sort(query_lens), longest)
        arrays = self.batch.arrays(range(len(lengths)), lengths.tolist())
        arrays.slot_mapping.fill(-1)  # K and V go nowhere
        token_ids, metadata = self._upload(arrays)
        grouped = group_rows(np.zeros_like(lengths), lengths)
        lora_rows = None
        if self._adapters is not None and grouped is not None:
            lora_rows = LoRARows(*self.uploads.send(grouped))
        entering = None if self._ends.entering is None else self._ends.entering[: len(token_ids)]
        hidden = self._forward(token_ids, metadata, entering, lora_rows)
        model_peak = cuda_peak_bytes(self.device)
        if not self._parallel.stage.is_last:
            return model_peak
        if self._pooling is not None:
            self._pooling.run_dummy(hidden)
            return model_peak
        num_rows = max(len(lengths), num_logits_rows)
        (last,) = self.uploads.send([np.resize(np.cumsum(lengths) - 1, num_rows)])
        logits = self.model.compute_logits(hidden.index_select(0, last))
        if self._parallel.tp_rank == 0:
            # Ids and log probabilities of prompts stay on the device until the step is computed.
            reported = torch.empty(int(lengths.sum()), self._max_logprobs, 2, device=self.device)
            sampler.sample(logits, self._worst_sampling(num_rows))
            del reported
        return model_peak

    def _worst_sampling(self, num_rows: int) -> sampler.SamplingBatch:
        """Returns parameters with every stage that takes memory, for every row."""
        slots = SamplingSlots(num_rows, self.device, self._processed)
        slots.temperature.fill(1.0)
        slots.top_k.fill(50)
        slots.top_p.fill(0.9)
        slots.num_logprobs.fill(self._max_logprobs)
        positions, no_tokens = np.zeros(num_rows, np.int32), np.zeros((num_rows, 0), np.int32)
        return slots.gather(np.arange(num_rows), positions, no_tokens)

    def _upload(self, arrays: StepArrays) -> tuple[torch.Tensor, AttentionMetadata]:
        """Sends arrays to the device; returns token ids and metadata, complete on a GPU too."""
        token_ids, metadata = upload_step(arrays, self.uploads)
        if self._gpu is not None:
            metadata.gpu = self._gpu.batch(arrays, metadata.query_start_loc, self.uploads)
        return token_ids, metadata
