"""Results of a request, as a user gets them. Names, order and defaults of the fields are those of
vLLM 0.5.4; tpengine's own fields follow, by keyword only."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import mul
from typing import Any, ClassVar, Self, TypeAlias


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1: the first).

    `EngineArgs.logprobs_mode` says by which logits.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs: TypeAlias = list[dict[int, Logprob] | None]
"""Candidates by id for each position of a prompt; None at position 0."""
SampleLogprobs: TypeAlias = list[dict[int, Logprob]]
"""Candidates by id for each output token."""


@dataclass
class RequestMetrics:
    """Times of a request's events, in seconds of `time.time`; None: not reached.

    Attributes:
        last_token_time: `arrival_time` before the first token.
        time_in_queue: seconds from arrival until it was first scheduled.
        num_cached_tokens: prompt tokens whose K and V were in the cache at that time.
        num_sampled_tokens: sampled tokens of all sequences so far, those of dropped beams included.
    """

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    time_in_queue: float | None
    finished_time: float | None = None
    _: KW_ONLY
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_sampled_tokens: int = 0

    @classmethod
    def of_arrival(cls, arrival_time: float) -> RequestMetrics:
        """Of a request that has only arrived."""
        return cls(arrival_time, arrival_time, None, None, None)


@dataclass
class CompletionOutput:
    """One output sequence of a request.

    Attributes:
        index: its index among the request's sequences; its rank with `best_of` or beams.
        text: the generated text, or the new part of it (see `RequestOutputKind.DELTA`).
        token_ids: the generated ids, the end token included; `text` does not include it.
        cumulative_logprob: sum of the chosen tokens' log probabilities; None: not known.
        logprobs: for each token, candidates by id; None unless the request asks for them.
        finish_reason: stop, length, abort or error; None while unfinished.
        stop_reason: the stop string or token that ended it; None: the tokenizer's end token did, or
            something else.
        lora_request: always None, as in vLLM; that of the whole request is set.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        """Whether this sequence is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The state of a request after a step; as a delta (see `RequestOutputKind.DELTA`), what is new
    of it: the sequences with new tokens or an end, each end once, and `prompt_logprobs` once.

    Attributes:
        prompt: the prompt's text; None: the request gave ids.
        prompt_logprobs: for each position in the prompt, candidates by id; position 0, which has
            no token before it, has None. None unless the request asks for them, and before the
            whole prompt is computed.
        lora_request: the `LoRARequest` of its adapter; None: it has none.
        failure: the error with which the request was refused or failed; None: no error.
        num_cached_tokens: prompt tokens whose K and V were in the cache.
        num_output_tokens: output tokens so far, of all sequences that are reported.
        pooled: an embedding, a score, or the probabilities of classes, of a model that makes no
            tokens; None: not computed yet, or the model generates.
        encoder_prompt: the text that the encoder read; None: ids were given, or the model has one
            half. With two halves `prompt` is the decoder's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    _: KW_ONLY
    failure: Exception | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    pooled: array[float] | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; with two halves of both prompts."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())

    @property
    def error(self) -> str | None:
        """Why the request was refused or failed; None: no error."""
        return None if self.failure is None else str(self.failure)


@dataclass
class BeamSearchSequence:
    """A beam of `LLM.beam_search`.

    Attributes:
        tokens: ids of the prompt and the output, without the end token unless it is asked for.
        text: their text, special tokens included; None: the model has no tokenizer.
        cum_logprob: sum of the output tokens' log probabilities.
    """

    tokens: list[int]
    text: str | None
    cum_logprob: float | None


@dataclass
class BeamSearchOutput:
    """What `LLM.beam_search` finds for a prompt.

    Attributes:
        sequences: complete beams, best first.
        error: why nothing was searched; None: no error.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass
class EmbeddingOutput:
    """An embedding: its elements."""

    embedding: list[float]


@dataclass
class ScoringOutput:
    """How well two texts fit."""

    score: float

    @classmethod
    def of_one(cls, values: list[float]) -> Self:
        """Of the only output of a model that scores."""
        (score,) = values
        return cls(score)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return math.fsum(map(mul, first, second)) / lengths if lengths else 0.0


@dataclass
class ClassificationOutput:
    """The probability of each class, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class PoolingRequestOutput:
    """What a model that makes no tokens gives for a prompt.

    Attributes:
        finished: always True.
        failure: the error with which the request was refused or failed; then `outputs` has none.
        make: makes `outputs` of the model's numbers.
    """

    make: ClassVar[Callable[..., Any]]

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool
    _: KW_ONLY
    failure: Exception | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """Why the request was refused or failed; None: no error."""
        return None if self.failure is None else str(self.failure)

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Returns what an engine gave for a request with `PoolingParams`, in this form."""
        made = None if output.pooled is None else cls.make(output.pooled.tolist())
        own = output.request_id, made, output.prompt_token_ids, output.finished
        num_cached = output.num_cached_tokens
        return cls(*own, failure=output.failure, num_cached_tokens=num_cached)


class EmbeddingRequestOutput(PoolingRequestOutput):
    """The embedding of a prompt."""

    outputs: EmbeddingOutput
    make = EmbeddingOutput


class ScoringRequestOutput(PoolingRequestOutput):
    """The score of two texts."""

    outputs: ScoringOutput
    make = ScoringOutput.of_one

    @classmethod
    def of_embeddings(cls, first: RequestOutput, second: RequestOutput) -> Self:
        """Returns the cosine of two embeddings as a score."""
        failure = first.failure or second.failure
        made = None
        if first.pooled is not None and second.pooled is not None:
            made = ScoringOutput(cosine(first.pooled, second.pooled))
        token_ids = first.prompt_token_ids + second.prompt_token_ids
        return cls(second.request_id, made, token_ids, True, failure=failure)


class ClassificationRequestOutput(PoolingRequestOutput):
    """The classes of a prompt."""

    outputs: ClassificationOutput
    make = ClassificationOutput
