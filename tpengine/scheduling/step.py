"""One step: what the scheduler decides, and what the workers are told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpengine.errors import EngineError
from tpengine.messages import BlockMoves, Fork, NewSequence, StepInput
from tpengine.sequence import Request, Sequence

SequencePair = tuple[Sequence, Sequence]
"""(parent, child)"""


@dataclass(slots=True)
class Decisions:
    """What the driver decided after a step about requests whose sequences are compared.

    Attributes:
        forks: a child goes on as a copy of its parent; no child is a parent.
        overridden: sequences whose last token is not the one that the workers sampled.
    """

    forks: list[SequencePair] = field(default_factory=list)
    overridden: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step, as the driver sees it.

    Attributes:
        step_input: the message to the workers; not to be sent when `is_empty`.
        rows: the scheduled sequences, parallel to `step_input.slots`.
        sampled: those that get a token in this step, parallel to `step_input.sample_slots`.
        ignored: requests that can never run (on); `Request.error` says why.
        preempted: requests that gave their device blocks up; they wait again or are swapped out.
        num_prefill_tokens: scheduled tokens, less those of rows that compute one token after the
            whole prompt.
        forks: children that are sampled from their parent's row in this step.
        decisions: filled when the step's tokens are processed, for `Scheduler.update`.
    """

    step_input: StepInput
    rows: list[Sequence]
    sampled: list[Sequence]
    ignored: list[Request]
    preempted: list[Request]
    num_prefill_tokens: int
    forks: list[SequencePair] = field(default_factory=list)
    decisions: Decisions = field(default_factory=Decisions)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.rows


@dataclass(slots=True)
class StepBuilder:
    """A step while its rows are being chosen."""

    tokens_left: int
    singles: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_block_ids: list[tuple[int, list[int]]] = field(default_factory=list)
    replaced_block_ids: list[tuple[int, int, int]] = field(default_factory=list)
    block_moves: BlockMoves = field(default_factory=BlockMoves)
    forks: list[SequencePair] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no row has been added."""
        return not self.singles and not self.chunks

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes a running sequence a row; `num_tokens` is at most `tokens_left`."""
        self.tokens_left -= num_tokens
        if num_tokens == 1:
            self.singles.append(sequence)
        else:
            self.chunks.append(sequence)
            self.chunk_sizes.append(num_tokens)

    def sized_rows(self) -> list[tuple[Sequence, int]]:
        """The rows and their tokens, in the order of the message."""
        sizes = [1] * len(self.singles) + self.chunk_sizes
        return list(zip(self.singles + self.chunks, sizes, strict=True))

    def add_blocks(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Tells the workers of blocks at the end of the table of a sequence that they know."""
        self.new_block_ids.append((slot_of(sequence), block_ids))

    def enter(self, request: Request, sequence: Sequence, block_ids: list[int]) -> None:
        """Tells the workers all of a sequence."""
        params = request.sampling_params
        self.new_sequences.append(
            NewSequence(
                slot=slot_of(sequence),
                token_ids=sequence.token_ids.copy(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=block_ids,
                sampling_params=params,
                seed=request.seed,
                index=sequence.index,
                end_token_ids=sorted(request.end_token_ids) if params.min_tokens > 0 else [],
                num_candidates=request.num_candidates,
            )
        )

    def build(
        self,
        step: int,
        freed_slots: list[int],
        forks: list[Fork],
        token_overrides: list[tuple[int, int]],
        going_on: Iterable[Sequence] = (),
    ) -> SchedulerOutput:
        """Orders the rows, and finds those whose last token is computed: they are sampled, once for
        their own sequence and once for each that was forked from it."""
        rows = self.singles + self.chunks
        sizes = [1] * len(self.singles) + self.chunk_sizes
        num_prefill_tokens = sum(self.chunk_sizes)
        slots: list[int] = []
        sampled: list[Sequence] = []
        sample_rows: list[int] = []
        for row, sequence in enumerate(rows):
            slots.append(slot_of(sequence))
            num_computed, size = sequence.num_computed_tokens, sizes[row]
            if num_computed + size == len(sequence.token_ids):
                sampled.append(sequence)
                sample_rows.append(row)
                for parent, child in self.forks:
                    if parent is sequence:
                        sampled.append(child)
                        sample_rows.append(row)
            if size == 1 and num_computed < sequence.num_prompt_tokens:
                num_prefill_tokens += 1
        step_input = StepInput(
            step=step,
            slots=slots,
            num_scheduled_tokens=sizes,
            new_sequences=self.new_sequences,
            new_block_ids=self.new_block_ids,
            freed_slots=freed_slots,
            token_overrides=token_overrides,
            sample_rows=sample_rows,
            sample_slots=[slot_of(sequence) for sequence in sampled],
            forks=forks,
            replaced_block_ids=self.replaced_block_ids,
            block_moves=self.block_moves,
            next_slots=[slot_of(sequence) for sequence in going_on],
        )
        return SchedulerOutput(
            step_input,
            rows,
            sampled,
            self.ignored,
            self.preempted,
            num_prefill_tokens,
            self.forks,
        )


def slot_of(sequence: Sequence) -> int:
    """The slot of a running sequence.

    Raises:
        EngineError: it does not run.
    """
    if sequence.slot is None:
        raise EngineError(f"sequence {sequence.seq_id} holds no slot")
    return sequence.slot
