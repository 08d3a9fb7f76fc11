"""Results of a request, as a user gets them."""

from __future__ import annotations

from dataclasses import dataclass

from tpengine import aliases


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability by the raw logits, and its rank (1: the first)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.time`; None: not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose K and V were in the cache when it was first scheduled."""
    num_sampled_tokens: int = 0
    """Sampled tokens of all sequences so far, those of dropped beams included."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until it was first scheduled; None before that."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One output sequence of a request.

    Attributes:
        index: its index among the request's sequences; its rank with `best_of` or beams.
        text: the generated text, or the new part of it (see `RequestOutputKind.DELTA`).
        token_ids: the generated ids, the end token included; `text` does not include it.
        cumulative_logprob: sum of the chosen tokens' log probabilities; None unless the request
            asks for `logprobs`, or outputs are chosen by it.
        logprobs: for each token, candidates by id; None unless the request asks for them.
        finish_reason: stop, length, abort or error; None while unfinished.
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
        prompt: the prompt's text; None: the request gave ids.
        prompt_logprobs: for each position in the prompt, candidates by id; position 0, which has
            no token before it, has None. None unless the request asks for them, and before the
            whole prompt is computed.
        error: why the request was refused or failed; None: no error.
        num_cached_tokens: prompt tokens whose K and V were in the cache.
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


aliases.add_names(__name__)
