"""Which sequences compute how many of their tokens in the next step.

There is no prefill and no decode here: a sequence has `num_tokens` and `num_computed_tokens`, and a
step lets the second catch up with the first. A new prompt, a chunk of it, the token after a sampled
one and a sequence that starts over after preemption are all that one sentence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tpengine.config import SchedulerConfig
from tpengine.errors import DuplicateRequestError, EngineError
from tpengine.scheduling.allocation import AllocStatus
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.booking import book_step
from tpengine.scheduling.groups import choose_rows, find_catching_up, num_common_tokens
from tpengine.scheduling.look_ahead import find_next
from tpengine.scheduling.policy import POLICIES, SchedulingPolicy
from tpengine.scheduling.queues import RequestQueues
from tpengine.scheduling.refusal import too_long_for_cache, why_never, why_no_more
from tpengine.scheduling.step import SchedulerOutput, StepBuilder, slot_of
from tpengine.sequence import Request, Sequence, SequenceStatus


class Scheduler:
    """Decides each step from the requests, one budget, and the blocks that are free.

    With chunked prefill, a step continues what runs, in order, and fills up with swapped requests,
    then with waiting prompts or parts of them. Without, a step holds whole prompts or decodes,
    prompts preferred.

    A request with several sequences is admitted as one, with a slot for each. What they have in
    common is computed once, by the first; then the others are forked from it.

    Args:
        block_manager: shared with nobody else.
        policy: order of the requests; the one that the configuration names unless given.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self._config = config
        self._blocks = block_manager
        if policy is None:
            policy = POLICIES[config.policy]()
        self._queues = RequestQueues(
            block_manager, policy, config.max_num_seqs, config.preemption_mode
        )
        self._num_steps = 0
        self._num_admitted_since_decode = 0

    @property
    def block_manager(self) -> BlockManager:
        """The blocks of the present cache."""
        return self._blocks

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._queues.waiting) + len(self._queues.held)

    @property
    def num_running(self) -> int:
        """Requests that hold slots and blocks."""
        return len(self._queues.running)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the host."""
        return len(self._queues.swapped)

    def running_sequences(self) -> list[Sequence]:
        """Sequences that hold device blocks."""
        running = SequenceStatus.RUNNING
        return [
            s for request in self._queues.running for s in request.sequences if s.status is running
        ]

    def has_unfinished_requests(self) -> bool:
        """Whether anything waits, runs or is swapped out."""
        return bool(self._queues.requests)

    def unfinished_requests(self) -> list[Request]:
        """All that waits, runs or is swapped out."""
        return list(self._queues.requests.values())

    def get_request(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if there is one."""
        return self._queues.requests.get(request_id)

    def add_request(self, request: Request) -> None:
        """Lets a request wait.

        Raises:
            DuplicateRequestError: an unfinished request has its id.
        """
        if request.request_id in self._queues.requests:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} belongs to a request that has not finished; "
                "choose another, or abort that one first"
            )
        self._queues.add(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Ends a request wherever it stands, and takes its blocks and slots back.

        Returns:
            The request; None if there is no unfinished one of that id, which is no error: it may
            have finished while the caller made up its mind.
        """
        return self._end_by_id(request_id, SequenceStatus.FINISHED_ABORTED)

    def fail_request(self, request_id: str, reason: str) -> Request | None:
        """Ends a request that cannot go on, as `abort_request` does, with the reason as its
        error."""
        request = self._end_by_id(request_id, SequenceStatus.FINISHED_FAILED)
        if request is not None:
            request.error = reason
        return request

    def schedule(self) -> SchedulerOutput:
        """Chooses the rows of the next step, and moves requests between the queues for it."""
        step = StepBuilder(self._config.max_num_batched_tokens)
        running = self._queues.running
        if self._config.enable_chunked_prefill:
            self._continue(running, step)
            self._admit_swapped(step)
            self._admit(step)
        else:
            self._continue(find_catching_up(running), step)
            self._admit(step)
            if step.is_empty:
                self._num_admitted_since_decode = 0
                self._continue(running, step)
                self._admit_swapped(step)
        if step.is_empty:
            if step.block_moves:
                raise EngineError("blocks are to be moved by a step that nobody will send")
            return step.build(self._num_steps + 1, [], [], [])
        self._num_steps += 1
        slots, going_on = self._queues.slots, []
        if self._config.looks_ahead:
            going_on = find_next(step, self._queues, self._blocks, self._config.max_model_len)
        changes = slots.take_freed(), slots.take_forks(), slots.take_overrides()
        return step.build(self._num_steps, *changes, going_on)

    def update(self, output: SchedulerOutput) -> None:
        """Books a step that has been computed, after its tokens have been processed."""
        book_step(output, self._queues, self._blocks)

    def restart(self, block_manager: BlockManager) -> None:
        """Lets every unfinished request wait, with the tokens that it has, for workers that hold
        nothing yet: the old ones are gone, with all that was in their caches and all that they
        had yet to be told. A step that they did not answer has not happened.

        Args:
            block_manager: an empty one of the new cache.
        """
        self._blocks = block_manager
        self._queues.restart(block_manager)

    def restrict(self, allowed: frozenset[str] | None) -> None:
        """Lets only requests of these ids run; all others wait, also those that come later.

        What ran or was swapped out and may not is computed again when it may.

        Args:
            allowed: None: all of them.
        """
        self._queues.restrict(allowed)

    def check_invariants(self) -> None:
        """Looks for requests, slots and blocks that are lost or doubled; slow, for tests.

        Raises:
            EngineError: what does not hold.
        """
        self._queues.check_invariants()

    def _continue(self, requests: Iterable[Request], step: StepBuilder) -> None:
        """Schedules running requests in order, and preempts from the end where blocks run out."""
        blocks, running = self._blocks, SequenceStatus.RUNNING
        for request in tuple(requests):
            if not step.tokens_left:
                return
            if len(request.sequences) > 1:
                self._continue_group(request, step)
                continue
            (sequence,) = request.sequences
            lacking = blocks.num_lacking_blocks(request)
            if lacking:
                self._make_room(request, lacking, step)
            if sequence.status is running:
                num_left = len(sequence.token_ids) - sequence.num_computed_tokens
                self._add_row(sequence, min(num_left, step.tokens_left), step, lacking > 0)

    def _continue_group(self, request: Request, step: StepBuilder) -> None:
        """Schedules what fits of a running request with several sequences."""
        if not self._queues.is_running(request):  # preempted for one before it
            return
        if request.request_id in self._queues.common:
            self._compute_common(request, step)
            return
        if not choose_rows(request, step.tokens_left):
            return
        lacking = self._blocks.num_lacking_blocks(request)
        if lacking:
            # Room for all its sequences: none may be a row when another loses the blocks.
            self._make_room(request, lacking, step)
        if self._queues.is_running(request):
            for sequence, size in choose_rows(request, step.tokens_left):
                self._add_row(sequence, size, step, lacking > 0)

    def _compute_common(self, request: Request, step: StepBuilder) -> None:
        """Lets the first sequence compute for all; if it thereby completes its own tokens, the
        others are sampled from its row."""
        first, *others = request.unfinished_sequences
        num_common = self._queues.common[request.request_id]
        size = min(num_common - first.num_computed_tokens, step.tokens_left)
        self._add_row(first, size, step, grow=False)
        if first.num_computed_tokens + size == first.num_tokens:
            del self._queues.common[request.request_id]
            for child in others:
                child.move_to(SequenceStatus.RUNNING)
                self._queues.slots.fork(first, child)
                self._queues.in_flight.append(child)
                step.forks.append((first, child))

    def _add_row(self, sequence: Sequence, size: int, step: StepBuilder, grow: bool) -> None:
        """Makes a running sequence a row, with a place for each of its tokens."""
        if size < 1:
            raise EngineError(
                f"sequence {sequence.seq_id} was sampled, but its token was not appended"
            )
        is_known = self._queues.slots.is_known(sequence)
        if grow:
            growth = self._blocks.append(sequence)
            if growth.block_ids and is_known:
                step.add_blocks(sequence, growth.block_ids)
            if growth.copy is not None:
                step.block_moves.copies.append(growth.copy)
                if is_known:
                    place = (slot_of(sequence), growth.copy_place, growth.copy[1])
                    step.replaced_block_ids.append(place)
        if not is_known:
            self._queues.slots.enter(sequence)
            request = self._queues.owners[sequence.seq_id]
            step.enter(request, sequence, self._blocks.block_ids(sequence))
        step.add(sequence, size)

    def _make_room(self, request: Request, num_blocks: int, step: StepBuilder) -> None:
        """Preempts until `num_blocks` are free, or until the request does not run any more."""
        blocks, queues = self._blocks, self._queues
        if blocks.num_free_blocks < num_blocks:
            # First, so that nobody gives way in vain, and so that somebody who remains has a row:
            # without one the step, and the blocks that it swaps out, would never be sent.
            for other in tuple(queues.running):
                reason = None if queues.is_forking(other) else why_no_more(other, blocks)
                if reason is not None:
                    self._ignore(other, reason, step)
        while blocks.num_free_blocks < num_blocks and queues.is_running(request):
            victim = queues.running[-1]
            queues.preempt(victim, step.block_moves)
            step.preempted.append(victim)

    def _admit_swapped(self, step: StepBuilder) -> None:
        """Brings swapped requests back while there are tokens, slots and blocks for the first.

        Not in a step that preempted: the blocks are wanted by those that run, and what is swapped
        out in a step is not swapped in.
        """
        queues = self._queues
        while queues.swapped and step.tokens_left and not step.preempted:
            request = queues.swapped[0]
            status = self._blocks.can_swap_in(request)
            if status is AllocStatus.NEVER:
                self._ignore(request, too_long_for_cache(request, self._blocks), step)
                continue
            num_slots = len(request.unfinished_sequences)
            if status is AllocStatus.LATER or num_slots > queues.slots.num_free:
                return
            step.block_moves.swap_ins += queues.swap_in(request)
            self._continue([request], step)

    def _admit(self, step: StepBuilder) -> None:
        """Starts waiting requests while there are tokens, slots and blocks for the first of them,
        once nothing is swapped out any more.

        Not in a step that preempted: the blocks are wanted by those that run.
        """
        chunked, queues = self._config.enable_chunked_prefill, self._queues
        while queues.waiting and not queues.swapped and step.tokens_left and not step.preempted:
            # Requests that end with their first token free their slots at once. A whole round of
            # admissions without a decode is enough; otherwise such could keep the others waiting.
            if (
                not chunked
                and self._num_admitted_since_decode >= self._config.max_num_seqs
                and queues.running
            ):
                return
            request = queues.waiting.head()
            reason = why_never(request, self._config, self._blocks)
            if reason is not None:
                self._ignore(request, reason, step)
                continue
            sequences = request.unfinished_sequences
            if len(sequences) > queues.slots.num_free:
                return
            if self._blocks.can_allocate(request) is not AllocStatus.OK:
                return
            # What the prefix cache knows of it does not count: whether it does depends on others.
            num_tokens = num_common_tokens(sequences)
            if not chunked and num_tokens > step.tokens_left and not step.is_empty:
                return
            self._start(request, step)

    def _start(self, request: Request, step: StepBuilder) -> None:
        """Runs a waiting request, and schedules what fits of its tokens."""
        self._queues.start(request)
        first, *others = request.unfinished_sequences
        self._num_admitted_since_decode += 1 + len(others)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.time()
            request.metrics.num_cached_tokens = first.num_computed_tokens
        if others:
            self._compute_common(request, step)
        else:
            num_left = first.num_tokens - first.num_computed_tokens
            self._add_row(first, min(num_left, step.tokens_left), step, grow=False)

    def _ignore(self, request: Request, reason: str, step: StepBuilder) -> None:
        request.error = reason
        self._queues.end(request, SequenceStatus.FINISHED_IGNORED)
        step.ignored.append(request)

    def _end_by_id(self, request_id: str, status: SequenceStatus) -> Request | None:
        request = self._queues.requests.get(request_id)
        if request is None or request.finished:  # finished in the step that `update` will book
            return None
        self._queues.end(request, status)
        return request
