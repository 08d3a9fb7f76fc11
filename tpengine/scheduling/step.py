"""The data of one step: what the scheduler decides, and what the output processor decides about
the answer.

A step's data flows one way: `SchedulerOutput` goes from the scheduler to the executor, the answer
to the output processor, its `StepDecisions` to `Scheduler.update`. No part changes what an earlier
one decided; the output processor adds times to the `metrics` of a request. `StepBuilder` builds the
message for the ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tpengine.errors import EngineError, RequestError
from tpengine.messages import CrossInput, NewSequence, StepInput
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus

SequencePair = tuple[Sequence, Sequence]
"""(parent, child)"""
SizedRow = tuple[Sequence, int]
"""(sequence, tokens that it computes in the step)"""


class Guess(NamedTuple):
    """A token that may come next, if all guesses before it are right.

    Attributes:
        token_id: 0 if a model guesses it, on the ranks.
        source: where it comes from: prompt and output of its sequence ("text"), earlier outputs of
            the client ("earlier"), "grammar", or "model".
        kind: whose rate it counts for: see `Drafter`.
        share: of the places of the match, those at which it follows.
    """

    token_id: int
    source: str
    kind: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepDecisions:
    """What the output processor decided about an answered step; `Scheduler.update` applies it.

    Attributes:
        tokens: sequences, each with the token that is appended to it.
        finished: sequences that end with this step, each with its final status.
        forks: beams: the child continues as a copy of the parent, without the tokens of this step;
            no child is a parent.
        overridden: sequences whose token of this step is not the one that rank 0 sampled.
        failed: by id, requests that cannot go on, with the error for the user.
        failed_loads: keys of adapters, and digests of pictures, that could not be loaded.
        computed_pictures: digests of pictures whose features the first rank has computed.
        to_report: by id, requests whose user may be told something new after the update.
        forced: sequences, each with tokens that its grammar forces after its last one.
        behind: see `StepOutput`.
        first_token_s: seconds from a request's arrival to its first token, of those that got it.
        inter_token_s: seconds from a request's last token to the first one of this step, of the
            other requests.
    """

    tokens: list[tuple[Sequence, int]] = field(default_factory=list)
    finished: list[tuple[Sequence, SequenceStatus]] = field(default_factory=list)
    forks: list[SequencePair] = field(default_factory=list)
    overridden: list[Sequence] = field(default_factory=list)
    failed: dict[str, RequestError] = field(default_factory=dict)
    failed_loads: list[bytes] = field(default_factory=list)
    computed_pictures: list[bytes] = field(default_factory=list)
    to_report: dict[str, Request] = field(default_factory=dict)
    forced: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)

    def ends(self, sequence: Sequence) -> bool:
        """Whether the latest token of a sequence ended it."""
        return bool(self.finished) and self.finished[-1][0] is sequence


@dataclass(slots=True)
class SchedulerOutput:
    """One step, as the driver sees it. The scheduler has decided it with a `StepBuilder`; no other
    part changes it.

    Attributes:
        step_input: the message to the workers; not sent when `is_empty`.
        rows: the scheduled sequences, parallel to `step_input.slots`.
        num_computed_tokens: of each row, after the step.
        sampled: sequences that get a token in this step, parallel to `step_input.sample_slots`.
        ignored: requests that can never run, or never continue; `Request.error` says why.
        preempted: requests that lost their device blocks; they wait again or are swapped out.
        lacks_blocks: running requests need more blocks than are free, so that the step preempts, or
            is the last one until all steps are answered; it admits no request.
        num_prefill_tokens: scheduled tokens, without those of rows that compute one token after
            the whole prompt.
        forks: children that are sampled from their parent's row in this step.
        awaiting: running requests that wait for features that are computed before its rows.
        drafts: by sequence. A draft has a row of its own, see `StepInput`, so `rows` and `sampled`
            have the sequence once more for each; its `num_computed_tokens` are those without it.
    """

    step_input: StepInput
    rows: list[Sequence] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    lacks_blocks: bool = False
    num_prefill_tokens: int = 0
    forks: list[SequencePair] = field(default_factory=list)
    drafts: dict[Sequence, list[Guess]] = field(default_factory=dict)
    awaiting: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the ranks have nothing to do."""
        message = self.step_input
        return not (self.rows or message.num_awaited_rows or message.block_moves)


@dataclass(slots=True)
class StepBuilder(SchedulerOutput):
    """A step while the scheduler chooses its rows; `build` adds them to the message.

    Attributes:
        tokens_left: tokens that it may still compute.
        parts: most tokens of each prompt, if the step cannot hold all of them.
        owed: requests that start before the running ones continue; the step has their rows.
    """

    tokens_left: int = 0
    singles: list[SizedRow] = field(default_factory=list)
    chunks: list[SizedRow] = field(default_factory=list)
    parts: Counter[Request] = field(default_factory=Counter)
    owed: list[Request] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        """Whether a row has been added."""
        return bool(self.singles or self.chunks)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes a running sequence a row; `num_tokens` is at most `tokens_left`."""
        self.tokens_left -= num_tokens
        rows = self.singles if num_tokens == 1 else self.chunks
        rows.append((sequence, num_tokens))

    def sized_rows(self) -> list[SizedRow]:
        """The rows in the order of the message."""
        return self.singles + self.chunks

    def add_blocks(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Tells the workers about blocks at the end of the table of a sequence that they hold."""
        self.step_input.new_block_ids.append((slot_of(sequence), block_ids))

    def add_drafts(self, sequence: Sequence, drafts: list[Guess]) -> None:
        """Gives drafts to a sequence that has a row of one token, after which it is sampled."""
        self.tokens_left -= len(drafts)
        self.drafts[sequence] = drafts
        token_ids = [draft.token_id for draft in drafts]
        self.step_input.drafts.append((slot_of(sequence), token_ids))

    def enter(
        self,
        request: Request,
        sequence: Sequence,
        block_ids: list[int],
        adapter_slot: int | None,
        cross: CrossInput | None = None,
    ) -> None:
        """Sends a sequence in full to the workers."""
        if cross is not None:
            self.tokens_left -= len(cross.token_ids)
        self.step_input.new_sequences.append(
            NewSequence(
                slot=slot_of(sequence),
                token_ids=sequence.token_ids.copy(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=block_ids,
                rules=request.rules,
                seed=request.seed,
                index=sequence.index,
                end_token_ids=sorted(request.end_token_ids) if request.rules.min_tokens else [],
                num_candidates=request.num_candidates,
                adapter_slot=adapter_slot,
                pictures=[] if request.pictures is None else list(request.pictures.spans),
                start_of_second=request.start_of_second,
                cross=cross,
            )
        )

    def build(self) -> SchedulerOutput:
        """Orders the rows, and finds those whose last token is computed: they are sampled, once
        for their own sequence and once for each sequence that is forked from it. From now on the
        rows' tokens count as computed."""
        message, rows, sampled = self.step_input, self.rows, self.sampled
        ends = self.num_computed_tokens
        self.num_prefill_tokens = sum(size for _, size in self.chunks)
        for sequence, size in self.sized_rows():
            slot, num_computed, row = slot_of(sequence), sequence.num_computed_tokens, len(rows)
            end = num_computed + size
            rows.append(sequence)
            message.slots.append(slot)
            message.num_scheduled_tokens.append(size)
            if end >= len(sequence.token_ids):
                sampled.append(sequence)
                message.sample_rows.append(row)
                message.sample_slots.append(slot)
                for parent, child in self.forks:
                    if parent is sequence:
                        sampled.append(child)
                        message.sample_rows.append(row)
                        message.sample_slots.append(slot_of(child))
            if size == 1 and num_computed < sequence.num_prompt_tokens:
                self.num_prefill_tokens += 1
            sequence.num_computed_tokens = end
            sequence.num_unanswered += 1
            ends.append(end)
            for _ in self.drafts.get(sequence, ()):
                message.sample_rows.append(len(rows))
                message.sample_slots.append(slot)
                sampled.append(sequence)
                rows.append(sequence)
                message.slots.append(slot)
                message.num_scheduled_tokens.append(1)
                sequence.num_unanswered += 1
                ends.append(end)
        for _, child in self.forks:
            child.num_unanswered += 1
        return self


def slot_of(sequence: Sequence) -> int:
    """The slot of a running sequence.

    Raises:
        EngineError: the sequence has no slot.
    """
    if sequence.slot is None:
        raise EngineError(f"sequence {sequence.seq_id} has no slot, so it does not run")
    return sequence.slot


def choose_rows(request: Request, tokens_left: int) -> list[SizedRow]:
    """The running sequences of a request that fit into a step with `tokens_left` free tokens.

    Beams are compared with each other after every token, so either all of them compute their last
    token in a step or none of them does.
    """
    running = request.running_sequences
    behind = [(sequence, num) for sequence in running if (num := sequence.num_behind)]
    if request.sampling_params.use_beam_search:
        if any(num_left > 1 for _, num_left in behind):
            behind = [(sequence, num_left - 1) for sequence, num_left in behind if num_left > 1]
        elif len(behind) > tokens_left:
            return []
    rows = []
    for sequence, num_left in behind:
        if not tokens_left:
            break
        rows.append((sequence, min(num_left, tokens_left)))
        tokens_left -= rows[-1][1]
    return rows


def find_catching_up(running: list[Request]) -> list[Request]:
    """Running requests with more than one token to compute.

    Without chunked prefill, these are requests that were preempted when they were longer than a
    step. Their prompt was accepted, so they are computed in parts instead of being refused.
    """
    return [
        request
        for request in running
        if any(sequence.num_behind > 1 for sequence in request.running_sequences)
    ]
