"""`SamplingParams`: how the tokens of one request are chosen; and its logits processors.

To add a parameter, always:

1. Here: a field, its text under `Args`, and its check in `_check_numbers` or a method after it.
   For a bool its name in `_FLAGS` is the check. A sequence also becomes a tuple (`_as_tuple`).
2. In `server/grpc/proto/tpengine.proto`: a field of the same name. Then
   `python tests/support/build_proto.py` writes the stubs anew.
3. In `client/convert.py`: its name in `_SAME_NAME`; if the message has another type or range,
   a conversion in `_to_sampling` instead.
4. In `server/grpc/convert.py`: nothing, because fields are read by name; only if the message has
   another type (all lists do), a conversion in `_READERS`.
5. In `tests/server/test_convert.py`: a value in `ANOTHER`, and one in `WRONG` or `HARMLESS`.

`executor/codec.py` then sends it to the ranks as it is. The rest depends on what it does:

- It changes logits or the choice of a token: an array by slot in `SamplingSlots` of
  `worker/sampling_state.py` (`__init__`, `write`, `gather`), or objects in its `TokenRules`; the
  effect in `layers/sampler.py` or `layers/logit_edits.py`; `ModelRunner._worst_sampling` if it
  takes memory; `_check_sequences` below if beam search cannot do it.
- It needs the vocabulary, the tokenizer or the end tokens: `engine/requests.py`.
- It ends or shapes the output: `engine/output_processor.py`; the text: `engine/detokenizer.py`.
- Its length or value bounds memory or time: `server/limits.py` (`check_counts` for a list, with
  `_check_lengths` in `server/grpc/convert.py`; else `check_sampling`).
- It is an option of the commands: `SamplingOptions` in `cli/parser.py`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpengine.errors import InvalidSamplingParamsError

MAX_LOGPROBS = 64
"""Upper bound of `logprobs` and `prompt_logprobs`: longer lists cost more than the forward pass."""
MAX_LOGIT_BIAS = 1e6
"""A bias is in [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS]: far more than logits differ, and far from
float32's limits."""
_MOST_TOKENS = (1 << 31) - 1  # no vocabulary has more
_FLAGS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` reports of a request."""

    CUMULATIVE = "cumulative"
    """All output so far, after each step that added a token."""
    DELTA = "delta"
    """The new output since the last report."""
    FINAL_ONLY = "final_only"
    """All output, once the request has finished."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with the names and meanings of vLLM 0.5.4.

    Args:
        n: number of output sequences to return.
        best_of: number of sequences to generate; the `n` with the highest cumulative log
            probability are returned, once all are complete. In beam search the number of beams.
            Default: n.
        presence_penalty: subtracted from the logit of every token in the output, in [-2, 2].
        frequency_penalty: subtracted once for each time that the token is in the output, in
            [-2, 2].
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in
            prompt or output (Keskar et al. 2019); in (0, 2], 1 is neutral.
        temperature: 0 takes the most likely token; above 0, logits are divided by it.
        top_p: keep the most likely tokens whose probabilities add up to this, in (0, 1].
        top_k: keep this many most likely tokens; -1 or None keeps all (stored as None).
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: makes this request's samples the same in every run, independent of other requests.
        use_beam_search: keep the `best_of` most likely sequences, without sampling; temperature
            must be 0, top_p, top_k and min_p neutral, and no stop strings.
        length_penalty: beams are compared by their cumulative log probability, divided by their
            number of output tokens to this power.
        early_stopping: when beam search ends, as in transformers. True: with the `best_of`th
            complete beam. False: when no running beam is better than the worst complete one at its
            present length. "never": when no running beam can become better at any length.
        stop: strings that end the output; removed from it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output, as the model's end tokens do.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most output tokens; None: as many as the model's length allows.
        min_tokens: no end token and no stop before this many output tokens.
        logprobs: report this many most likely tokens at each position, and the chosen one, with
            log probabilities of the raw logits.
        prompt_logprobs: the same for each token of the prompt, given the tokens before it; such a
            request computes its whole prompt and does not use the prefix cache.
        detokenize: whether to produce text; without it `stop` cannot be used.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: always True, as byte-level tokenizers do.
        logits_processors: functions named "module:function" (or one such name) that edit the
            logits before all else. They are imported on the workers and called with the output
            ids and the logits `[vocab_size]` of one position, or, with three parameters, with
            prompt ids, output ids and logits; they return the new logits. One that raises ends
            its request with an error.
        logit_bias: added to the logits of these ids, each in [-1e6, 1e6].
        allowed_token_ids: no other ids are sampled.
        bad_words: texts that are not generated, with and without a space before them: the token
            that would complete one is never sampled, also if the text begins in the prompt.
        bad_words_token_ids: the same, each text as a sequence of ids.
        output_kind: what the engine reports while the request runs.

    Raises:
        InvalidSamplingParamsError: a value is out of its range; the message has both.
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
    logits_processors: str | Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE)
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_stops()
        self._check_token_rules()
        self._check_sequences()
        self._check_unsupported()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set, so that logits depend on earlier tokens."""
        neutral = (0.0, 0.0, 1.0)
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != neutral

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated at the same time."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether outputs are chosen once all sequences are complete, with no output before."""
        return self.use_beam_search or self.num_sequences > self.n

    def _normalise(self) -> None:
        for name in ("stop", "bad_words", "logits_processors"):
            value = getattr(self, name)
            texts = (value,) if isinstance(value, str) else _as_tuple(name, value)
            object.__setattr__(self, name, texts)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        keeps_all = isinstance(self.top_k, int) and self.top_k > _MOST_TOKENS
        if self.top_k == -1 or keeps_all:
            object.__setattr__(self, "top_k", None)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidSamplingParamsError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        try:
            object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in RequestOutputKind)
            raise InvalidSamplingParamsError(
                f"output_kind must be one of {kinds}, got {self.output_kind!r}"
            ) from None

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.top_k is not None:
            _check_int("top_k (-1 keeps all tokens)", self.top_k, 1)
        for name, low, high in (
            ("best_of", 1, None),
            ("max_tokens", 1, None),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), 2**64 - 1),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSamplingParamsError(f"stop must hold non-empty strings, got {text!r}")
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise InvalidSamplingParamsError(
                "stop strings need detokenize=True; use stop_token_ids, or drop one of the two"
            )

    def _check_token_rules(self) -> None:
        """Biases, bans and processors. The engine checks that ids are in its vocabulary."""
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidSamplingParamsError(
                    f"logit_bias must map ids to numbers, got {self.logit_bias!r}"
                )
            # A copy, so that a later change of the caller's dict does not change the request.
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            _check_ids("an id in logit_bias", self.logit_bias)
            for token_id, bias in self.logit_bias.items():
                _check_float(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed:
                raise InvalidSamplingParamsError(
                    "allowed_token_ids is empty, so that nothing could be sampled; give at least "
                    "one id, or None to allow all"
                )
            _check_ids("allowed_token_ids", allowed)
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidSamplingParamsError(
                    f"bad_words must hold strings that are not blank, got {word!r}"
                )
        words = _as_tuple("bad_words_token_ids", self.bad_words_token_ids)
        words = tuple(_as_tuple("bad_words_token_ids", word) for word in words)
        object.__setattr__(self, "bad_words_token_ids", words)
        for ids in words:
            if not ids:
                raise InvalidSamplingParamsError("bad_words_token_ids holds an empty sequence")
            _check_ids("bad_words_token_ids", ids)
        for path in self.logits_processors:
            _check_import_path(path)

    def _check_sequences(self) -> None:
        """More than one sequence, and beam search."""
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingParamsError(
                f"best_of must be at least n = {self.n}, got {self.best_of}"
            )
        if not self.use_beam_search:
            if self.greedy and self.num_sequences > 1:
                raise InvalidSamplingParamsError(
                    f"n or best_of = {self.num_sequences} at temperature 0 would give the same "
                    "sequence as often; set use_beam_search=True, or a temperature above 0"
                )
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidSamplingParamsError(
                        f"{name} = {getattr(self, name)!r} is only for use_beam_search=True"
                    )
            return
        if self.num_sequences < 2:
            raise InvalidSamplingParamsError(
                "use_beam_search needs best_of (or n) of at least 2, got 1"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingParamsError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        neutral_values = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "stop": ()}
        for name, value in neutral_values.items():
            if getattr(self, name) != value:
                raise InvalidSamplingParamsError(
                    f"beam search needs {name} = {value!r}, got {getattr(self, name)!r}"
                )

    def _check_unsupported(self) -> None:
        """Refuses fields of vLLM that tpengine does not support, rather than ignore them."""
        neutral = {
            "spaces_between_special_tokens": True,
            "truncate_prompt_tokens": None,
        }
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InvalidSamplingParamsError(
                    f"{name} = {getattr(self, name)!r} is not supported by this version of "
                    f"tpengine; leave it at {value!r}"
                )


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidSamplingParamsError(f"{name} must be a sequence, got {value!r}")
    return tuple(value)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSamplingParamsError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingParamsError(f"{name} must be {limit}, got {value}")


def _check_ids(name: str, token_ids: Iterable[object]) -> None:
    for token_id in token_ids:
        _check_int(name, token_id, 0)


def _check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParamsError(f"{name} must be a number, got {value!r}")
    too_low = value <= low if open_low else value < low
    # NaN passes the comparisons below, and an infinity is never meant.
    if not math.isfinite(value) or too_low or value > high:
        left = "(" if open_low or math.isinf(low) else "["
        right = ")" if math.isinf(high) else "]"
        raise InvalidSamplingParamsError(
            f"{name} must be in {left}{low:g}, {high:g}{right}, got {value}"
        )


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A function of the user that edits one row of logits.

    It is named "module:function": a name reaches every rank in any process, while most functions
    cannot be pickled.

    Attributes:
        path: its name.
        wants_prompt: whether it takes (prompt ids, output ids, logits); else (output ids, logits).
    """

    path: str
    function: Callable[..., Any]
    wants_prompt: bool


def _check_import_path(path: object) -> None:
    """Checks that a name has the form "module:function"; imports nothing."""
    if isinstance(path, str):
        module, _, name = path.partition(":")
        if module and name and all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            return
    raise InvalidSamplingParamsError(
        f'logits_processors must hold names of the form "module:function", got {path!r}; a '
        "function itself does not reach the workers: put it into a module that they can import"
    )


def load_logits_processor(path: str) -> LogitsProcessor:
    """Imports a function by its name.

    Raises:
        InvalidSamplingParamsError: there is no such function, its module cannot be imported, or it
            takes neither two nor three positional arguments.
    """
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # a module may raise anything while it is imported
        raise InvalidSamplingParamsError(
            f"the logits processor {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise InvalidSamplingParamsError(
            f"the logits processor {path!r} is a {type(target).__name__}, not a function"
        )
    return LogitsProcessor(path, target, _wants_prompt(path, target))


def _wants_prompt(path: str, function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C; assume the common form
        return False
    # Two first: of a function with an optional third parameter the short form is meant.
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise InvalidSamplingParamsError(
        f"the logits processor {path!r} must take (output_ids, logits) or (prompt_ids, "
        f"output_ids, logits), but its parameters are {signature}"
    )


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with the names of later versions of vLLM.

    Attributes:
        beam_width: number of beams, at least 2.
        max_tokens: most output tokens of a beam.
        ignore_eos: go on after the model's end tokens.
        temperature: only 0.
        length_penalty: beams are compared by their cumulative log probability, divided by their
            number of output tokens to this power.
        include_stop_str_in_output: keep the end token in tokens and text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Returns the same search as `SamplingParams`.

        Raises:
            InvalidSamplingParamsError: a value is out of its range.
        """
        same = {name: value for name, value in vars(self).items() if name != "beam_width"}
        return SamplingParams(n=self.beam_width, use_beam_search=True, **same)
