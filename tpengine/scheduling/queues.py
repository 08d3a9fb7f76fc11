"""Where every request stands (waiting, running or swapped out), with its slots and blocks.

Every move between the queues is a method here; the scheduler decides which request moves. Slots and
blocks of a sequence are taken back in one place, `RequestQueues.release`, whether it finished, was
aborted, failed, was ignored or is computed again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from tpengine.config import SchedulerConfig
from tpengine.messages import Fork, StepInput
from tpengine.scheduling.adapter_slots import AdapterSlots
from tpengine.scheduling.block_manager import AllocStatus, BlockManager, BlockPair
from tpengine.scheduling.block_pool import expect
from tpengine.scheduling.drafter import Drafter
from tpengine.scheduling.fairness import FairShares
from tpengine.scheduling.passing import Passing
from tpengine.scheduling.picture_cache import PictureCache
from tpengine.scheduling.policy import SchedulingPolicy
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus
from tpengine.scheduling.step import slot_of


class BatchSlots:
    """Slots of the workers' batch, and the changes that the next message tells the workers.

    A sequence may have a slot before the workers know the sequence: the sequences of a request get
    their slots together, and enter the batch one by one.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(reversed(range(max_num_seqs)))
        self._known: set[int] = set()  # ids of sequences
        self._freed: list[int] = []
        self._forks: dict[int, tuple[Sequence, Sequence]] = {}  # by id of the child
        self._overrides: dict[int, Sequence] = {}

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def give(self, sequence: Sequence) -> None:
        """Gives a slot to a sequence without one."""
        sequence.slot = self._free.pop()

    def take_back(self, sequence: Sequence) -> None:
        """Takes the sequence's slot, and drops changes of it that were not sent."""
        slot = slot_of(sequence)
        self._free.append(slot)
        if sequence.seq_id in self._known:
            self._known.remove(sequence.seq_id)
            self._freed.append(slot)
        self._forks.pop(sequence.seq_id, None)
        self._overrides.pop(sequence.seq_id, None)
        sequence.slot = None

    def is_known(self, sequence: Sequence) -> bool:
        """Whether the workers hold the sequence, or will after the next message."""
        return sequence.seq_id in self._known

    def enter(self, sequence: Sequence) -> None:
        """Notes that the next message sends the sequence in full."""
        self._known.add(sequence.seq_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Notes that the child's slot becomes a copy of the parent's."""
        self._known.add(child.seq_id)
        self._forks[child.seq_id] = (parent, child)

    def override(self, sequence: Sequence) -> None:
        """Notes that the sequence's last token is not the one that the workers sampled."""
        self._overrides[sequence.seq_id] = sequence

    def tell_changes(self, message: StepInput) -> None:
        """Adds freed slots, forks, and overrides to a message; they are told only once."""
        forks, overridden = self._forks.values(), self._overrides.values()
        message.freed_slots = self._freed
        message.forks = [Fork(slot_of(p), slot_of(c), c.index) for p, c in forks]
        message.token_overrides = [(slot_of(s), s.token_ids[-1]) for s in overridden]
        self._freed, self._forks, self._overrides = [], {}, {}

    def are_whole(self, sequences: list[Sequence], num_slots: int) -> bool:
        """Whether free slots and those of `sequences` are all `num_slots` slots, each once."""
        taken = [slot_of(sequence) for sequence in sequences]
        once = len(set(self._freed)) == len(self._freed)
        return once and sorted(self._free + taken) == list(range(num_slots))


class RequestQueues:
    """The three queues. A move between them changes statuses, slots and blocks together.

    Attributes:
        blocks: those of the present cache.
        waiting: the policy: it holds the requests that hold no blocks and may run, in its order.
        barred: by id, waiting requests that may not run; see `restrict` and `use_grammars`.
        running, swapped: requests with device or host blocks, in order of the policy's `rank`.
        requests: all unfinished requests, by id.
        request_of: the request of each sequence with a slot, by the sequence's id.
        unforked: running requests whose other sequences are not forked from the first yet: by
            request id, the number of tokens that the first computes for all. Until then the others
            are WAITING, and have a slot and no blocks.
        passing: decides which requests pass the first waiting one.
        pictures: features that the ranks hold.
        drafter: None: no drafts.
        shares: the policy, if it shares the engine among owners; None: it does not.
    """

    def __init__(
        self, blocks: BlockManager, policy: SchedulingPolicy, config: SchedulerConfig
    ) -> None:
        self.waiting = policy
        self.shares = policy if isinstance(policy, FairShares) else None
        self._rank = policy.rank
        self.barred: dict[str, Request] = {}
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.request_of: dict[int, Request] = {}
        self.unforked: dict[str, int] = {}
        self.slots = BatchSlots(config.max_num_seqs)
        self.adapters = AdapterSlots(config.max_loras)
        self.pictures = PictureCache(config.pictures)
        self.passing = Passing(config, blocks, self.adapters, self.running)
        self.drafter = None if config.lookahead is None else Drafter(config.lookahead)
        self.blocks = blocks
        self._config = config
        self._allowed: frozenset[str] | None = None
        self._grammars: frozenset[str] = frozenset()

    def is_running(self, request: Request) -> bool:
        """Whether the request is in `running`: exactly these requests hold slots."""
        return any(sequence.slot is not None for sequence in request.sequences)

    def add(self, request: Request) -> None:
        """Adds a request that has just arrived."""
        self.requests[request.request_id] = request
        if self.shares is not None:
            self.shares.enter(request)
        self._wait(request)

    def begin_step(self, shares: FairShares) -> None:
        """Sorts running and swapped requests by what their owners were given until now."""
        shares.begin_step()
        self.running.sort(key=self._rank)
        self.swapped.sort(key=self._rank)

    def has_slots(self, request: Request) -> bool:
        """Whether there are slots for the sequences of a request, and for its adapter."""
        is_free = len(request.unfinished_sequences) <= self.slots.num_free
        return is_free and self.adapters.has_room(request, self.running)

    def has_room(self, request: Request) -> bool:
        """Whether a waiting request can start: there are slots and blocks for it."""
        is_free = self.has_slots(request)
        return is_free and self.blocks.can_allocate(request) is AllocStatus.OK

    def choose_passing(self, step: int) -> Request | None:
        """The waiting request to admit before the first one, which has no room; None: none is.

        Args:
            step: number of the step that is being scheduled.
        """
        return self.passing.choose(self.waiting, self.slots.num_free, step)

    def may_pass(self, request: Request, step: int) -> bool:
        """Whether a waiting request may start before the first one, which has no room."""
        latest = self.passing.latest_start(self.waiting.head(), self.slots.num_free, step)
        return latest is not None and step + self.passing.num_steps(request) <= latest

    def tell_changes(self, message: StepInput) -> None:
        """Tells the ranks what has changed since the step before."""
        self.slots.tell_changes(message)
        message.adapter_loads = self.adapters.take_loads()
        self.pictures.tell_changes(message)

    def start(self, request: Request) -> None:
        """Waiting to running: a slot for each unfinished sequence, blocks for the first."""
        self.waiting.remove(request)
        self.passing.forget(request)
        sequences = request.unfinished_sequences
        for sequence in sequences:  # while they wait, all have the prompt's one list
            if sequence.token_ids is request.prompt_token_ids:
                sequence.token_ids = sequence.token_ids.copy()
        self.blocks.allocate(request)
        sequences[0].move_to(SequenceStatus.RUNNING)
        if len(sequences) > 1:
            self.unforked[request.request_id] = request.num_common_tokens
        self._run(request, sequences)

    def swap_in(self, request: Request) -> list[BlockPair]:
        """Swapped to running; returns the (host, device) blocks to copy."""
        self.swapped.remove(request)
        sequences = request.unfinished_sequences
        pairs = self.blocks.swap_in(request)
        for sequence in sequences:
            sequence.move_to(SequenceStatus.RUNNING)
        self._run(request, sequences)
        return pairs

    def swap_out(self, request: Request) -> list[BlockPair]:
        """Running to swapped; returns the (device, host) blocks to copy."""
        self.running.remove(request)
        pairs = self.blocks.swap_out(request)
        for sequence in request.unfinished_sequences:
            self._take_slot(sequence)
            sequence.move_to(SequenceStatus.SWAPPED)
        insort(self.swapped, request, key=self._rank)
        return pairs

    def recompute(self, request: Request) -> None:
        """Running to waiting: all its tokens will be computed again."""
        self.running.remove(request)
        self._reset(request)
        self._wait(request)

    def restart(self, blocks: BlockManager) -> None:
        """Moves all requests to waiting, since the workers and all that they held are lost.

        Args:
            blocks: the block manager of the new cache; no sequence holds blocks of it.
        """
        lost = [*self.running, *self.swapped]
        for request in lost:
            for sequence in request.sequences:
                sequence.num_unanswered = 0
            self._reset(request)
        self.running.clear()
        self.swapped.clear()
        self.blocks = blocks
        self.slots = BatchSlots(self._config.max_num_seqs)
        self.adapters.restart()
        self.pictures.restart()
        self.passing = Passing(self._config, blocks, self.adapters, self.running)
        self._grammars = frozenset()
        self._sort(lost)

    def restrict(self, allowed: frozenset[str] | None) -> None:
        """Lets only requests of these ids run; None: all."""
        self._allowed = allowed
        stopped = []
        for queue in (self.running, self.swapped):
            stopped += [request for request in queue if not self._may_run(request)]
            queue[:] = [request for request in queue if self._may_run(request)]
        for request in stopped:
            self._reset(request)
        self._sort(stopped)

    def use_grammars(self, grammars: frozenset[str]) -> None:
        """Lets requests run that have no grammar, or one of these, which the workers have compiled;
        no other grammar belongs to a running request."""
        self._grammars = grammars
        for request in [other for other in self.barred.values() if self._may_run(other)]:
            del self.barred[request.request_id]
            self._wait(request)

    def lacks_grammar(self, request: Request) -> bool:
        """Whether the workers have not compiled the grammar of a request."""
        grammar = request.rules.grammar
        return grammar is not None and grammar not in self._grammars

    def end(self, request: Request, status: SequenceStatus) -> None:
        """Finishes all unfinished sequences of a request, and removes it from its queue."""
        if self.is_running(request):
            self.running.remove(request)
        elif any(s.status is SequenceStatus.SWAPPED for s in request.sequences):
            self.swapped.remove(request)
        elif self.barred.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        for sequence in request.sequences:
            self.release(sequence)
            if not sequence.status.finished:
                sequence.move_to(status)
        self._leave(request)

    def retire(self, sequence: Sequence) -> None:
        """Takes back what a finished sequence holds, and removes its request if all others have
        finished too."""
        request = self.request_of.get(sequence.seq_id)
        if request is None:  # already released, together with another sequence of its request
            return
        self.release(sequence)
        if request.finished:
            for other in request.sequences:
                self.release(other)
            self.running.remove(request)
            self._leave(request)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives the child the parent's blocks of the first `num_tokens` tokens."""
        self.blocks.fork(parent, child, num_tokens)
        child.num_computed_tokens = num_tokens

    def fork_waiting(self) -> None:
        """Forks the other sequences of requests whose first one has computed the common tokens."""
        for request_id, num_common in tuple(self.unforked.items()):
            first, *others = self.requests[request_id].unfinished_sequences
            if first.num_unanswered or first.num_computed_tokens < num_common:
                continue
            del self.unforked[request_id]
            for child in others:
                child.move_to(SequenceStatus.RUNNING)
                self.fork(first, child, num_common)

    def release(self, sequence: Sequence) -> None:
        """Takes slot and blocks back, if the sequence has any; the next message tells the workers.
        It keeps blocks that unanswered steps read or write, until a call after their answers."""
        if sequence.slot is not None:
            self._take_slot(sequence)
        if sequence.num_unanswered:
            return
        if self.blocks.holds_blocks(sequence):
            self.blocks.free(sequence)
        else:
            self.blocks.forget(sequence)

    def check_invariants(self, ended: Iterable[Sequence]) -> None:
        """Looks for requests, slots and blocks that are lost or doubled; slow, for tests.

        Args:
            ended: finished sequences with rows in unanswered steps.

        Raises:
            EngineError: an invariant does not hold; the message names it.
        """
        status, num_slots = SequenceStatus, self._config.max_num_seqs
        members = [s for request in self.running for s in request.unfinished_sequences]
        groups = [request for request in self.running if request.request_id in self.unforked]
        unforked = [s for request in groups for s in request.unfinished_sequences[1:]]
        running = [s for s in members if s not in unforked]
        swapped = [s for request in self.swapped for s in request.unfinished_sequences]
        idle = [*self.waiting, *self.barred.values()]
        waiting = [s for request in idle for s in request.unfinished_sequences]
        blank = waiting + unforked
        self.blocks.check_invariants([*running, *ended], swapped)
        queued = sorted(r.request_id for r in [*self.running, *self.swapped, *idle])
        invariants = {
            "free and held slots are all slots": self.slots.are_whole(members, num_slots),
            "every request is in one queue": queued == sorted(self.requests),
            "sequences in running are RUNNING": all(s.status is status.RUNNING for s in running),
            "sequences in swapped are SWAPPED": all(s.status is status.SWAPPED for s in swapped),
            "sequences in waiting are WAITING": all(s.status is status.WAITING for s in blank),
            "waiting sequences hold nothing": all(s.slot is None for s in waiting + swapped)
            and not any(s.num_computed_tokens for s in blank),
            "request_of has the sequences with slots": self.request_of.keys()
            == {s.seq_id for s in members},
            "adapters of running requests are loaded": all(
                self.adapters.has_room(request, self.running) for request in self.running
            ),
            "common tokens are of running requests": self.unforked.keys()
            <= {request.request_id for request in self.running},
            "requests in waiting may run": all(self._may_run(r) for r in self.waiting)
            and not any(self._may_run(r) for r in self.barred.values()),
            "accounts count their requests": self.shares is None
            or self.shares.are_right(self.requests.values()),
            "queues are in order of rank": all(
                queue == sorted(queue, key=self._rank) for queue in (self.running, self.swapped)
            ),
        }
        for invariant, holds in invariants.items():
            expect(holds, invariant)

    def _may_run(self, request: Request) -> bool:
        is_allowed = self._allowed is None or request.request_id in self._allowed
        return is_allowed and not self.lacks_grammar(request)

    def _wait(self, request: Request) -> None:
        if self._may_run(request):
            self.waiting.add(request)
            self.passing.note_arrival()
        else:
            self.barred[request.request_id] = request

    def _reset(self, request: Request) -> None:
        """Takes slots and blocks of a request; its tokens will be computed again."""
        self.unforked.pop(request.request_id, None)
        for sequence in request.unfinished_sequences:
            self.release(sequence)
            sequence.num_computed_tokens = 0
            if sequence.status is not SequenceStatus.WAITING:
                sequence.move_to(SequenceStatus.WAITING)

    def _sort(self, stopped: list[Request]) -> None:
        """Sorts requests that hold no blocks into those that may run and those that may not.

        Args:
            stopped: requests that lost their slots and blocks, and are in no queue.
        """
        idle = [*self.waiting, *self.barred.values(), *stopped]
        for request in tuple(self.waiting):
            self.waiting.remove(request)
        self.barred.clear()
        for request in sorted(idle, key=self._rank):
            self._wait(request)

    def _run(self, request: Request, sequences: list[Sequence]) -> None:
        self.adapters.take(request, self.running)
        for sequence in sequences:
            self.slots.give(sequence)
            self.request_of[sequence.seq_id] = request
        insort(self.running, request, key=self._rank)

    def _take_slot(self, sequence: Sequence) -> None:
        self.slots.take_back(sequence)
        del self.request_of[sequence.seq_id]

    def _leave(self, request: Request) -> None:
        self.passing.forget(request)
        self.unforked.pop(request.request_id, None)
        if self.shares is not None:
            self.shares.leave(request)
        if self.drafter is not None:
            self.drafter.leave(request)
        del self.requests[request.request_id]
        self.pictures.note_end(request, self.requests.values())
