"""Decides which sequences compute how many of their tokens in the next step.

There is no prefill and no decode here: a sequence has `num_tokens` and `num_computed_tokens`, and a
step lets the second catch up with the first. This covers a new prompt, a part of it, the token
after a sampled one, and a sequence that starts again after preemption.

Where each decision stands:
    admission: `_admit` and `_admit_swapped`; which requests pass the first one: `passing.py`.
    how long waiting prompts gather before: `prompt_delay.py`.
    how prompts divide a step: `prompt_shares.py`; `_chunk_size` applies it.
    shares of owners: `fairness.py`; `_admit_owed` applies them.
    preemption: `_make_room` (which request, and whether by swap or recompute).
    refusal of requests that can never run: `hopeless_requests.py`.
    what each stage of a pipeline works on: `stage_groups.py`.
    drafts: `drafter.py`; `Drafter.add_to` finds room for them.
    what is planned while steps are unanswered: the docstring of `Scheduler`.
    the effects of an answered step: `update`.
    the end of a request from outside: `abort_request` and `fail_request`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

from tpengine.config import SchedulerConfig
from tpengine.errors import RequestError, RequestIgnoredError
from tpengine.messages import StepInput
from tpengine.scheduling import step as steps
from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.block_pool import expect
from tpengine.scheduling.drafter import Drafter
from tpengine.scheduling.fairness import FairShares, OwnerStats
from tpengine.scheduling.hopeless_requests import outgrown, why_never, why_no_more, why_too_long
from tpengine.scheduling.policy import POLICIES
from tpengine.scheduling.prompt_delay import PromptDelay
from tpengine.scheduling.prompt_shares import PromptShares
from tpengine.scheduling.queues import RequestQueues
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus
from tpengine.scheduling.stage_groups import StageGroups
from tpengine.scheduling.step import SchedulerOutput, StepBuilder, StepDecisions


class Scheduler:
    """Chooses each step from the requests, within one budget of tokens and the free blocks.

    With chunked prefill, a step continues running requests in order, then brings swapped requests
    back, then starts waiting prompts or parts of them. Without it, a step holds either whole
    prompts or decodes, and prompts are preferred.

    A request with several sequences is admitted as a whole, with a slot for each sequence. The
    first sequence computes their common tokens; then the others are forked from it.

    A step can be planned while earlier ones are unanswered. Their tokens count as computed, and a
    sequence that they sample has one more token, whose id only the ranks know. Only an answer
    confirms. A sequence that ends keeps its blocks until its last step is answered, and what later
    steps sample for it is dropped. Three decisions wait for answers: which beams live on, the fork
    of a group, and preemption; only the last one holds up other requests. A step with drafts is
    the last one until it is answered: how many tokens its sequences have is not known before.

    Args:
        block_manager: no other scheduler uses it.

    Attributes:
        unanswered: steps that were sent to the ranks, oldest first.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self._config = config
        make_policy = POLICIES[config.policy]
        policy = make_policy()
        if config.fairness == "owner":
            policy = FairShares(make_policy, config.max_num_seqs)
        self._queues = RequestQueues(block_manager, policy, config)
        self._prompt_shares = PromptShares(self._queues, config, self._start)
        self._prompt_delay = PromptDelay(config.delay_factor)
        self._stages = StageGroups(config.num_stages) if config.num_stages > 1 else None
        self.unanswered: deque[SchedulerOutput] = deque()
        self._num_steps = 0
        self._num_admitted_since_decode = 0
        self._answered_at = 0.0

    @property
    def block_manager(self) -> BlockManager:
        """The blocks of the present cache."""
        return self._queues.blocks

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._queues.waiting) + len(self._queues.barred)

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
        return [s for request in self._queues.running for s in request.running_sequences]

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits, runs or is swapped out."""
        return bool(self._queues.requests)

    def unfinished_requests(self) -> list[Request]:
        """All requests that wait, run or are swapped out."""
        return list(self._queues.requests.values())

    def get_request(self, request_id: str) -> Request | None:
        """The unfinished request of that id; None if there is none."""
        return self._queues.requests.get(request_id)

    def owner_stats(self) -> dict[str, OwnerStats]:
        """Requests and tokens of each owner; empty without fair shares. Any thread may ask."""
        return {} if self._queues.shares is None else self._queues.shares.stats()

    def add_request(self, request: Request) -> None:
        """Adds a request to the waiting ones."""
        # `engine/requests.py` refuses both before.
        assert request.request_id not in self._queues.requests, request.request_id
        assert len(request.sequences) <= self._config.max_num_seqs
        self._queues.add(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Ends a request in any state. Its slots are free when this returns. So are its blocks,
        unless a step in flight has a row of it; then they are free after the answer.

        Returns:
            The request; None if no unfinished request has that id. This is not an error: the
            request may have finished before the caller asked.
        """
        return self._end(request_id, SequenceStatus.FINISHED_ABORTED)

    def fail_request(self, request_id: str, error: RequestError) -> Request | None:
        """Ends a request that cannot go on, as `abort_request` does."""
        request = self._end(request_id, SequenceStatus.FINISHED_FAILED)
        if request is not None:
            request.error = error
        return request

    def schedule(self, is_alone: bool = False) -> SchedulerOutput:
        """Chooses the rows of the next step, and moves requests between the queues for it. A step
        that is not empty counts as sent.

        Args:
            is_alone: whether no other step is sent before its answer. Then the stages of a pipeline
                cannot work on different sequences.
        """
        step = StepBuilder(
            StepInput(self._num_steps + 1, [], []), tokens_left=self._config.max_num_batched_tokens
        )
        if self.unanswered and (self.unanswered[-1].lacks_blocks or self.unanswered[-1].drafts):
            return step.build()
        queues = self._queues
        running, shares = queues.running, queues.shares
        stages = None if is_alone else self._stages
        if stages is not None:
            stages.begin_step(running, self.unanswered)
        if self._config.enable_chunked_prefill:
            if shares is not None:
                running = self._admit_owed(shares, step)
            self._continue(running, step, stages)
            self._admit_swapped(step)
            self._admit(step)
        else:
            self._continue(steps.find_catching_up(running), step)
            self._admit(step)
            if not step.has_rows:
                self._num_admitted_since_decode = 0
                self._continue(running, step, stages)
                self._admit_swapped(step)
        if stages is not None and not step.has_rows:
            stages.begin_idle_step(running)
            self._continue(running, step, stages)
        queues.pictures.go_on(step, running=queues.running, is_busy=bool(self.unanswered))
        if step.has_rows:
            if stages is not None:
                stages.end_step(step)
            if not self.unanswered:  # the ranks, or the user's program, may have been idle
                self._answered_at = time.perf_counter()
            if queues.drafter is not None:
                limit, is_alone = self._config.max_sampled_rows, not self.unanswered
                queues.drafter.add_to(step, queues.request_of, queues.blocks, limit, is_alone)
        output = step.build()
        if not output.is_empty:
            self._num_steps = step.step_input.step
            queues.tell_changes(output.step_input)
            self.unanswered.append(output)
        return output

    def update(self, decisions: StepDecisions) -> None:
        """Applies the answer of the oldest unanswered step, and what was decided about its tokens.

        Offers full blocks to the prefix cache, gives forked sequences their blocks, and appends the
        tokens. Finished sequences give blocks and slots back; a request without an unfinished
        sequence leaves.
        """
        queues, blocks, output = self._queues, self.block_manager, self.unanswered.popleft()
        for sequence, status in decisions.finished:
            sequence.move_to(status)
        # Before the rows, so that blocks of a failed request are not offered to the prefix cache.
        for request_id, error in decisions.failed.items():
            self.fail_request(request_id, error)
        queues.adapters.note_failed(decisions.failed_loads, output.step_input.adapter_loads)
        loads = decisions.computed_pictures, decisions.failed_loads
        queues.pictures.note_answer(output.step_input.step, *loads)
        block_size = blocks.block_size
        sizes, ends = output.step_input.num_scheduled_tokens, output.num_computed_tokens
        for sequence, size, num_computed in zip(output.rows, sizes, ends, strict=True):
            sequence.num_unanswered -= 1
            if sequence.slot is None:  # it ended while the step was in flight
                queues.release(sequence)
            elif (size > 1 or num_computed % block_size == 0) and sequence not in output.drafts:
                blocks.mark_computed(sequence, num_computed)
        for _, child in output.forks:
            child.num_unanswered -= 1
            if child.slot is None:
                queues.release(child)
            else:
                blocks.mark_computed(child, child.num_computed_tokens)
        # Beams that continue as a copy of another beam, because this step's tokens made that one
        # better. They lose their own tokens; the next message tells the workers to copy the slot.
        for parent, child in decisions.forks:
            child.token_ids = parent.token_ids.copy()
            queues.fork(parent, child, parent.num_computed_tokens)
            queues.slots.fork(parent, child)
        for sequence, token_id in decisions.tokens:
            sequence.token_ids.append(token_id)
        if queues.shares is not None:
            queues.shares.charge_outputs(decisions.tokens, queues.request_of)
        now = time.perf_counter()
        step_s, self._answered_at = now - self._answered_at, now
        if output.num_prefill_tokens:
            self._prompt_delay.note_prompts(step_s)
        if queues.drafter is not None:
            queues.drafter.note_answer(output, decisions, blocks, step_s)
        for sequence in decisions.overridden:
            queues.slots.override(sequence)
        for sequence, _ in decisions.finished:
            queues.retire(sequence)
        if queues.unforked:
            queues.fork_waiting()

    def restart(self, block_manager: BlockManager) -> None:
        """Lets every unfinished request wait, with the tokens that it has, since the workers and
        their caches are lost. Steps that were not answered have not happened.

        Args:
            block_manager: an empty one of the new cache.
        """
        self.unanswered.clear()
        self._queues.restart(block_manager)

    def restrict(self, allowed: frozenset[str] | None) -> None:
        """Lets only requests of these ids run, while no step is unanswered; all others wait, also
        those that arrive later.

        A running or swapped request that may not run gives its blocks up, and is recomputed later.

        Args:
            allowed: None: all requests.
        """
        assert not self.unanswered, "a request would give up blocks that a step still uses"
        self._queues.restrict(allowed)

    @property
    def drafter(self) -> Drafter | None:
        """What guesses tokens, and has counted how often it was right; None: no drafts."""
        return self._queues.drafter

    @property
    def wants_drafts(self) -> bool:
        """See `Drafter.wants_drafts`."""
        return self.drafter is not None and self.drafter.wants_drafts

    @property
    def lacks_grammars(self) -> bool:
        """Whether requests wait for grammars that the workers have not compiled."""
        return any(map(self._queues.lacks_grammar, self._queues.barred.values()))

    @property
    def may_step(self) -> bool:
        """Whether any request may run."""
        return len(self._queues.barred) < len(self._queues.requests)

    def use_grammars(self, grammars: frozenset[str]) -> None:
        """Says which grammars the workers have compiled; requests with others wait. A restart
        forgets them."""
        self._queues.use_grammars(grammars)

    def check_invariants(self) -> None:
        """Looks for requests, slots and blocks that are lost or doubled; slow, for tests.

        Raises:
            EngineError: an invariant does not hold; the message names it.
        """
        rows = {id(s): s for o in self.unanswered for s in (*o.rows, *o.sampled)}.values()
        self._queues.check_invariants([s for s in rows if s.status.finished])
        # A sequence with drafts is sampled several times in one step; it gets one token or more.
        sampled = Counter(id(s) for o in self.unanswered for s in dict.fromkeys(o.sampled))
        for sequence in self.running_sequences():
            is_right = sequence.num_in_flight == sampled[id(sequence)]
            expect(is_right, f"unanswered steps sample what sequence {sequence.seq_id} lacks")

    def _continue(
        self,
        requests: Iterable[Request],
        step: StepBuilder,
        stages: StageGroups | None = None,
    ) -> None:
        """Schedules running requests in order, and preempts from the end if blocks are missing.

        Args:
            stages: says whose turn it is; None: all have theirs.
        """
        blocks, running = self.block_manager, SequenceStatus.RUNNING
        for request in tuple(requests):
            if not step.tokens_left or (step.lacks_blocks and self.unanswered):
                return
            if stages is not None and not stages.has_turn(request, step):
                continue
            if len(request.sequences) > 1:
                self._continue_group(request, step)
                continue
            (sequence,) = request.sequences
            lacking = blocks.num_lacking_blocks(request)
            if lacking and not self._make_room(request, lacking, step):
                return
            if sequence.status is running:
                size = len(sequence.token_ids) - sequence.num_computed_tokens
                if size < 1 and not (size := sequence.num_behind):  # a call for each row costs much
                    continue
                if size > 1 or sequence.num_computed_tokens < request.end_of_inputs:
                    size = self._chunk_size(request, size, step)
                if size:
                    self._add_row(sequence, size, step, lacking > 0)

    def _continue_group(self, request: Request, step: StepBuilder) -> None:
        """Schedules the part of a running request with several sequences that fits."""
        if self._needs_answer(request):
            return
        rows = steps.choose_rows(request, step.tokens_left)
        if not rows:  # they do not fit, or the request was preempted earlier in this step
            return
        lacking = self.block_manager.num_lacking_blocks(request)
        # For all its sequences: preemption takes the blocks of all, so none is a row before.
        if lacking and not self._make_room(request, lacking, step):
            return
        if not self._queues.is_running(request):
            return
        if request.request_id in self._queues.unforked:
            self._compute_common(request, step, lacking > 0)
            return
        if any(size > 1 for _, size in rows):
            num_left = sum(sequence.num_behind for sequence, _ in rows)
            rows = steps.choose_rows(request, self._chunk_size(request, num_left, step))
        for sequence, size in rows:
            self._add_row(sequence, size, step, lacking > 0)

    def _needs_answer(self, request: Request) -> bool:
        """Whether an unanswered step decides how the sequences of a group go on."""
        if not self.unanswered:
            return False
        if (num_common := self._queues.unforked.get(request.request_id)) is not None:
            return request.unfinished_sequences[0].num_computed_tokens >= num_common
        if request.num_candidates:
            return any(sequence.num_unanswered for sequence in request.sequences)
        # A sequence copies the block that it shares before it writes to it.
        return any(child in request.sequences for o in self.unanswered for _, child in o.forks)

    def _compute_common(self, request: Request, step: StepBuilder, grow: bool) -> None:
        """Schedules the first sequence, which computes the common tokens for all. If that completes
        its own tokens, the other sequences are sampled from its row."""
        first, *others = request.unfinished_sequences
        num_common = self._queues.unforked[request.request_id]
        size = self._chunk_size(request, num_common - first.num_computed_tokens, step)
        if not size:
            return
        num_changes = len(step.step_input.new_block_ids)
        self._add_row(first, size, step, grow)
        growths = step.step_input.new_block_ids[num_changes:]
        if first.num_computed_tokens + size == first.num_tokens:
            del self._queues.unforked[request.request_id]
            for child in others:
                child.move_to(SequenceStatus.RUNNING)
                self._queues.slots.fork(first, child)
                self._queues.fork(first, child, first.num_tokens)
                step.forks.append((first, child))
                for _, block_ids in growths:  # workers fork before they add blocks
                    step.add_blocks(child, block_ids)

    def _add_row(self, sequence: Sequence, size: int, step: StepBuilder, grow: bool) -> None:
        """Makes a running sequence a row, with a place in its blocks for each of its tokens."""
        shares, num_computed = self._queues.shares, sequence.num_computed_tokens
        if shares is not None and num_computed < sequence.num_prompt_tokens:
            request = self._queues.request_of[sequence.seq_id]
            shares.charge_prompt(request, sequence, size)
        is_known = self._queues.slots.is_known(sequence)
        if grow:
            growth = self.block_manager.append(sequence)
            if growth.block_ids and is_known:
                step.add_blocks(sequence, growth.block_ids)
            if growth.copy is not None:
                step.step_input.block_moves.copies.append(growth.copy)
                if is_known:
                    place = (steps.slot_of(sequence), growth.copy_place, growth.copy[1])
                    step.step_input.replaced_block_ids.append(place)
        if not is_known:
            self._queues.slots.enter(sequence)
            request = self._queues.request_of[sequence.seq_id]
            adapter_slot = self._queues.adapters.slot_of(request)
            blocks = self.block_manager
            cross = blocks.cross.input_of(request, sequence)
            step.enter(request, sequence, blocks.block_ids(sequence), adapter_slot, cross)
        step.add(sequence, size)

    def _chunk_size(self, request: Request, num_left: int, step: StepBuilder) -> int:
        """Tokens of a request that has `num_left` to compute; 0: it has its turn in a later step.
        If they do not fit beside a token of each other sequence, the step is divided."""
        if self._config.whole_prompts:
            return num_left if num_left <= step.tokens_left else 0
        if num_unread := request.num_unread_tokens:
            return max(0, min(num_left, step.tokens_left - num_unread))
        pictures = self._queues.pictures
        num_left = pictures.reach(request, num_left, step.step_input, self._queues.running)
        is_divided = request in step.parts or not self._config.enable_chunked_prefill
        if not is_divided and num_left + self._num_without_row(step) - 1 > step.tokens_left:
            self._prompt_shares.divide(request, num_left, step)
        size = min(num_left, step.tokens_left, step.parts.get(request, num_left))
        return pictures.undivided(request, size, step.tokens_left)

    def _num_without_row(self, step: StepBuilder) -> int:
        return len(self._queues.request_of) - len(step.singles) - len(step.chunks)

    def _make_room(self, request: Request, num_blocks: int, step: StepBuilder) -> bool:
        """Preempts requests until `num_blocks` are free for `request`, or until it is preempted
        itself. The running request that is last in the policy's order is preempted first.

        Returns:
            False: steps are unanswered, so that no request may be preempted now.
        """
        blocks, queues = self.block_manager, self._queues
        if blocks.num_free_blocks < num_blocks:
            step.lacks_blocks = True
            if self.unanswered:
                return False
            # Requests that cannot go on even alone are ended before any is preempted for them. If
            # all others were swapped out for such a request and it was preempted last, the step
            # would have no rows. Such a step is not sent, so the swapped blocks would be lost.
            for other in tuple(queues.running):
                is_forked = any(child in other.sequences for _, child in step.forks)
                reason = None if is_forked else why_no_more(other, blocks)
                if reason is not None:
                    self._ignore(other, reason, step)
        while blocks.num_free_blocks < num_blocks and queues.is_running(request):
            self._preempt(next(r for r in reversed(queues.running) if r not in step.owed), step)
        return True

    def _preempt(self, victim: Request, step: StepBuilder) -> None:
        victim.metrics.num_preemptions += 1
        step.preempted.append(victim)
        if self._should_swap(victim):
            step.step_input.block_moves.swap_outs += self._queues.swap_out(victim)
        else:
            self._queues.recompute(victim)

    def _should_swap(self, victim: Request) -> bool:
        """Decides whether a request is preempted by swap; otherwise it is recomputed."""
        mode = self._config.preemption_mode
        is_group = len(victim.unfinished_sequences) > 1
        wanted = mode == "swap" or (mode == "auto" and is_group)
        # Before the fork only the first sequence has blocks: few to keep, and none are shared.
        is_forked = victim.request_id not in self._queues.unforked
        if not (wanted and is_forked and self.block_manager.can_swap_out(victim)):
            return False
        shares, swapped = self._queues.shares, self._queues.swapped
        return shares is None or shares.may_swap(victim, swapped, self.block_manager)

    def _admit_swapped(self, step: StepBuilder) -> None:
        """Brings swapped requests back while there are tokens, slots and blocks for the first.

        Not in a step that lacks blocks: running requests need them, and a step does not swap in
        what it swaps out.
        """
        queues = self._queues
        while queues.swapped and step.tokens_left and not step.lacks_blocks:
            request = queues.swapped[0]
            status = self.block_manager.can_swap_in(request)
            if status is AllocStatus.NEVER:
                num_needed = self.block_manager.num_needed_blocks(request)
                self._ignore(request, outgrown(request, num_needed, self.block_manager), step)
                continue
            if status is AllocStatus.LATER or not queues.has_slots(request):
                return
            step.step_input.block_moves.swap_ins += queues.swap_in(request)
            self._continue([request], step)

    def _admit(self, step: StepBuilder) -> None:
        """Starts waiting requests while there are tokens, slots and blocks for the first of them,
        or for one that passes it, and no request is swapped out.

        Not in a step that lacks blocks: running requests need them.
        """
        chunked, queues = self._config.enable_chunked_prefill, self._queues
        if self._prompt_delay.holds_back(queues.waiting, queues.running, time.time()):
            return
        while queues.waiting and not queues.swapped and step.tokens_left and not step.lacks_blocks:
            # Requests that end with their first token free their slots at once, so admission could
            # go on for ever. It stops after `max_num_seqs` admissions without a decode.
            is_decode_due = self._num_admitted_since_decode >= self._config.max_num_seqs
            if not chunked and is_decode_due and queues.running:
                return
            first = queues.waiting.head()
            is_next = queues.has_room(first) or why_never(first, self._config, queues.blocks)
            request = first if is_next else queues.choose_passing(step.step_input.step)
            if request is None:
                return
            if (reason := why_never(request, self._config, queues.blocks)) is not None:
                self._ignore(request, reason, step)
                continue
            # Cached tokens count too: whether they are in the cache depends on other requests.
            num_unread = request.num_unread_tokens
            num_tokens = num_unread + (1 if chunked else request.num_common_tokens)
            is_whole = not chunked or num_unread > 0
            if is_whole and num_tokens > step.tokens_left and step.has_rows:
                return
            self._start(request, step)

    def _admit_owed(self, shares: FairShares, step: StepBuilder) -> list[Request]:
        """Starts waiting requests of owners that were given less than those of all prompts that run
        and of all swapped requests, and takes room for them from owners that hold too much.

        Returns:
            The other running requests, in the order in which they continue.
        """
        queues, blocks = self._queues, self.block_manager
        queues.begin_step(shares)
        others = queues.running.copy()
        if self._prompt_delay.holds_back(queues.waiting, queues.running, time.time()):
            return others
        rivals = [*steps.find_catching_up(others), *queues.swapped[:1]] if queues.waiting else []
        while queues.waiting and step.tokens_left > self._num_without_row(step):
            first = queues.waiting.head()
            if why_never(first, self._config, blocks) or not shares.is_owed(first, rivals):
                break
            if first.num_unread_tokens >= step.tokens_left - self._num_without_row(step):
                break
            if not queues.has_room(first) and queues.adapters.has_room(first, queues.running):
                running, num_free = list(filter(queues.is_running, others)), queues.slots.num_free
                victims = shares.choose_victims(first, running, num_free, blocks)
                step.lacks_blocks = step.lacks_blocks or bool(victims)
                if victims and self.unanswered:
                    break
                for victim in victims:
                    self._preempt(victim, step)
            if not queues.has_room(first):
                break
            self._start(first, step)
            step.owed.append(first)
        # One that made room may have started again.
        return [request for request in others if request not in step.owed]

    def _start(self, request: Request, step: StepBuilder) -> None:
        """Lets a waiting request run, and schedules the part of its tokens that fits."""
        self._queues.start(request)
        first, *others = request.unfinished_sequences
        self._num_admitted_since_decode += 1 + len(others)
        metrics = request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now = time.time()
            metrics.time_in_queue = now - metrics.arrival_time
            metrics.num_cached_tokens = first.num_computed_tokens
        if others:
            self._compute_common(request, step, grow=False)
        else:
            size = self._chunk_size(request, first.num_behind, step)
            if size:  # else it waits for a picture
                self._add_row(first, size, step, grow=False)

    def why_too_long(self, num_prompt_tokens: int) -> str | None:
        """See `hopeless_requests.why_too_long`. Any thread may ask."""
        return why_too_long(num_prompt_tokens, self._config, self.block_manager)

    def _ignore(self, request: Request, reason: str, step: StepBuilder) -> None:
        request.error = RequestIgnoredError(reason)
        self._queues.end(request, SequenceStatus.FINISHED_IGNORED)
        step.ignored.append(request)

    def _end(self, request_id: str, status: SequenceStatus) -> Request | None:
        request = self._queues.requests.get(request_id)
        if request is not None:
            self._queues.end(request, status)
        return request
