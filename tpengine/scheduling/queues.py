"""Where every request stands: waiting, running or swapped out, with its slots and blocks."""

from __future__ import annotations

from bisect import insort

from tpengine.messages import BlockMoves
from tpengine.scheduling.batch_slots import BatchSlots
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.block_pool import expect
from tpengine.scheduling.groups import num_common_tokens
from tpengine.scheduling.policy import SchedulingPolicy
from tpengine.sequence import Request, Sequence, SequenceStatus


class RequestQueues:
    """The three queues. A move between them takes statuses, slots and blocks along.

    Attributes:
        waiting: those that hold nothing, in the policy's order.
        held: those that wait and may not run, by id; see `restrict`.
        running, swapped: those with device or host blocks, by rank.
        requests: all of them, by id.
        owners: the request of each sequence with a slot, by the sequence's id.
        common: by request id, the tokens that its first sequence computes for those of its others
            that have a slot but no blocks, and wait to be forked.
        in_flight: children that the step being computed forks; they get their blocks in `update`.
    """

    def __init__(
        self, blocks: BlockManager, policy: SchedulingPolicy, max_num_seqs: int, swap_mode: str
    ) -> None:
        self.waiting = policy
        self.held: dict[str, Request] = {}
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.owners: dict[int, Request] = {}
        self.common: dict[str, int] = {}
        self.in_flight: list[Sequence] = []
        self.slots = BatchSlots(max_num_seqs)
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._swap_mode = swap_mode
        self._allowed: frozenset[str] | None = None

    def is_running(self, request: Request) -> bool:
        """Whether the request holds slots."""
        return any(sequence.slot is not None for sequence in request.sequences)

    def is_forking(self, request: Request) -> bool:
        """Whether sequences of the request get their blocks with the step being scheduled, which
        has a row of it."""
        return any(sequence in self.in_flight for sequence in request.sequences)

    def add(self, request: Request) -> None:
        """Takes in a request that has just arrived."""
        self.requests[request.request_id] = request
        if self._may_run(request):
            self.waiting.add(request)
        else:
            self.held[request.request_id] = request

    def start(self, request: Request) -> None:
        """Waiting to running: a slot for each unfinished sequence, blocks for the first."""
        self.waiting.remove(request)
        sequences = request.unfinished_sequences
        self._blocks.allocate(request)
        sequences[0].move_to(SequenceStatus.RUNNING)
        if len(sequences) > 1:
            self.common[request.request_id] = num_common_tokens(sequences)
        self._run(request, sequences)

    def swap_in(self, request: Request) -> list[tuple[int, int]]:
        """Swapped to running; returns the (host, device) blocks to copy."""
        self.swapped.remove(request)
        sequences = request.unfinished_sequences
        pairs = self._blocks.swap_in(request)
        for sequence in sequences:
            sequence.move_to(SequenceStatus.RUNNING)
        self._run(request, sequences)
        return pairs

    def preempt(self, request: Request, moves: BlockMoves) -> None:
        """Running to swapped, or to waiting: its tokens are then computed again."""
        request.metrics.num_preemptions += 1
        self.running.remove(request)
        sequences = request.unfinished_sequences
        if self._swaps(request, sequences):
            moves.swap_outs += self._blocks.swap_out(request)
            for sequence in sequences:
                self._take_slot(sequence)
                sequence.move_to(SequenceStatus.SWAPPED)
            insort(self.swapped, request, key=self.waiting.rank)
            return
        self._give_up(request)
        self.waiting.put_back(request)

    def restart(self, blocks: BlockManager) -> None:
        """All slots and blocks, and what the workers knew, are void: everything waits.

        Args:
            blocks: of the new cache; nobody holds any.
        """
        self._blocks = blocks
        self.slots = BatchSlots(self._max_num_seqs)
        self.owners.clear()
        self.common.clear()
        self.in_flight.clear()
        for request in (*self.running, *self.swapped):
            for sequence in request.sequences:
                sequence.slot = None
                _start_over(sequence)
        self._line_up()

    def restrict(self, allowed: frozenset[str] | None) -> None:
        """Only requests of these ids may run; None: all."""
        self._allowed = allowed
        for request in (*self.running, *self.swapped):
            if not self._may_run(request):
                self._give_up(request)
        self._line_up()

    def end(self, request: Request, status: SequenceStatus) -> None:
        """Finishes all that is unfinished of a request, and takes it out of its queue."""
        if self.is_running(request):
            self.running.remove(request)
        elif any(s.status is SequenceStatus.SWAPPED for s in request.sequences):
            self.swapped.remove(request)
        elif self.held.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        for sequence in request.sequences:
            self.release(sequence)
            if not sequence.status.finished:
                sequence.move_to(status)
        self._leave(request)

    def retire(self, sequence: Sequence) -> None:
        """Takes back what a finished sequence holds, and its request if it was the last one."""
        request = self.owners.get(sequence.seq_id)
        if request is None:  # released with another one of its request
            return
        self.release(sequence)
        if request.finished:
            for other in request.sequences:
                self.release(other)
            self.running.remove(request)
            self._leave(request)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives the child the parent's blocks of the first `num_tokens` tokens."""
        self._blocks.fork(parent, child, num_tokens)
        child.num_computed_tokens = num_tokens

    def fork_waiting(self) -> None:
        """Forks the other sequences of requests whose first has computed what is common."""
        for request_id, num_common in tuple(self.common.items()):
            first, *others = self.requests[request_id].unfinished_sequences
            if first.num_computed_tokens < num_common:
                continue
            del self.common[request_id]
            for child in others:
                child.move_to(SequenceStatus.RUNNING)
                self.fork(first, child, num_common)

    def release(self, sequence: Sequence) -> None:
        """Takes slot and blocks, if it has any; the workers hear of it in the next step."""
        if self._blocks.holds_blocks(sequence):
            self._blocks.free(sequence)
        else:
            self._blocks.forget(sequence)
        if sequence.slot is not None:
            self._take_slot(sequence)

    def check_invariants(self) -> None:
        """Looks for requests, slots and blocks that are lost or doubled; slow, for tests.

        Raises:
            EngineError: what does not hold.
        """
        status = SequenceStatus
        members = [s for request in self.running for s in request.unfinished_sequences]
        forking = [
            s
            for request in self.running
            if request.request_id in self.common
            for s in request.unfinished_sequences[1:]
        ]
        running = [s for s in members if s not in forking and s not in self.in_flight]
        swapped = [s for request in self.swapped for s in request.unfinished_sequences]
        idle = [*self.waiting, *self.held.values()]
        waiting = [s for request in idle for s in request.unfinished_sequences]
        blank = waiting + forking
        self._blocks.check_invariants(running, swapped)
        queued = sorted(r.request_id for r in [*self.running, *self.swapped, *idle])
        invariants = {
            "slots, free and held, are all slots": self.slots.are_whole(
                members, self._max_num_seqs
            ),
            "every request is in one queue": queued == sorted(self.requests),
            "what runs is RUNNING": all(s.status is status.RUNNING for s in running),
            "what is swapped out is SWAPPED": all(s.status is status.SWAPPED for s in swapped),
            "what waits is WAITING": all(s.status is status.WAITING for s in blank),
            "what waits holds nothing": all(s.slot is None for s in waiting + swapped)
            and not any(s.num_computed_tokens for s in blank),
            "owners are those with slots": self.owners.keys() == {s.seq_id for s in members},
            "common tokens are of running requests": self.common.keys()
            <= {request.request_id for request in self.running},
            "only those that may run wait to": all(self._may_run(r) for r in self.waiting)
            and not any(self._may_run(r) for r in self.held.values()),
            "queues are in order of rank": all(
                queue == sorted(queue, key=self.waiting.rank)
                for queue in (self.running, self.swapped)
            ),
        }
        for invariant, holds in invariants.items():
            expect(holds, invariant)

    def _may_run(self, request: Request) -> bool:
        return self._allowed is None or request.request_id in self._allowed

    def _give_up(self, request: Request) -> None:
        """Takes slots and blocks of a request; its tokens will be computed again."""
        self.common.pop(request.request_id, None)
        for sequence in request.unfinished_sequences:
            self.release(sequence)
            _start_over(sequence)

    def _line_up(self) -> None:
        """Sorts the queues anew, by what each request holds and whether it may run."""
        idle = [*self.waiting, *self.held.values()]
        for request in tuple(self.waiting):
            self.waiting.remove(request)
        self.held.clear()
        for queue in (self.running, self.swapped):
            idle += [request for request in queue if _holds_nothing(request)]
            queue[:] = [request for request in queue if not _holds_nothing(request)]
        for request in sorted(idle, key=self.waiting.rank):
            if self._may_run(request):
                self.waiting.add(request)
            else:
                self.held[request.request_id] = request

    def _swaps(self, request: Request, sequences: list[Sequence]) -> bool:
        mode = self._swap_mode
        wanted = mode == "swap" or (mode == "auto" and len(sequences) > 1)
        # While the common tokens are being computed there is little to keep, and nobody to share.
        is_whole = request.request_id not in self.common
        return wanted and is_whole and self._blocks.can_swap_out(request)

    def _run(self, request: Request, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.slots.give(sequence)
            self.owners[sequence.seq_id] = request
        insort(self.running, request, key=self.waiting.rank)

    def _take_slot(self, sequence: Sequence) -> None:
        self.slots.take_back(sequence)
        del self.owners[sequence.seq_id]

    def _leave(self, request: Request) -> None:
        self.common.pop(request.request_id, None)
        del self.requests[request.request_id]


def _start_over(sequence: Sequence) -> None:
    """Lets a sequence without slot and blocks wait; a finished one stays as it is."""
    if not sequence.status.finished:
        sequence.num_computed_tokens = 0
        if sequence.status is not SequenceStatus.WAITING:
            sequence.move_to(SequenceStatus.WAITING)


def _holds_nothing(request: Request) -> bool:
    waiting = SequenceStatus.WAITING
    sequences = request.unfinished_sequences
    return all(s.slot is None and s.status is waiting for s in sequences)
