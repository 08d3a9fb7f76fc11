"""Scheduler and output processor with the fake worker; every step is checked."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

from support.foretold import Foretold, totals

from scheduling.fake_worker import FAILING, VOCAB_SIZE, FakeWorker, key_of, keys_of, sample
from tpengine.config import LookaheadConfig, PicturesConfig, SchedulerConfig
from tpengine.engine.beam_search import num_candidates
from tpengine.engine.output_processor import OutputProcessor
from tpengine.errors import RequestFailedError
from tpengine.inputs import NO_OWNER, Adapter, LoRARequest, Owner
from tpengine.messages import PictureLoad, PictureSpan, SamplingRules, StepInput, StepOutput
from tpengine.outputs import RequestMetrics, RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.block_manager import NO_BLOCK, AllocStatus, BlockManager
from tpengine.scheduling.drafter import Drafter, RowPrices
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import (
    EncoderPrompt,
    PromptPictures,
    Request,
    Sequence,
    SequenceStatus,
)
from tpengine.scheduling.step import SchedulerOutput

NUM_ROWS = {b"a": 1, b"b": 3, b"c": 5, FAILING: 2}
END_TOKEN_IDS = frozenset(range(0, VOCAB_SIZE, 199))


@dataclass(frozen=True)
class Limits:
    """The limits of an engine."""

    tokens: int = 64
    seqs: int = 8
    num_blocks: int = 100
    block_size: int = 4
    num_host_blocks: int = 0
    chunked: bool = True
    caching: bool = False
    mode: str = "auto"
    policy: str = "fcfs"
    watermark: float = 0.0
    in_flight: int = 1
    model_len: int = 4096
    window: int | None = None
    max_loras: int = 0
    fairness: str = "none"
    drafts: int = 0
    foretold: bool = True
    """Whether the drafts are known to come true or not; else the drafter guesses."""
    stages: int = 1
    picture_rows: int = 0
    """Room for features; 0: prompts have no pictures."""
    most_awaited_rows: int = 100
    whole_pictures: bool = False
    delay: float = 0.0
    whole_prompts: bool = False

    @property
    def num_kept_tokens(self) -> int:
        """As `EngineConfig` has it."""
        return sys.maxsize if self.window is None else max(self.window, self.block_size) - 1


ROOMY = Limits(tokens=1000)


def plain(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    """Params of a request that ends by its length alone."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def make_request(
    index: int,
    prompt: list[int] | int,
    params: SamplingParams | None = None,
    priority: int = 0,
    adapter: Adapter | int = 0,
    owner: Owner = NO_OWNER,
    pictures: str = "",
    encoder: int = 0,
) -> Request:
    """A request named after its number.

    Args:
        prompt: its ids, or how many it has of its own.
        adapter: or its number; 0: none.
        pictures: in front of its prompt, a letter each; they have `NUM_ROWS` of features.
        encoder: tokens of its encoder prompt; 0: it has none.
    """
    if isinstance(adapter, int) and adapter:
        name = f"adapter{adapter}"
        adapter = Adapter(LoRARequest(name, adapter, f"/{name}"), name.encode())
    params = params or plain()
    if isinstance(prompt, int):
        prompt = [(31 * index + 7 * place) % VOCAB_SIZE for place in range(prompt)]
    spans, loads, ids = list[PictureSpan](), dict[bytes, PictureLoad](), list[int]()
    for digest in (letter.encode() for letter in pictures):
        num_rows = NUM_ROWS[digest]
        spans.append(PictureSpan(len(ids) + 1, num_rows, 0, num_rows, digest))
        loads[digest] = PictureLoad(digest, num_rows, 1, 1, b"rgb")
        ids += [7] * (1 + num_rows)
    prompt = ids + prompt
    ends = frozenset() if params.ignore_eos else END_TOKEN_IDS
    width, max_tokens = params.num_sequences, params.max_tokens
    most = sys.maxsize if max_tokens is None else len(prompt) + max_tokens
    return Request(
        request_id=f"r{index}",
        prompt=None,
        prompt_token_ids=prompt,
        sampling_params=params,
        rules=SamplingRules(min_tokens=params.min_tokens),
        seed=1000 + index,
        arrival_index=index,
        sequences=[Sequence(100 * index + i, i, prompt, len(prompt), most) for i in range(width)],
        metrics=RequestMetrics.of_arrival(float(index)),
        priority=priority,
        end_token_ids=ends,
        num_candidates=num_candidates(width, len(ends)) if params.use_beam_search else 0,
        adapter=adapter or None,
        owner=owner,
        pictures=PromptPictures(spans, loads) if spans else None,
        encoder=EncoderPrompt(None, list(range(index, index + encoder))) if encoder else None,
    )


class CountingBlockManager(BlockManager):
    """Counts the answers of `can_allocate`."""

    answers: Counter[str]

    def can_allocate(self, request: Request) -> AllocStatus:
        answer = super().can_allocate(request)
        self.answers[answer.name] += 1
        return answer


def next_tokens(request: Request, sequence: Sequence, most: int) -> list[int]:
    """What the worker will sample for a sequence."""
    keys, token_ids = keys_of(sequence.token_ids, request.adapter), list[int]()
    for _ in range(most):
        token_ids.append(sample(keys, request.seed, sequence.index))
        keys.append(key_of(keys[-1], token_ids[-1]))
    return token_ids


class Loop:
    """Schedule, execute, process, update; raises AssertionError if a check fails.

    Attributes:
        outputs: the last output of each request.
        admitted: requests that have run, in the order of their first start.
        preemptions: by request id.
        events: how often each event happened.
        policy: holds the waiting requests in their order.
        is_in_order: requests have come to run in the order of their arrival, as they do under this
            policy, without swap, but for those that passed another which had no room.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.config = SchedulerConfig(
            max_num_batched_tokens=limits.tokens,
            max_num_seqs=limits.seqs,
            max_model_len=limits.model_len,
            enable_chunked_prefill=limits.chunked,
            policy=limits.policy,
            preemption_mode=limits.mode,
            max_steps_in_flight=limits.in_flight,
            max_loras=limits.max_loras,
            num_stages=limits.stages,
            fairness=limits.fairness,
            whole_prompts=limits.whole_prompts,
            lookahead=LookaheadConfig("[ngram]", limits.drafts, 1, 1, None, limits.model_len)
            if limits.drafts
            else None,
            pictures=PicturesConfig(
                8, limits.most_awaited_rows, limits.picture_rows, {}, 1.0, limits.whole_pictures
            )
            if limits.picture_rows
            else None,
            delay_factor=limits.delay,
        )
        never_swaps = limits.mode == "recompute" or not limits.num_host_blocks
        is_by_arrival = limits.policy == "fcfs" and limits.fairness == "none"
        self.is_in_order = is_by_arrival and never_swaps
        self.events: Counter[str] = Counter()
        self.blocks, self.worker = self._open_cache(limits.num_blocks, last_step=0)
        self.scheduler = Scheduler(self.config, self.blocks)
        if limits.drafts:
            drafter = Drafter(self.config.lookahead)
            drafter._prices = Mock(cost=RowPrices().cost)  # no clock changes what is drafted
            foretold = Foretold(self.config.lookahead, next_tokens)
            self.scheduler._queues.drafter = foretold if limits.foretold else drafter
        self._sent: deque[StepInput] = deque()  # what the worker has not begun
        self._answers: deque[StepOutput] = deque()
        # Of each unanswered step: the blocks that each row reads, and those that it writes.
        self._used: deque[dict[Sequence, tuple[set[int], set[int]]]] = deque()
        self.policy = self.scheduler._queues.waiting
        self.processor = OutputProcessor(None)
        self.outputs: dict[str, RequestOutput] = {}
        self.admitted: list[Request] = []
        self._passed: list[Request] = []
        self.preemptions: Counter[str] = Counter()
        self._entered: dict[int, Sequence] = {}
        self._is_restricted = False
        self._num_stalled_steps = 0
        self._is_applied = False

    def _open_cache(self, num_blocks: int, last_step: int) -> tuple[BlockManager, FakeWorker]:
        limits, host, kept = self.limits, self.limits.num_host_blocks, self.limits.num_kept_tokens
        sizes = num_blocks, limits.block_size
        blocks = CountingBlockManager(
            *sizes, limits.watermark, host, limits.caching, kept, limits.tokens
        )
        blocks.answers = self.events
        worker = FakeWorker(*sizes, limits.seqs, limits.tokens, host, kept, last_step=last_step)
        worker.max_loras = limits.max_loras
        return blocks, worker

    def add(self, request: Request) -> Request:
        for sequence in request.sequences:
            sequence.max_num_tokens = min(sequence.max_num_tokens, self.limits.model_len)
        self.scheduler.add_request(request)
        self.processor.add(request)
        return request

    def add_plain(self, *prompts: int, first: int = 0, max_tokens: int = 16) -> list[Request]:
        """Adds a request of one sequence for each of these numbers of prompt tokens."""
        params = plain(max_tokens)
        return [
            self.add(make_request(index, prompt, params))
            for index, prompt in enumerate(prompts, start=first)
        ]

    def end(self, request: Request, failed: bool = False) -> None:
        """Aborts the request, or lets it fail."""
        before = sorted({s.status.name for s in request.unfinished_sequences})
        if failed:
            ended = self.scheduler.fail_request(
                request.request_id, RequestFailedError("it was told to")
            )
        else:
            ended = self.scheduler.abort_request(request.request_id)
        assert (ended is None) == (not before)
        assert self.scheduler.get_request(request.request_id) is None
        if ended is not None:
            self.events[f"ended {before[-1]}"] += 1
            held = [s for s in request.sequences if self.blocks.holds_blocks(s)]
            assert all(s.num_unanswered for s in held)
            assert all(s.slot is None for s in request.sequences)
            self.scheduler.check_invariants()
            self._note(self.processor.report([ended]))

    def lose(self, num_blocks: int) -> None:
        """The worker is lost; another one, with `num_blocks` blocks, replaces it."""
        self.events["lost steps"] += len(self.scheduler.unanswered)
        for output in self.scheduler.unanswered:
            self.events["lost prefills"] += output.num_prefill_tokens > 0
            self.events["lost forks"] += len(output.forks) > 0
        self.events["lost ahead"] += len(self.scheduler.unanswered) > 1
        self.blocks, self.worker = self._open_cache(num_blocks, self.scheduler._num_steps)
        self.scheduler.restart(self.blocks)
        for queue in (self._sent, self._answers, self._used):
            queue.clear()
        self.scheduler.check_invariants()
        assert self.scheduler.num_running == self.scheduler.num_swapped == 0
        self._check_all_blocks_are_free()
        self.events["losses"] += 1

    def restrict(self, allowed: Iterable[str] | None) -> None:
        """Lets only requests of the `allowed` ids run; None: all. Not while steps are in flight."""
        while self.scheduler.unanswered:
            self._answer()
        self.scheduler.restrict(None if allowed is None else frozenset(allowed))
        self.scheduler.check_invariants()
        self._is_restricted = allowed is not None
        self.is_in_order = False
        self.events["restrictions"] += 1

    def step(
        self, in_flight: Callable[[], None] = lambda: None, lost_to: int | None = None
    ) -> SchedulerOutput:
        """Plans steps until as many are in flight as may be; answers the oldest and returns it.
        `in_flight` is called before the answer. With `lost_to` there is no answer, and the next
        worker has that many blocks."""
        output = None
        most = 1 if self.scheduler.wants_drafts else self.limits.in_flight
        while (output is None and not self.scheduler.unanswered) or (
            len(self.scheduler.unanswered) < most
        ):
            output = self._plan(is_alone=most == 1)
            if output.is_empty:
                break
        if output is None:
            return self._answer()
        if not self.scheduler.unanswered:
            return output
        if lost_to is not None:
            self.lose(lost_to)
            return output
        if self.limits.in_flight == 1:
            self._execute()
        in_flight()
        return self._answer()

    def _plan(self, is_alone: bool = False) -> SchedulerOutput:
        """Plans one step, and lets the worker begin it at once or later."""
        self._entered = {i: s for i, s in self._entered.items() if s.slot is not None}
        is_free = self.scheduler.has_unfinished_requests() and not self.scheduler.unanswered
        oldest = next(iter(self.scheduler.running_sequences()), None)
        waiting = list(self.policy)
        output = self.scheduler.schedule(is_alone)
        self.scheduler.check_invariants()
        self._count(output)
        self._note(self.processor.report(output.ignored))
        if output.is_empty:
            if is_free and not self._is_restricted:
                assert output.ignored, "a step without any progress"
            assert not output.step_input.freed_slots
            assert not output.step_input.block_moves, "a step that is not sent moves blocks"
            return output
        assert not any(step.drafts for step in [*self.scheduler.unanswered][:-1]), "planned ahead"
        if is_free:
            self._check_progress(oldest, output)
        admitted = [request for request in waiting if _has_slots(request)]
        self._check_admissions(admitted, output)
        self._check_rows(admitted, output)
        self._check_blocks_in_flight(output)
        self._sent.append(output.step_input)
        self.events["ahead"] += not is_free
        is_known = self._entered | {s.seq_id: s for s in (*output.rows, *_children(output))}
        self._entered = is_known
        if self.limits.in_flight == 1 or (len(self._sent) == 1 and output.step_input.step % 3):
            self.worker.apply(output.step_input)
            self._compare_with_worker(output)
            self._is_applied = True
            if self.limits.in_flight > 1:
                self._execute()
        return output

    def _execute(self) -> None:
        """The worker computes the oldest step that it has not begun."""
        step = self._sent.popleft()
        if not self._is_applied:
            self.worker.apply(step)
        self._is_applied = False
        self._answers.append(self.worker.compute(step))

    def _answer(self) -> SchedulerOutput:
        """The oldest step is answered."""
        output = self.scheduler.unanswered[0]
        if not self._answers:
            self._execute()
        decisions = self.processor.process(output, self._answers.popleft())
        self.scheduler.update(decisions)
        self._used.popleft()
        self._note(self.processor.report(decisions.to_report.values()))
        self.scheduler.check_invariants()
        running = self.scheduler.running_sequences()
        unused = self.blocks.num_unused_places(running)
        assert unused <= (self.limits.block_size - 1 + self.limits.drafts) * len(running)
        if self.is_in_order:
            self._check_order([*map(self._owner, running), *self.policy])
        return output

    def _check_blocks_in_flight(self, output: SchedulerOutput) -> None:
        """What unanswered steps read is not written for other sequences, and what they write is not
        copied."""
        moves, size = output.step_input.block_moves, self.limits.block_size
        sources = {pair[0] for pair in (*moves.swap_outs, *moves.copies)}
        targets = {pair[1] for pair in (*moves.swap_ins, *moves.copies)}
        own = {}
        for row, count, end in zip(
            output.rows, sizes(output), output.num_computed_tokens, strict=True
        ):
            table, start = self.blocks.block_ids(row), end - count
            seen = max(0, start - self.limits.num_kept_tokens)
            written = set(table[start // size : self.blocks.num_blocks_for(end)])
            own[row] = set(table[seen // size :] + self.blocks.cross.block_ids(row)), written
        for step in self._used:
            for other, (read, written) in step.items():
                assert not targets & read, "a copy into a block that an unanswered step reads"
                assert not sources & written, "a copy of a block that an unanswered step writes"
                for row in own.keys() - {other}:
                    assert not own[row][1] & read, "a block of an unanswered step was given away"
        self._used.append(own)

    def run(self, max_steps: int = 3000) -> None:
        """Steps until no request is left, and checks that all blocks were given back."""
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished_requests() or self.scheduler.unanswered):
                break
            self.step()
        scheduler = self.scheduler
        assert not scheduler.has_unfinished_requests(), "it does not come to an end"
        assert scheduler.num_waiting == scheduler.num_running == scheduler.num_swapped == 0
        self._check_all_blocks_are_free()
        scheduler.check_invariants()
        if (drafter := scheduler.drafter) is not None:
            assert not drafter._texts
            drafted, accepted = totals(drafter)
            self.events["guesses accepted"] += 0 if self.limits.foretold else accepted
            self.events["drafts accepted"] += accepted
            self.events["drafts rejected"] += drafted - accepted
        self.events["hits"] += self.blocks.device.num_hits
        self.events["evictions"] += self.blocks.device.num_evictions

    @property
    def endings(self) -> dict[str, str | None]:
        """How each request that is finished has ended."""
        return {
            request_id: output.outputs[0].finish_reason
            for request_id, output in self.outputs.items()
            if output.finished
        }

    def _note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            before = self.outputs.get(output.request_id)
            assert before is None or not before.finished, "reported after its end"
            self.outputs[output.request_id] = output

    def _owner(self, sequence: Sequence) -> Request:
        return self.scheduler.get_request(f"r{sequence.seq_id // 100}")

    def _check_all_blocks_are_free(self) -> None:
        assert self.blocks.num_free_blocks == self.blocks.num_total_blocks
        assert self.blocks.host.num_free == self.blocks.host.num_blocks

    def _count(self, output: SchedulerOutput) -> None:
        step = output.step_input
        self.events["forks"] += len(output.forks)
        self.events["beam forks"] += len(step.forks) - len(output.forks)
        self.events["copies"] += len(step.block_moves.copies)
        self.events["adapter loads"] += len(step.adapter_loads)
        self.events["encoder tokens"] += step.num_encoder_tokens
        self.events["picture loads"] += len(step.picture_loads)
        self.events["pictures dropped"] += len(step.dropped_pictures)
        self.events["turns of the tower"] += step.num_awaited_rows > 0 and not output.rows
        self.events["moves without rows"] += bool(step.block_moves) and not output.rows
        self.events["swap outs"] += len(step.block_moves.swap_outs)
        self.events["swap ins"] += len(step.block_moves.swap_ins)
        for request in output.preempted:
            self.preemptions[request.request_id] += 1
            waits = any(s.status is SequenceStatus.WAITING for s in request.sequences)
            group = "group" if len(request.sequences) > 1 else "single"
            self.events[f"{group} {'recomputed' if waits else 'swapped'}"] += 1
            if waits and request.sampling_params.use_beam_search:
                self.events["beams recomputed"] += 1
        late = [n for n in step.new_sequences if n.index and n.num_computed_tokens]
        self.events["joined later"] += len(late)

    def _check_progress(self, oldest: Sequence | None, output: SchedulerOutput) -> None:
        """The first running request is in every step, or nearly so when prompts go first. Owners
        may change places."""
        if (
            oldest is None
            or self.limits.fairness == "owner"
            or oldest.slot is None
            or self._waits_for_picture(oldest)
            or any(self._owner(row) is self._owner(oldest) for row in output.rows)
        ):
            self._num_stalled_steps = 0
            return
        self._num_stalled_steps += 1
        assert not self.limits.chunked or self.limits.whole_pictures
        steps_each = -(-self.limits.model_len // self.limits.tokens)
        assert self._num_stalled_steps <= self.limits.seqs * steps_each

    def _waits_for_picture(self, sequence: Sequence) -> bool:
        place, pictures = sequence.num_computed_tokens, self._owner(sequence).pictures
        spans = [] if pictures is None else pictures.spans
        next_ones = [span for span in spans if span.start <= place < span.end]
        return not self.worker.features.issuperset(span.digest for span in next_ones)

    def _check_admissions(self, admitted: list[Request], output: SchedulerOutput) -> None:
        if output.preempted and admitted:
            assert self.limits.fairness == "owner", "admitted in a step that preempted"
            self.events["took room"] += 1
        for request in admitted:
            assert request.metrics.first_scheduled_time is not None
            if request not in self.admitted:
                self.admitted.append(request)
        by_arrival = self.limits.policy == "fcfs" and self.limits.fairness == "none"
        if by_arrival and admitted and not output.preempted:
            first = min((r.arrival_index for r in self.policy), default=sys.maxsize)
            passed = [r for r in admitted if first < r.arrival_index]
            self.events["passed"] += len(passed)
            self._passed += passed
        if self.is_in_order:
            self._check_order(self.admitted)

    def _check_order(self, requests: Iterable[Request]) -> None:
        """Those that passed no other are in order of arrival."""
        arrivals = [request.arrival_index for request in requests if request not in self._passed]
        assert arrivals == sorted(arrivals), "not in order of arrival"

    def _check_rows(self, admitted: list[Request], output: SchedulerOutput) -> None:
        """Sizes of the rows, before they are computed."""
        step, budget = output.step_input, self.limits.tokens
        assert [s.slot for s in output.rows] == step.slots
        assert [s.slot for s in output.sampled] == step.sample_slots
        owners = [self._owner(sequence) for sequence in output.rows]
        has_groups = any(len(request.sequences) > 1 for request in owners)
        catching_up = set()
        for sequence, size, request in zip(
            output.rows, step.num_scheduled_tokens, owners, strict=True
        ):
            num_left = max(1, sequence.num_tokens - sequence.num_computed_tokens + size)
            catching_up.add(request in admitted or num_left > 1)
            if size < num_left:
                self.events["chunks"] += 1
                resumed_long = sequence.num_output_tokens > 0 and sequence.num_tokens > budget
                is_divided = request.pictures is not None or request.encoder is not None
                assert self.limits.chunked or resumed_long or has_groups or is_divided
        if not self.limits.chunked and not has_groups and not self.limits.picture_rows:
            assert len(catching_up) == 1, "prompts and decodes in one step"
            self.events["whole steps"] += 1

    def _compare_with_worker(self, output: SchedulerOutput) -> None:
        """The worker's state, built from the messages, equals the driver's.

        The worker has each sequence that was a row, or was forked from one, since it got its slot.
        """
        children, counts = _children(output), dict(zip(output.rows, sizes(output), strict=True))
        by_slot = {s.slot: s for s in self._entered.values() if s.slot is not None}
        assert self.worker.slots.keys() == by_slot.keys()
        for slot_id, slot in self.worker.slots.items():
            sequence = by_slot[slot_id]
            assert slot.token_ids[: sequence.num_tokens] == sequence.token_ids
            assert slot.index == sequence.index
            if sequence not in children:  # these get their blocks in the update
                num_computed = sequence.num_computed_tokens - counts.get(sequence, 0)
                assert slot.num_computed_tokens == num_computed
                assert len(slot.token_ids) == max(sequence.num_tokens, num_computed + 1)
                table, cross = self.blocks.block_ids(sequence), slot.new.cross
                read = [] if cross is None else cross.block_ids
                assert read == self.blocks.cross.block_ids(sequence)
                num_given_back = table.count(NO_BLOCK)
                self.events["given back"] += num_given_back > 0
                assert len(slot.block_ids) == len(table)
                assert slot.block_ids[num_given_back:] == table[num_given_back:]


def _children(output: SchedulerOutput) -> list[Sequence]:
    return [child for _, child in output.forks]


def _has_slots(request: Request) -> bool:
    return any(sequence.slot is not None for sequence in request.sequences)


def run_alone(request_like: Request) -> RequestOutput:
    """The output of the same request in an engine with ample limits."""
    loop = Loop(replace(ROOMY, max_loras=1))
    index, prompt = request_like.arrival_index, request_like.prompt_token_ids
    adapter = request_like.adapter or 0
    loop.add(make_request(index, prompt, request_like.sampling_params, adapter=adapter))
    loop.run()
    return loop.outputs[request_like.request_id]


def sizes(output: SchedulerOutput) -> list[int]:
    """Tokens of each row."""
    return output.step_input.num_scheduled_tokens


def statuses(*requests: Request) -> list[str]:
    """Names of the states that the requests' sequences are in."""
    return [sequence.status.name for request in requests for sequence in request.sequences]
