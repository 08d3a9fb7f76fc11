"""A request, and the sequences that it consists of."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tpengine.errors import IllegalMoveError, RequestError
from tpengine.inputs import NO_OWNER, Adapter, Owner, PoolingParams
from tpengine.messages import PictureLoad, PictureSpan, SamplingRules
from tpengine.outputs import RequestMetrics
from tpengine.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Status of a sequence. Every change goes through `Sequence.move_to`."""

    WAITING = "waiting", None
    RUNNING = "running", None
    SWAPPED = "swapped", None
    FINISHED_STOPPED = "finished: stop", "stop"
    FINISHED_LENGTH = "finished: length", "length"
    FINISHED_ABORTED = "finished: abort", "abort"
    FINISHED_IGNORED = "finished: ignored", "length"  # as in vLLM; the request's error says more
    FINISHED_FAILED = "finished: error", "error"

    def __init__(self, _words: str, finish_reason: str | None) -> None:
        self.finish_reason = finish_reason
        """What a user is told: stop, length, abort or error; None while unfinished."""
        self.finished = finish_reason is not None
        """Whether the sequence has its final status."""


_ENDS_OF_ALL = (
    SequenceStatus.FINISHED_FAILED,
    SequenceStatus.FINISHED_IGNORED,
    SequenceStatus.FINISHED_ABORTED,
)
"""Ends that all unfinished sequences of a request have together, at any time."""

LEGAL_MOVES = dict.fromkeys(SequenceStatus, frozenset[SequenceStatus]()) | {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, *_ENDS_OF_ALL}),
    SequenceStatus.RUNNING: frozenset(
        {
            SequenceStatus.WAITING,  # preempted: recompute
            SequenceStatus.SWAPPED,  # preempted: swap
            SequenceStatus.FINISHED_STOPPED,
            SequenceStatus.FINISHED_LENGTH,
            *_ENDS_OF_ALL,
        }
    ),
    SequenceStatus.SWAPPED: frozenset(
        # To WAITING when its host blocks are lost: recompute.
        {SequenceStatus.RUNNING, SequenceStatus.WAITING, *_ENDS_OF_ALL}
    ),
}
"""By status; from a final one there is none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens generated after it.

    Only the code in `scheduling/` changes a sequence.

    The scheduler knows no prefill and no decode: it lets `num_computed_tokens` (tokens whose K and
    V lie in the cache once all steps that were sent are computed) catch up with `num_tokens`.
    `token_ids` holds prompt and output in one list, as far as answers have confirmed them; `slot`
    is the sequence's place in the worker's persistent batch while it is running.

    Example, two steps in flight: 5 tokens are confirmed and 4 of them computed. Step 8 computes the
    fifth and samples the sixth; step 9 computes the sixth, which only the ranks know yet, and
    samples the seventh.

                             sent: -   8   9     answered: 8   9
        len(token_ids)             5   5   5               6   7
        num_computed_tokens        4   5   6               6   6
        num_in_flight              0   1   2               1   0
    """

    seq_id: int
    index: int
    """Index among the sequences of its request; its noise depends on it."""
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int = sys.maxsize
    """Prompt and output tokens at which it ends for its length."""
    num_computed_tokens: int = 0
    num_unanswered: int = 0
    """Its rows in steps that are not answered yet, one more for each that forks it."""
    slot: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_in_flight(self) -> int:
        """Number of tokens that unanswered steps sample: once all others are computed, each step
        samples one."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def num_behind(self) -> int:
        """Number of tokens that the next steps can compute. If all known ones are computed: 1, the
        token that is being sampled, or 0 if that is the last."""
        left = len(self.token_ids) - self.num_computed_tokens
        return left if left > 0 else int(self.num_computed_tokens + 1 < self.max_num_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated ids."""
        return self.token_ids[self.num_prompt_tokens :]

    def move_to(self, status: SequenceStatus) -> None:
        """Changes the status.

        Raises:
            IllegalMoveError: `LEGAL_MOVES` forbids it.
        """
        if status not in LEGAL_MOVES[self.status]:
            raise IllegalMoveError(
                f"sequence {self.seq_id} cannot go from {self.status.name} to {status.name}"
            )
        self.status = status


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures of a prompt.

    Attributes:
        spans: the tokens that stand for them, in the order of their positions.
        loads: by digest.
    """

    spans: Seq[PictureSpan]
    loads: Mapping[bytes, PictureLoad]


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """What the encoder of a model with two halves reads for a request.

    Attributes:
        prompt: its text; None: only ids were given.
        token_ids: of a sound zeros, one for each of its tokens.
        features: see `CrossInput`.
        num_forced: last tokens of the decoder's prompt that a search counts as output, since the
            model's files force them there (`forced_bos_token_id`).
    """

    prompt: str | None
    token_ids: list[int]
    features: bytes = b""
    num_forced: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of its tokens; of each, the decoder's layers attend to K and V."""
        return len(self.token_ids)


@dataclass(eq=False)
class CheckedRequest:
    """A request that this model can serve: one prompt as ids, with its sampling parameters."""

    prompt: str | None
    """The text, also that of messages; None where only ids were given."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """The engine's own copy, checked."""
    rules: SamplingRules
    """What ranks get of them."""
    priority: int = 0
    end_token_ids: frozenset[int] = frozenset()
    """Ids that end it: the model's, unless `ignore_eos`, and its `stop_token_ids`."""
    num_candidates: int = 0
    """Beam search: number of continuations of each beam that are compared after every token."""
    adapter: Adapter | None = None
    """As its folder held it when the request was checked."""
    owner: Owner = NO_OWNER
    """The client that sent it."""
    pictures: PromptPictures | None = None
    """None: its prompt is text alone."""
    pooling_params: PoolingParams | None = None
    """None: it generates."""
    start_of_second: int | None = None
    """See `NewSequence`."""
    encoder: EncoderPrompt | None = None
    """None: the model has one half. Else the prompt above is the decoder's."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; with two halves of both prompts."""
        return len(self.prompt_token_ids) + (self.encoder.num_tokens if self.encoder else 0)


@dataclass(eq=False, kw_only=True)
class Request(CheckedRequest):
    """A request of an engine, with its sequences."""

    request_id: str
    seed: int
    """Seed of its noise, fixed when it is added: the user's, or made of engine seed and arrival."""
    arrival_index: int
    sequences: list[Sequence]
    metrics: RequestMetrics
    error: RequestError | None = None
    """Why it was ignored or failed."""

    @functools.cached_property
    def end_of_inputs(self) -> int:
        """The position from which on a token needs nothing but its id: behind the last one that
        stands for a picture, and behind the first one if there is an encoder prompt."""
        if self.pictures is None:
            return int(self.encoder is not None)
        return self.pictures.spans[-1].end

    @property
    def awaited_keys(self) -> list[bytes]:
        """Of what ranks load for its next tokens: the key of its adapter, digests of pictures."""
        keys = [] if self.adapter is None else [self.adapter.key]
        if self.pictures is None or not self.unfinished_sequences:
            return keys
        place = self.unfinished_sequences[0].num_computed_tokens
        return keys + [span.digest for span in self.pictures.spans if place < span.end]

    @property
    def num_unread_tokens(self) -> int:
        """Tokens of its encoder prompt that the step must hold which computes its first token."""
        if self.encoder is None or any(s.num_computed_tokens for s in self.unfinished_sequences):
            return 0
        return self.encoder.num_tokens

    @property
    def finished(self) -> bool:
        """Whether all of its sequences are finished."""
        return all(sequence.status.finished for sequence in self.sequences)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended as a whole: error, length (it was ignored) or abort; None: each sequence
        ended by itself."""
        statuses = {sequence.status for sequence in self.sequences}
        return next((status.finish_reason for status in _ENDS_OF_ALL if status in statuses), None)

    @property
    def unfinished_sequences(self) -> list[Sequence]:
        """The sequences that wait, run or are swapped out."""
        return [sequence for sequence in self.sequences if not sequence.status.finished]

    @property
    def running_sequences(self) -> list[Sequence]:
        """The sequences that hold device blocks."""
        return [s for s in self.sequences if s.status is SequenceStatus.RUNNING]

    @property
    def num_common_tokens(self) -> int:
        """Number of tokens from the start that are computed only once for all of its unfinished
        sequences.

        If these are equal, all tokens are common. Otherwise at least the last token of each
        sequence is its own, since the next token is sampled there.
        """
        first, *others = self.unfinished_sequences
        if not others or not (first.num_output_tokens or any(s.num_output_tokens for s in others)):
            return first.num_tokens
        token_ids = [sequence.token_ids for sequence in (first, *others)]
        # What the lowest and the highest list begin with is common to all lists between them.
        low, high = min(token_ids), max(token_ids)
        if low == high:
            return len(low)
        pairs = zip(low, high)  # noqa: B905 (one may be longer)
        shortest = min(map(len, token_ids))
        parting = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
        return min(parting, shortest - 1)
