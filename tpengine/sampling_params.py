"""`SamplingParams`: how the tokens of one request are chosen; and its logits processors.

To add a parameter, always:

1. Here: a keyword-only field, its text under `Args`, and its check: of a number in
   `_read_numbers`, of a list or map in `_read_lists`; for a bool its annotation is the check.
   A check also brings the value into its one form (numbers of Python, new lists and dicts).
2. In `server/grpc/proto/tpengine.proto`: a field of the same name. Then
   `python tests/support/build_proto.py` writes the stubs anew.
3. In `client/client_messages.py`: its name in `_SAME_NAME`; if the message has another type or
   range, a conversion in `_to_sampling` instead.
4. In `server/grpc/generation_messages.py`: nothing, because fields are read by name; only if the
   message has another type (all lists do), a conversion in `_READERS`.
5. In `tests/server/test_generation_messages.py`: a value in `ANOTHER`, and one in `WRONG` or `HARMLESS`.

`executor/codec.py` then sends it to the ranks as it is. The rest depends on what it does:

- It changes logits or the choice of a token: an array by slot in `SamplingSlots` of
  `worker/sampling_state.py` (`__init__`, `write`, `gather`) and its field in `SamplingBatch` of
  `layers/sampler.py`, or objects in its `TokenRules`; the effect in `layers/logit_edits.py`, or in
  the kernel `sample_tokens`: its arguments in `sampling_columns` of `layers/sampler.py`, then
  `ops/fused_ops.py`, `ops/reference.py`, `csrc/cpu/sampling.inc` and
  `csrc/cuda/sampling/sample_tokens.cuh`. `ModelRunner._worst_sampling` if it takes memory;
  `_check_sequences` below if beam search cannot do it.
- It needs the vocabulary, the tokenizer or the end tokens: `engine/requests.py`.
- It ends or shapes the output: `engine/output_processor.py`; the text: `engine/detokenizer.py`.
- Its length or value bounds memory or time: `server/limits.py` (`max_entries` for a list, which
  `_check_lengths` in `server/grpc/generation_messages.py` reads; else `check_sampling`).
- It is an option of the commands: `SamplingOptions` in `cli/parser.py`.
"""

from __future__ import annotations

import copy
import enum
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from operator import index
from typing import Any

from tpengine.compat import aliases
from tpengine.errors import InvalidSamplingParamsError, did_you_mean

LogitsProcessor = Callable[[list[int], Any], Any] | Callable[[list[int], list[int], Any], Any]
"""A function of (output ids, logits) or (prompt ids, output ids, logits) that returns logits."""
WHOLE_VOCABULARY = -1
"""As `logprobs` or `prompt_logprobs`."""
MAX_LOGIT_BIAS = 1e6
"""A bias is in [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS]: far more than logits differ, and far from
float32's limits."""
_MOST_TOKENS = (1 << 31) - 1  # no vocabulary has more
_EPSILON = 1e-5
"""A temperature below it is 0, and a length penalty that differs from 1 by less is neutral."""
_NAME = "structured_outputs"
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TOP_K = "top_k (-1 keeps all tokens)"


class SamplingType(enum.IntEnum):
    """How the tokens of a request are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2
    BEAM = 3


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` reports of a request."""

    CUMULATIVE = "cumulative"
    """All output so far, after each step that added a token."""
    DELTA = "delta"
    """The new output since the last report."""
    FINAL_ONLY = "final_only"
    """All output, once the request has finished."""


@dataclass
class StructuredOutputsParams:
    """A constraint on every output of a request, with the names of vLLM; exactly one is given.

    Attributes:
        json: a JSON schema, as a dict, as text, or as a class of pydantic.
        regex: a regular expression in the syntax of Rust's `regex`, which matches the whole output.
        choice: texts, of which the output is one.
        grammar: in the Lark dialect of llguidance, or in llama.cpp's GBNF.
        json_object: True: any JSON object.
        structural_tag: free text with tagged parts, as `{"structures": [{"begin": ..., "schema":
            ..., "end": ...}], "triggers": [...]}` or its text; the part after a `begin` follows
            the schema. Each `begin` starts with one of the triggers.
        disable_any_whitespace: JSON without white space outside strings. By default there may be a
            space, or a line break and an indentation, between its parts.
        whitespace_pattern: a regular expression for that white space instead.

    Raises:
        InvalidSamplingParamsError: none or several of them are given, or one has a wrong type.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = self.kinds
        if len(kinds) != 1:
            raise InvalidSamplingParamsError(
                f"{_NAME} needs exactly one of {', '.join(_CONSTRAINTS)}, got "
                f"{' and '.join(kinds) or 'none of them'}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_type(name, getattr(self, name), str | None)
        for name in ("json_object", "disable_any_whitespace"):
            _check_type(name, getattr(self, name), bool | None)
        if self.json is not None:
            schema = getattr(self.json, "model_json_schema", None)
            self.json = _read_object("json", self.json if schema is None else schema())
        if self.structural_tag is not None:
            self.structural_tag = _read_object("structural_tag", self.structural_tag)
        if self.choice is not None:
            if isinstance(self.choice, str) or not isinstance(self.choice, Sequence):
                _refuse_type("choice", self.choice)
            self.choice = list(self.choice)
            if not self.choice or not all(isinstance(one, str) and one for one in self.choice):
                raise InvalidSamplingParamsError(
                    f"{_NAME}.choice must hold texts that are not empty, got {self.choice!r:.80}"
                )

    @property
    def kinds(self) -> list[str]:
        """Names of the constraints that are set."""
        return [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]

    @classmethod
    def read(cls, given: Any) -> StructuredOutputsParams:
        """The parameters as such, from themselves or from a dict of their fields.

        Raises:
            InvalidSamplingParamsError: it is neither, or see the class.
        """
        if isinstance(given, cls):
            given.__post_init__()  # attributes may have been assigned
            return given
        if not isinstance(given, Mapping):
            _refuse_type("", given)
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InvalidSamplingParamsError(
                f"{_NAME} has no field {sorted(map(str, unknown))}; its fields are "
                f"{', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**given)

    @property
    def num_bytes(self) -> int:
        """Size of the constraint as JSON."""
        return len(json.dumps(vars(self)))


@dataclass
class SamplingParams:
    """Sampling parameters, with the names, order and meanings of vLLM 0.5.4.

    Attributes can be assigned. The constructor checks them; the engine takes a copy of its own when
    the request is added, and checks that again.

    Args:
        n: number of output sequences to return.
        best_of: number of sequences to generate; the `n` with the highest cumulative log
            probability are returned, once all are complete. In beam search the number of beams.
            None becomes n.
        presence_penalty: subtracted from the logit of every token in the output, in [-2, 2].
        frequency_penalty: subtracted once for each time that the token is in the output, in
            [-2, 2].
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in
            prompt or output (Keskar et al. 2019); in (0, 2], 1 is neutral.
        temperature: logits are divided by it; 0 takes the most likely token. Below 1e-5 it becomes
            0; top_p, top_k and min_p then become neutral, since they change nothing.
        top_p: keep the most likely tokens whose probabilities add up to this, in (0, 1].
        top_k: keep this many most likely tokens; -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: makes this request's samples the same in every run, independent of other requests;
            -1 becomes None.
        use_beam_search: keep the `best_of` most likely sequences, without sampling; temperature
            must be 0, top_p, top_k and min_p neutral, and no stop strings.
        length_penalty: beams are compared by their cumulative log probability, divided by their
            number of output tokens to this power.
        early_stopping: when beam search ends, as in transformers. True: with the `best_of`th
            complete beam. False: when no running beam is better than the worst complete one at its
            present length. "never": when no running beam can become better at any length.
        stop: strings that end the output, or one string; removed from it unless
            `include_stop_str_in_output`. Becomes a list.
        stop_token_ids: tokens that end the output, as the model's end tokens do. Becomes a list.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most output tokens; None: as many as the model's length allows.
        min_tokens: no end token and no stop before this many output tokens.
        logprobs: report this many most likely tokens at each position, and the chosen one, with
            log probabilities of the raw logits. -1: the whole vocabulary; True becomes 1. The
            engine's `max_logprobs` bounds it.
        prompt_logprobs: the same for each token of the prompt, given the tokens before it; such a
            request computes its whole prompt and does not use the prefix cache.
        detokenize: whether to produce text; without it `stop` cannot be used.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False is refused for a tokenizer written in Python, and has
            no effect on the text of any other.
        logits_processors: functions that edit the logits before all else, or one such function.
            They are called with the output ids and the logits `[vocab_size]` of one position, or,
            with three parameters, with prompt ids, output ids and logits; they return the new
            logits. One that fails ends its request with finish reason error. Ranks in other
            processes get a pickled copy (cloudpickle, at most 1 MiB), anew after a preemption or a
            recovery. A name "module:function" is imported on every rank instead.
        truncate_prompt_tokens: only this many last tokens of the prompt are used.
        output_kind: what the engine reports while the request runs.
        logit_bias: added to the logits of these ids, each in [-1e6, 1e6].
        allowed_token_ids: no other ids are sampled.
        bad_words: texts that are not generated, with and without a space before them: the token
            that would complete one is never sampled, also if the text begins in the prompt.
        bad_words_token_ids: the same, each text as a sequence of ids.
        visible_token_ids: special tokens that `skip_special_tokens` does not leave out. A server
            sets it to find calls of tools; it is not in the protocols.
        structured_outputs: what each output must look like: a JSON schema, a regular expression, a
            choice or a grammar; or a dict of its fields. The model's end tokens end the output
            where the constraint is complete, also with `ignore_eos`. Such an output follows the
            constraint; one with finish reason length is the beginning of an output that does.

    Raises:
        InvalidSamplingParamsError: a value is out of its range; the message has both.
    """

    # `Any` stands for other forms that `check` turns into this one.
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: list[str] | Any = None
    stop_token_ids: list[int] | Any = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[LogitsProcessor | str] | Any = None
    truncate_prompt_tokens: int | None = None
    _: KW_ONLY
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | Any = None
    bad_words: list[str] | Any = ()
    bad_words_token_ids: list[list[int]] | Any = ()
    visible_token_ids: list[int] | Any = ()
    structured_outputs: StructuredOutputsParams | Any = None

    __hash__ = object.__hash__  # by identity, as in vLLM, because attributes change

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Makes parameters from fields of which None stands for the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

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
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether outputs are chosen once all sequences are complete, with no output before."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are chosen."""
        if self.use_beam_search:
            return SamplingType.BEAM
        if self.greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def output_text_buffer_length(self) -> int:
        """Number of characters that may be held back, since they may begin a stop string."""
        if not self.stop or self.include_stop_str_in_output:
            return 0
        return max(map(len, self.stop)) - 1

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set that cannot be changed. The engine adds the model's end
        tokens to its own copy."""
        return frozenset(self.stop_token_ids)

    def clone(self) -> SamplingParams:
        """Returns a copy that shares the logits processors, which may hold much data."""
        processors = self.logits_processors
        cloned = copy.deepcopy(self, {id(processors): processors})
        cloned.logits_processors = copy.copy(processors)
        return cloned

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Adds the end tokens of a `generation_config.json` to `stop_token_ids`, unless
        `ignore_eos`. The engine itself ends requests at these tokens; it needs no such call.

        Args:
            model_eos_token_id: the tokenizer's end token, which is not added.
        """
        found = generation_config.get("eos_token_id")
        if found is None or self.ignore_eos:
            return
        end_ids = found if isinstance(found, Iterable) else [found]
        known = {model_eos_token_id, *self.stop_token_ids}
        self.stop_token_ids = [*self.stop_token_ids, *(i for i in end_ids if i not in known)]

    def check(self) -> None:
        """Checks all attributes, after some were assigned, and brings them into the form that they
        have after construction.

        Raises:
            InvalidSamplingParamsError: a value is out of its range; the message has both.
        """
        known = self.__dataclass_fields__.keys()
        for name in vars(self).keys() - known:
            raise InvalidSamplingParamsError(
                f"SamplingParams has no attribute {name!r}{did_you_mean(name, known)}"
            )
        self._read_choices()
        self._read_numbers()
        self._read_lists()
        self._check_sequences()
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, -1, 0.0

    def _read_choices(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidSamplingParamsError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in RequestOutputKind)
            raise InvalidSamplingParamsError(
                f"output_kind must be one of {kinds}, got {self.output_kind!r}"
            ) from None

    def _read_numbers(self) -> None:
        """Numbers of NumPy become those of Python."""
        self.n = read_int("n", self.n, 1)
        self.presence_penalty = _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _float(
            "repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True
        )
        temperature = _float("temperature", self.temperature, 0.0, math.inf)
        self.temperature = temperature if temperature >= _EPSILON else 0.0
        self.top_p = _float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.min_p = _float("min_p", self.min_p, 0.0, 1.0)
        self.length_penalty = _float("length_penalty", self.length_penalty, -10.0, 10.0)
        self.min_tokens = read_int("min_tokens", self.min_tokens, 0)
        top_k = -1 if self.top_k in (None, -1) else read_int(_TOP_K, self.top_k, 1)
        self.top_k = -1 if top_k > _MOST_TOKENS else top_k
        if self.best_of is None:
            self.best_of = self.n
        if self.seed == -1:
            self.seed = None
        for name, low, high in (
            ("best_of", 1, None),
            ("max_tokens", 1, None),
            ("logprobs", WHOLE_VOCABULARY, None),
            ("prompt_logprobs", WHOLE_VOCABULARY, None),
            ("truncate_prompt_tokens", 1, None),
            ("seed", -(2**63), 2**64 - 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) and name.endswith("logprobs"):
                value = int(value)
            if value is not None:
                setattr(self, name, read_int(name, value, low, high))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )

    def _read_lists(self) -> None:
        """Lists and maps become new ones, so that a later change of the caller's has no effect.
        The engine checks that ids are in its vocabulary."""
        self.stop = _one_or_more("stop", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSamplingParamsError(f"stop must hold non-empty strings, got {text!r}")
        if self.stop and not self.detokenize:
            raise InvalidSamplingParamsError(
                "stop strings need detokenize=True; use stop_token_ids, or drop one of the two"
            )
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        if self.logits_processors is not None:
            self.logits_processors = _one_or_more("logits_processors", self.logits_processors)
            for processor in self.logits_processors:
                _check_processor(processor)
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidSamplingParamsError(
                    "allowed_token_ids is empty, so that nothing could be sampled; give at least "
                    "one id, or None to allow all"
                )
        self.bad_words = _one_or_more("bad_words", self.bad_words)
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidSamplingParamsError(
                    f"bad_words must hold strings that are not blank, got {word!r}"
                )
        words = _as_list("bad_words_token_ids", self.bad_words_token_ids)
        self.bad_words_token_ids = [_ids("bad_words_token_ids", word) for word in words]
        if [] in self.bad_words_token_ids:
            raise InvalidSamplingParamsError("bad_words_token_ids holds an empty sequence")
        self.visible_token_ids = _ids("visible_token_ids", self.visible_token_ids)
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.read(self.structured_outputs)

    def _check_sequences(self) -> None:
        """More than one sequence, and beam search."""
        if self.num_sequences < self.n:
            raise InvalidSamplingParamsError(
                f"best_of must be at least n = {self.n}, got {self.best_of}; None makes it n"
            )
        if not self.use_beam_search:
            if self.greedy and self.num_sequences > 1:
                raise InvalidSamplingParamsError(
                    "n or best_of at temperature 0 would give the same sequence "
                    f"{self.num_sequences} times; set use_beam_search=True, or a temperature "
                    "above 0"
                )
            for name, is_neutral in (
                ("length_penalty", abs(self.length_penalty - 1.0) <= _EPSILON),
                ("early_stopping", self.early_stopping is False),
            ):
                if not is_neutral:
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
        neutral_values = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": []}
        for name, value in neutral_values.items():
            if getattr(self, name) != value:
                raise InvalidSamplingParamsError(
                    f"beam search needs {name} = {value!r}, got {getattr(self, name)!r}"
                )


_FLAGS = [name for name, kind in SamplingParams.__annotations__.items() if kind == "bool"]


def _as_list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidSamplingParamsError(f"{name} must be a list, got {value!r}")
    return list(value)


def _one_or_more(name: str, value: Any) -> list[Any]:
    """A list of what is given, or of the one string or function."""
    return [value] if isinstance(value, str) or callable(value) else _as_list(name, value)


def _ids(name: str, values: Any) -> list[int]:
    return [read_int(f"an id in {name}", value, 0) for value in _as_list(name, values)]


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidSamplingParamsError(f"logit_bias must map ids to numbers, got {value!r}")
    return {
        read_int("an id in logit_bias", token_id, 0): _float(
            f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
        )
        for token_id, bias in value.items()
    }


def read_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A checked integer of Python, NumPy or a tensor; bool is a subclass of int and refused."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidSamplingParamsError(f"{name} must be an integer, got {value!r}")
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingParamsError(f"{name} must be {limit}, got {number}")
    return number


def _float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """A checked number of Python or NumPy."""
    # The ABC, which is slower, is asked only about numbers that are not Python's.
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise InvalidSamplingParamsError(f"{name} must be a number, got {value!r}")
    number = float(value)
    too_low = number <= low if open_low else number < low
    # NaN passes the comparisons below, and an infinity is never meant.
    if not math.isfinite(number) or too_low or number > high:
        left = "(" if open_low or math.isinf(low) else "["
        right = ")" if math.isinf(high) else "]"
        raise InvalidSamplingParamsError(
            f"{name} must be in {left}{low:g}, {high:g}{right}, got {value}"
        )
    return number


def _check_processor(processor: object) -> None:
    """Checks that it is a function, or a name of the form "module:function"; imports nothing."""
    if isinstance(processor, str):
        module, _, name = processor.partition(":")
        if module and name and all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            return
    elif callable(processor):
        return
    raise InvalidSamplingParamsError(
        'logits_processors must hold functions, or names of the form "module:function", got '
        f"{processor!r}"
    )


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A function of the user that edits one row of logits.

    Attributes:
        name: "module:function", or the function's own name.
        wants_prompt: whether it takes (prompt ids, output ids, logits); else (output ids, logits).
    """

    name: str
    function: Callable[..., Any]
    wants_prompt: bool


def load_logits_processor(processor: LogitsProcessor | str) -> LoadedProcessor:
    """Prepares a function for calls; imports it if it is given by its name.

    Raises:
        InvalidSamplingParamsError: there is no such function, its module cannot be imported, or it
            takes neither two nor three positional arguments.
    """
    if not isinstance(processor, str):
        name = getattr(processor, "__qualname__", type(processor).__name__)
        return LoadedProcessor(name, processor, _wants_prompt(name, processor))
    module, _, name = processor.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # a module may raise anything while it is imported
        raise InvalidSamplingParamsError(
            f"the logits processor {processor!r} cannot be imported: {type(error).__name__}: "
            f"{error}"
        ) from error
    if not callable(target):
        raise InvalidSamplingParamsError(
            f"the logits processor {processor!r} is a {type(target).__name__}, not a function"
        )
    return LoadedProcessor(processor, target, _wants_prompt(processor, target))


def _wants_prompt(name: str, function: Callable[..., Any]) -> bool:
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
        f"the logits processor {name!r} must take (output_ids, logits) or (prompt_ids, "
        f"output_ids, logits), but its parameters are {signature}"
    )


def _read_object(name: str, given: Any) -> dict[str, Any]:
    """A JSON object, given as such or as text."""
    try:
        read = json.loads(given) if isinstance(given, str) else given
        plain = json.loads(json.dumps(read, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSamplingParamsError(f"{_NAME}.{name} is no JSON: {error!s:.200}") from None
    if not isinstance(plain, dict):
        _refuse_type(name, plain)
    return dict(plain)


def _check_type(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        _refuse_type(name, value)


def _refuse_type(name: str, value: Any) -> Any:
    kinds = {
        "": "StructuredOutputsParams or a dict of its fields",
        "json": "a JSON schema: an object",
        "structural_tag": "a JSON object",
        "choice": "a list of texts",
        "json_object": "True or False",
        "disable_any_whitespace": "True or False",
    }
    place = f"{_NAME}.{name}" if name else _NAME
    raise InvalidSamplingParamsError(
        f"{place} must be {kinds.get(name, 'a text')}, got {value!r:.80}"
    )


aliases.add_names(__name__)
