"""How the tokens of one request are chosen, checked when it is constructed."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpengine.errors import InvalidSamplingParamsError

MAX_LOGPROBS = 64
"""Upper bound of `SamplingParams.logprobs`: larger candidate lists cost more than the forward."""


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` reports of a request."""

    CUMULATIVE = "cumulative"
    """All output so far, after each step that added a token."""
    DELTA = "delta"
    """Only what is new since the last report."""
    FINAL_ONLY = "final_only"
    """Nothing until the request has finished, then all of it."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with the names and meanings of vLLM 0.5.4.

    Args:
        n: number of output sequences to return; only 1 so far.
        best_of: number of sequences to generate and choose `n` from; only 1 so far.
        presence_penalty, frequency_penalty, repetition_penalty: only neutral values so far.
        temperature: 0 is greedy; above, logits are divided by it before they are sampled.
        top_p: keep the most likely tokens whose probabilities add up to this, in (0, 1].
        top_k: keep this many most likely tokens; -1 or None keeps all (stored as None).
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: fixes this request's draws, whatever runs beside it.
        use_beam_search, length_penalty, early_stopping: beam search; refused so far.
        stop: strings that end the output; they are cut off unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output, besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most output tokens; None: as many as fit into the model's length.
        min_tokens: end tokens and stops are ruled out before this many output tokens.
        logprobs: report this many most likely tokens at each position, and the chosen one; of the
            raw logits, before temperature and truncation.
        prompt_logprobs: refused so far.
        detokenize: whether to produce text; without it `stop` cannot be used.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: only True, which is what byte-level tokenizers do.
        output_kind: what the engine reports while the request runs.

    Raises:
        InvalidSamplingParamsError: a value is out of range; the message gives range and value.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_stops()
        self._check_unsupported()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", None)
        if self.logprobs is True:  # a frequent slip: a flag where a count is meant
            raise InvalidSamplingParamsError("logprobs must be a count in [0, 64], got True")

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("length_penalty", self.length_penalty, -math.inf, math.inf)
        _check_int("min_tokens", self.min_tokens, 0)
        for name, low in (
            ("best_of", 1),
            ("top_k", 1),
            ("max_tokens", 1),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None and self.logprobs > MAX_LOGPROBS:
            raise InvalidSamplingParamsError(
                f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSamplingParamsError(f"stop must hold non-empty strings, got {text!r}")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        if self.stop and not self.detokenize:
            raise InvalidSamplingParamsError(
                "stop strings need detokenize=True; use stop_token_ids, or drop one of the two"
            )

    def _check_unsupported(self) -> None:
        """Refuses what the engine does not do, so that nothing is silently ignored."""
        neutral = {
            "n": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "early_stopping": False,
            "prompt_logprobs": None,
            "spaces_between_special_tokens": True,
            "logits_processors": None,
            "truncate_prompt_tokens": None,
        }
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InvalidSamplingParamsError(
                    f"{name} = {getattr(self, name)!r} is not supported by this version of "
                    f"tpengine; leave it at {value!r}"
                )
        if self.best_of not in (None, 1):
            raise InvalidSamplingParamsError(
                f"best_of = {self.best_of} is not supported by this version of tpengine; "
                "leave it unset"
            )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSamplingParamsError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingParamsError(f"{name} must be {limit}, got {value}")


def _check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParamsError(f"{name} must be a number, got {value!r}")
    too_low = value <= low if open_low else value < low
    # NaN fails every comparison, so it is asked for by name; an infinity is never meant.
    if not math.isfinite(value) or too_low or value > high:
        left = "(" if open_low or math.isinf(low) else "["
        right = ")" if math.isinf(high) else "]"
        raise InvalidSamplingParamsError(
            f"{name} must be in {left}{low:g}, {high:g}{right}, got {value}"
        )
