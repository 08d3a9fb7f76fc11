"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability under the raw logits, and its rank (1 is likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Moments in a request's life, in seconds of `time.time`; None where not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose K and V were found in the cache when it was first scheduled."""
    num_sampled_tokens: int = 0
    """Over all sequences, so far; those of beams that were dropped are among them."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and first schedule; None before that."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One output sequence of a request.

    Attributes:
        index: its place among the request's sequences; with `best_of` or beams its rank.
        text: the generated text (or what is new of it, see `RequestOutputKind.DELTA`).
        token_ids: the generated ids; the end token is among them, its text is not.
        cumulative_logprob: sum of the chosen tokens' log probabilities; None unless the request
            asked for `logprobs`, or outputs are chosen by it.
        logprobs: per token, candidates by id; None unless asked for.
        finish_reason: stop, length, abort, ignored or error; None while unfinished.
        stop_reason: the stop string or stop token that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step.

    Attributes:
        prompt: the prompt's text; None when ids were given.
        prompt_logprobs: by position in the prompt, candidates by id; None at position 0, which
            nothing precedes. None unless asked for, and until the whole prompt is computed.
        error: why the request was refused, ignored or failed; None when all is well.
        num_cached_tokens: prompt tokens whose K and V were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
