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
from tpengine.messages import NewSequence
from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from tpengine.scheduling.refusal import too_long_for_cache, why_never
from tpengine.scheduling.step import SchedulerOutput, StepBuilder, slot_of
from tpengine.sequence import Request, Sequence, SequenceStatus


class Scheduler:
    """Decides each step from the requests, one budget, and the blocks that are free.

    With chunked prefill, a step continues what runs, in order, and fills up with waiting prompts
    or parts of them. Without, a step holds whole prompts or decodes, prompts preferred.

    Args:
        block_manager: shared with nobody else.
        policy: order of the waiting requests; first come, first served unless given.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self._config = config
        self._block_manager = block_manager
        self._waiting = FirstComeFirstServed() if policy is None else policy
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, Request] = {}  # by id of a running sequence
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._freed_slots: list[int] = []  # what the workers have not been told yet
        self._num_steps = 0
        self._num_admitted_since_decode = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold slots and blocks."""
        return len(self._running)

    def has_unfinished_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._requests)

    def get_request(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if there is one."""
        return self._requests.get(request_id)

    def add_request(self, request: Request) -> None:
        """Lets a request wait.

        Raises:
            DuplicateRequestError: an unfinished request has its id.
        """
        if request.request_id in self._requests:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} belongs to a request that has not finished; "
                "choose another, or abort that one first"
            )
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Ends a request wherever it stands, and takes its blocks and slots back.

        Returns:
            The request; None if there is no unfinished one of that id, which is no error: it may
            have finished while the caller made up its mind.
        """
        request = self._requests.get(request_id)
        if request is None or request.finished:  # finished in the step that `update` will book
            return None
        self._end(request, SequenceStatus.FINISHED_ABORTED)
        return request

    def schedule(self) -> SchedulerOutput:
        """Chooses the rows of the next step, and moves requests between the queues for it."""
        step = StepBuilder(self._config.max_num_batched_tokens)
        if self._config.enable_chunked_prefill:
            self._continue(self._running, step)
            self._admit(step)
        else:
            self._continue(self._catching_up(), step)
            self._admit(step)
            if step.is_empty:
                self._num_admitted_since_decode = 0
                self._continue(self._running, step)
        if step.is_empty:
            return step.build(self._num_steps + 1, [])
        self._num_steps += 1
        freed_slots, self._freed_slots = self._freed_slots, []
        return step.build(self._num_steps, freed_slots)

    def update(self, output: SchedulerOutput) -> None:
        """Books a step that has been computed, after its tokens have been processed.

        Sequences that have meanwhile been moved to a finished status give blocks and slots back;
        requests without an unfinished sequence leave.
        """
        running = SequenceStatus.RUNNING
        sizes = output.step_input.num_scheduled_tokens
        for sequence, size in zip(output.rows, sizes, strict=True):
            if sequence.slot is None:  # aborted while the step was computed
                continue
            sequence.num_computed_tokens += size
            if sequence.status is not running:
                request = self._owners[sequence.seq_id]
                self._release(sequence)
                if request.finished:
                    self._running.remove(request)
                    del self._requests[request.request_id]

    def check_invariants(self) -> None:
        """Looks for requests, slots and blocks that are lost or doubled; slow, for tests.

        Raises:
            EngineError: what does not hold.
        """
        running = [s for request in self._running for s in request.unfinished_sequences]
        waiting = [s for request in self._waiting for s in request.unfinished_sequences]
        self._block_manager.check_invariants(running)
        slots = sorted(self._free_slots + [slot_of(sequence) for sequence in running])
        queued = sorted(request.request_id for request in [*self._running, *self._waiting])
        invariants = {
            "slots, free and held, are all slots": slots == list(range(self._config.max_num_seqs)),
            "every request is in one queue": queued == sorted(self._requests),
            "what runs is RUNNING": all(s.status is SequenceStatus.RUNNING for s in running),
            "what waits is WAITING": all(s.status is SequenceStatus.WAITING for s in waiting),
            "what waits holds nothing": all(s.slot is None for s in waiting)
            and not any(s.num_computed_tokens for s in waiting),
            "owners are those that run": self._owners.keys() == {s.seq_id for s in running},
            "a freed slot is told once": len(set(self._freed_slots)) == len(self._freed_slots),
        }
        for invariant, holds in invariants.items():
            if not holds:
                raise EngineError(f"scheduler: it does not hold that {invariant}")

    def _catching_up(self) -> list[Request]:
        """Running requests with more than one token to compute.

        Without chunked prefill: those that were preempted when they were already longer than a
        step. Their prompt was accepted, so they are computed in parts rather than given up.
        """
        behind = (
            request
            for request in self._running
            for sequence in request.sequences
            if len(sequence.token_ids) - sequence.num_computed_tokens > 1
        )
        return list(dict.fromkeys(behind))  # each once, in order

    def _continue(self, requests: Iterable[Request], step: StepBuilder) -> None:
        """Schedules running requests in order, and preempts from the end where blocks run out."""
        blocks, running = self._block_manager, SequenceStatus.RUNNING
        for request in tuple(requests):
            lacking = blocks.num_lacking_blocks(request)
            # Room for all its sequences first: none may be a row when another loses the blocks.
            if lacking and step.tokens_left:
                self._make_room(request, lacking, step)
            for sequence in request.sequences:
                if not step.tokens_left:
                    return
                if sequence.status is not running:
                    continue
                if lacking and (new_blocks := blocks.append(sequence)):
                    step.new_block_ids.append((slot_of(sequence), new_blocks))
                num_left = len(sequence.token_ids) - sequence.num_computed_tokens
                if num_left < 1:
                    raise EngineError(
                        f"sequence {sequence.seq_id} was sampled, but its token was not appended"
                    )
                step.add(sequence, min(num_left, step.tokens_left))

    def _make_room(self, request: Request, num_blocks: int, step: StepBuilder) -> None:
        """Preempts until `num_blocks` are free, or until the request does not run any more."""
        while self._block_manager.num_free_blocks < num_blocks:
            if len(self._running) == 1:
                self._ignore(request, too_long_for_cache(request, self._block_manager), step)
                return
            victim = self._waiting.victim(self._running)
            self._preempt(victim, step)
            if victim is request:
                return

    def _preempt(self, request: Request, step: StepBuilder) -> None:
        """Takes blocks and slots away; the request will compute its tokens again."""
        for sequence in request.unfinished_sequences:
            self._release(sequence)
            sequence.num_computed_tokens = 0
            sequence.move_to(SequenceStatus.WAITING)
        request.metrics.num_preemptions += 1
        self._running.remove(request)
        self._waiting.put_back(request)
        step.preempted.append(request)

    def _admit(self, step: StepBuilder) -> None:
        """Starts waiting requests while there are tokens, slots and blocks for the first of them.

        Not in a step that preempted: the blocks are wanted by those that run.
        """
        chunked = self._config.enable_chunked_prefill
        while self._waiting and step.tokens_left and not step.preempted:
            # Requests that end with their first token free their slots at once. A whole round of
            # admissions without a decode is enough; otherwise such could keep the others waiting.
            if (
                not chunked
                and self._num_admitted_since_decode >= self._config.max_num_seqs
                and self._running
            ):
                return
            request = self._waiting.head()
            reason = why_never(request, self._config, self._block_manager)
            if reason is not None:
                self._ignore(request, reason, step)
                continue
            sequences = request.unfinished_sequences
            if len(sequences) > len(self._free_slots):
                return
            if self._block_manager.can_allocate(request) is not AllocStatus.OK:
                return
            num_tokens = sum(sequence.num_tokens for sequence in sequences)
            if not chunked and num_tokens > step.tokens_left and not step.is_empty:
                return
            self._start(request, sequences, step)

    def _start(self, request: Request, sequences: list[Sequence], step: StepBuilder) -> None:
        """Gives a waiting request slots and blocks, and schedules what fits of its tokens."""
        self._waiting.remove(request)
        self._running.append(request)
        self._num_admitted_since_decode += len(sequences)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
        params = request.sampling_params
        for sequence in sequences:
            sequence.move_to(SequenceStatus.RUNNING)
            sequence.slot = self._free_slots.pop()
            self._owners[sequence.seq_id] = request
            step.new_sequences.append(
                NewSequence(
                    slot=sequence.slot,
                    token_ids=sequence.token_ids.copy(),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_computed_tokens=sequence.num_computed_tokens,
                    block_ids=self._block_manager.allocate(sequence),
                    sampling_params=params,
                    seed=request.seed,
                    index=sequence.index,
                    end_token_ids=sorted(request.end_token_ids) if params.min_tokens > 0 else [],
                )
            )
            if step.tokens_left:
                step.add(sequence, min(sequence.num_tokens, step.tokens_left))

    def _ignore(self, request: Request, reason: str, step: StepBuilder) -> None:
        request.error = reason
        self._end(request, SequenceStatus.FINISHED_IGNORED)
        step.ignored.append(request)

    def _end(self, request: Request, status: SequenceStatus) -> None:
        """Finishes all that is unfinished of a request, and takes it out of its queue."""
        if all(sequence.slot is None for sequence in request.sequences):
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        for sequence in request.sequences:
            if sequence.slot is not None:
                self._release(sequence)
            if not sequence.status.finished:
                sequence.move_to(status)
        del self._requests[request.request_id]

    def _release(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and slot; the workers hear of it in the next step."""
        slot = slot_of(sequence)
        self._block_manager.free(sequence)
        self._free_slots.append(slot)
        self._freed_slots.append(slot)
        del self._owners[sequence.seq_id]
        sequence.slot = None
