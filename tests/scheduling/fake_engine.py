"""The engine's loop around the scheduler with a fake worker, checking everything at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tpengine.config import SchedulerConfig
from tpengine.outputs import RequestMetrics
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling import (
    AllocStatus,
    BlockManager,
    Scheduler,
    SchedulerOutput,
    StepDecisions,
)
from tpengine.sequence import Request, Sequence, SequenceStatus

from .fake_worker import FakeWorker

STOP_EVERY = 11
"""A token that this divides ends its sequence."""


def make_config(
    tokens: int = 2048,
    seqs: int = 256,
    model_len: int = 4096,
    chunked: bool = True,
    looks_ahead: bool = False,
) -> SchedulerConfig:
    """A scheduler's configuration, with short names."""
    return SchedulerConfig(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=model_len,
        enable_chunked_prefill=chunked,
        policy="fcfs",
        preemption_mode="recompute",
        looks_ahead=looks_ahead,
    )


def make_request(
    index: int,
    num_prompt_tokens: int,
    max_tokens: int = 16,
    min_tokens: int = 0,
    end_token_ids: frozenset[int] = frozenset(),
) -> Request:
    """A request named after its number, with a prompt of its own."""
    prompt = [(31 * index + 7 * place) % 997 for place in range(num_prompt_tokens)]
    return Request(
        request_id=f"r{index}",
        prompt=None,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
        seed=index,
        arrival_index=index,
        sequences=[Sequence(1000 + index, 0, list(prompt), num_prompt_tokens)],
        metrics=RequestMetrics(arrival_time=float(index)),
        end_token_ids=end_token_ids,
    )


class CountingBlockManager(BlockManager):
    """Counts the answers of `can_allocate`."""

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        super().__init__(num_blocks, block_size, watermark)
        self.answers: Counter[AllocStatus] = Counter()

    def can_allocate(self, request: Request) -> AllocStatus:
        answer = super().can_allocate(request)
        self.answers[answer] += 1
        return answer


class FakeEngine:
    """Schedule, execute, decide, update; `step` raises AssertionError if a check fails."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        watermark: float = 0.0,
        stop_every: int | None = STOP_EVERY,
    ) -> None:
        self.config = config
        self.blocks = CountingBlockManager(num_blocks, block_size, watermark)
        self.scheduler = Scheduler(config, self.blocks)
        self.worker = FakeWorker(
            num_blocks, block_size, config.max_num_seqs, config.max_num_batched_tokens
        )
        self.stop_every = stop_every
        self.events: Counter[str] = Counter()
        self.endings: dict[str, SequenceStatus] = {}
        self.preemptions: Counter[str] = Counter()
        self.in_order = True
        """Requests come to run in their order; until some are held back."""
        self._watermark = watermark
        self._first_admissions: list[int] = []
        self._stalled_steps = 0

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        request = self.scheduler.abort_request(request_id)
        if request is not None:
            # Not finished twice: it must not have been reported before.
            self._finish(request, SequenceStatus.FINISHED_ABORTED)
            assert self.scheduler.get_request(request_id) is None
            assert all(s.slot is None for s in request.sequences)
            assert all(self.blocks.block_ids(s) == [] for s in request.sequences)
        else:
            assert request_id in self.endings

    def lose(self, num_blocks: int) -> None:
        """The worker is lost; another one, with `num_blocks` blocks, replaces it."""
        size = self.config.max_num_batched_tokens
        self.blocks = CountingBlockManager(num_blocks, self.blocks.block_size, self._watermark)
        self.scheduler.restart(self.blocks)
        self.worker = FakeWorker(
            num_blocks,
            self.blocks.block_size,
            self.config.max_num_seqs,
            size,
            last_step=self.worker.last_step,
        )
        self.scheduler.check_invariants()
        assert self.scheduler.num_running == 0
        assert self.blocks.num_free_blocks == self.blocks.num_total_blocks
        self.events["losses"] += 1

    def restrict(self, allowed: frozenset[str] | None) -> None:
        """Lets only the `allowed` requests run."""
        self.scheduler.restrict(allowed)
        self.scheduler.check_invariants()
        self.in_order = False
        self.events["restrictions"] += 1

    def step(
        self, in_flight: Callable[[], None] = lambda: None, lost_to: int | None = None
    ) -> SchedulerOutput:
        """One step; `in_flight` is called between execution and processing. With `lost_to` it is
        not answered, and the next worker has that many blocks."""
        had_requests = self.scheduler.has_unfinished_requests()
        oldest = self._running()[0] if self._running() else None
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        for request in output.ignored:
            assert request.error
            self._finish(request, SequenceStatus.FINISHED_IGNORED)
        for request in output.preempted:
            self.preemptions[request.request_id] += 1
            self.events["preempted"] += 1
        if output.is_empty:
            if self.in_order:
                assert bool(output.ignored) == had_requests, "a step without any progress"
            assert not output.step_input.freed_slots
            assert not output.step_input.block_moves, "a step that is not sent moves blocks"
            return output
        self._check_progress(oldest, output)
        self._check_admissions(output)
        self.worker.apply(output.step_input)
        self._compare_with_worker()
        self._check_rows(output)
        if lost_to is not None:
            self.events["lost steps"] += 1
            self.events["lost prefills"] += output.num_prefill_tokens > 0
            self.lose(lost_to)
            return output
        answer = self.worker.compute(output.step_input)
        self.events["ahead"] = self.worker.num_ahead
        self.events["ahead and kept"] = self.worker.num_kept
        in_flight()
        decisions = self._decide(output, answer.token_ids)
        self.scheduler.update(output, decisions)
        for request in decisions.to_report.values():
            if request.finished:
                self._finish(request, request.sequences[0].status)
        self.scheduler.check_invariants()
        queues = [*self.scheduler._queues.running, *self.scheduler._queues.waiting]
        if self.in_order:
            assert queues == sorted(queues, key=lambda request: request.arrival_index)
        return output

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until no request is left, and checks that all blocks were given back."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests()
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.blocks.num_free_blocks == self.blocks.num_total_blocks
        self.scheduler.check_invariants()

    def _decide(self, output: SchedulerOutput, token_ids: list[int]) -> StepDecisions:
        """Appends every token, and ends sequences by token or length."""
        decisions = StepDecisions()
        for sequence, token_id in zip(output.sampled, token_ids, strict=True):
            if sequence.status.finished:  # aborted while the step was computed
                continue
            request = self.scheduler.get_request(f"r{sequence.seq_id - 1000}")
            assert request is not None
            decisions.tokens.append((sequence, token_id))
            decisions.to_report[request.request_id] = request
            params, num_output = request.sampling_params, sequence.num_output_tokens + 1
            assert params.max_tokens is not None
            stops = self.stop_every is not None and token_id % self.stop_every == 0
            if stops and num_output >= params.min_tokens:
                decisions.finished.append((sequence, SequenceStatus.FINISHED_STOPPED))
            elif num_output == params.max_tokens:
                decisions.finished.append((sequence, SequenceStatus.FINISHED_LENGTH))
        return decisions

    def _finish(self, request: Request, status: SequenceStatus) -> None:
        assert request.request_id not in self.endings, "finished twice"
        assert {s.status for s in request.sequences} == {status}
        self.endings[request.request_id] = status
        self.events[status.name] += 1

    def _running(self) -> list[Sequence]:
        """Sequences that run according to the driver, oldest first."""
        requests = sorted(self.scheduler._queues.requests.values(), key=lambda r: r.arrival_index)
        slots = self.scheduler._queues.slots
        return [
            s for r in requests for s in r.sequences if s.slot is not None and slots.is_known(s)
        ]

    def _check_progress(self, oldest: Sequence | None, output: SchedulerOutput) -> None:
        """The oldest running sequence is in every step, or nearly so when prompts go first."""
        if oldest is None or oldest in output.rows or oldest.slot is None:
            self._stalled_steps = 0
            return
        self._stalled_steps += 1
        assert not self.config.enable_chunked_prefill
        steps_each = -(-self.config.max_model_len // self.config.max_num_batched_tokens)
        assert self._stalled_steps <= self.config.max_num_seqs * steps_each

    def _check_admissions(self, output: SchedulerOutput) -> None:
        step = output.step_input
        assert not (output.preempted and step.new_sequences), "admitted in a step that preempted"
        by_slot = {s.slot: s for s in self._running()}
        for new in step.new_sequences:
            request = self.scheduler.get_request(f"r{by_slot[new.slot].seq_id - 1000}")
            assert request is not None
            assert request.metrics.first_scheduled_time is not None
            assert new.end_token_ids == (
                sorted(request.end_token_ids) if request.sampling_params.min_tokens else []
            )
            if request.arrival_index not in self._first_admissions:
                self._first_admissions.append(request.arrival_index)
        if self.in_order:
            admitted = self._first_admissions
            assert admitted == sorted(admitted), "not in order of arrival"

    def _compare_with_worker(self) -> None:
        """The worker's state, built from the messages, equals the driver's."""
        running = self._running()
        assert sorted(s.slot for s in running if s.slot is not None) == sorted(self.worker.slots)
        for sequence in running:
            assert sequence.slot is not None
            slot = self.worker.slots[sequence.slot]
            assert slot.token_ids == sequence.token_ids
            assert slot.num_computed_tokens == sequence.num_computed_tokens
            assert slot.block_ids == self.blocks.block_ids(sequence)

    def _check_rows(self, output: SchedulerOutput) -> None:
        """Sizes of the rows, before they are computed."""
        step, budget = output.step_input, self.config.max_num_batched_tokens
        assert [s.slot for s in output.rows] == step.slots
        assert [s.slot for s in output.sampled] == step.sample_slots
        new_slots = {new.slot for new in step.new_sequences}
        catching_up = set()
        for sequence, size in zip(output.rows, step.num_scheduled_tokens, strict=True):
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            catching_up.add(sequence.slot in new_slots or num_left > 1)
            if size < num_left:
                self.events["chunks"] += 1
                resumed_long = sequence.num_output_tokens > 0 and sequence.num_tokens > budget
                assert self.config.enable_chunked_prefill or resumed_long
        if not self.config.enable_chunked_prefill:
            assert len(catching_up) == 1, "prompts and decodes in one step"
            self.events["whole steps"] += 1


def engine_of(
    tokens: int = 64,
    seqs: int = 8,
    num_blocks: int = 100,
    block_size: int = 4,
    chunked: bool = True,
    **more: float,
) -> FakeEngine:
    """An engine whose requests end by length alone."""
    config = make_config(tokens, seqs, chunked=chunked)
    return FakeEngine(config, num_blocks, block_size, stop_every=None, **more)


def add(engine: FakeEngine, *prompts: int, first: int = 0, max_tokens: int = 16) -> list[Request]:
    """Adds a request for each of these numbers of prompt tokens."""
    requests = [make_request(first + i, n, max_tokens) for i, n in enumerate(prompts)]
    return [engine.add(request) for request in requests]


def one_token_each(output: SchedulerOutput) -> StepDecisions:
    """Appends a token to every sampled sequence, and ends none."""
    return StepDecisions(tokens=[(sequence, 1) for sequence in output.sampled])


def sizes(output: SchedulerOutput) -> list[int]:
    """Tokens of each row."""
    return output.step_input.num_scheduled_tokens


def statuses(requests: list[Request]) -> list[str]:
    """Names of the states that the requests are in."""
    return [sequence.status.name for request in requests for sequence in request.sequences]
