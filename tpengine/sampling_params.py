"""`SamplingParams`: how the tokens of one request are chosen; and its logits processors.

To add a parameter:

1. Declare it here, as a field of `SamplingParams`: its type, range and doors. From that follow its
   check, its form, its option of commands, its field in bodies over HTTP, and how clients write
   and servers read it over gRPC (`proto/parameter_fields.py`), where it needs a field of the same
   name in `proto/tpengine.proto`; `python tests/support/build_proto.py` writes the stubs anew.
2. If ranks need it: a field of the same name in `SamplingRules` of `messages.py`, and what it does
   in `worker/sampling_state.py` and `layers/sampler.py`, or, if it edits logits, in
   `worker/edit_slots.py`, `worker/token_rules.py` and `layers/logit_edits.py`. In all other cases
   what it does stands where the decision is made: `engine/requests.py` (vocabulary, tokenizer, end
   tokens), `engine/output_processor.py` (end and form of the output), `engine/detokenizer.py`
   (text), `server/limits.py` (bounds of memory and time).

What rules two parameters together, such as those of beam search, is in `SamplingParams.check`.
"""

from __future__ import annotations

import copy
import enum
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tpengine.errors import InvalidSamplingParamsError, did_you_mean
from tpengine.options import WrongValueError, parameter, parameters, read_parameters

LogitsProcessor = Callable[[list[int], Any], Any] | Callable[[list[int], list[int], Any], Any]
"""A function of (output ids, logits) or (prompt ids, output ids, logits) that returns logits."""
WHOLE_VOCABULARY = -1
"""As `logprobs` or `prompt_logprobs`."""
_refusal = InvalidSamplingParamsError.of_field
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MOST_TOKENS = (1 << 31) - 1  # no vocabulary has more
_EPSILON = 1e-5
"""A temperature below it is 0, and a length penalty that differs from 1 by less is neutral."""


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


def _read_object(value: Any) -> dict[str, Any]:
    """A JSON object, given as such, as text, or as a class of pydantic that has its schema."""
    schema = getattr(value, "model_json_schema", None)
    try:
        read = value if schema is None else schema()
        read = json.loads(read) if isinstance(read, str) else read
        plain = json.loads(json.dumps(read, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongValueError(f" is no JSON: {error!s:.200}") from None
    if not isinstance(plain, dict):
        raise WrongValueError(f" must be a JSON object, got {plain!r:.80}")
    return plain


@dataclass
class StructuredOutputsParams:
    """A constraint on every output of a request, with the names of vLLM; exactly one is given.

    Raises:
        InvalidSamplingParamsError: none or several of them are given, or one has a wrong type.
    """

    json: Any | None = parameter(None, read=_read_object)
    """A JSON schema, as a dict, as text, or as a class of pydantic."""
    regex: str | None = parameter(None)
    """A regular expression in the syntax of Rust's `regex`, which matches the whole output."""
    choice: list[str] | Any | None = parameter(None)
    """Texts, of which the output is one."""
    grammar: str | None = parameter(None)
    """In the Lark dialect of llguidance, or in llama.cpp's GBNF."""
    json_object: bool | None = parameter(None)
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = parameter(None, read=_read_object)
    """Free text with tagged parts, as `{"structures": [{"begin": ..., "schema": ..., "end": ...}],
    "triggers": [...]}` or its text; the part after a `begin` follows the schema. Each `begin`
    starts with one of the triggers."""
    disable_any_whitespace: bool | None = parameter(False)
    """JSON without white space outside strings. By default there may be a space, or a line break
    and an indentation, between its parts."""
    whitespace_pattern: str | None = parameter(None)
    """A regular expression for that white space instead."""

    def __post_init__(self) -> None:
        kinds = self.kinds
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none of them"
            needed = f"needs exactly one of {', '.join(_CONSTRAINTS)}"
            raise _refusal("structured_outputs", f"{needed}, got {got}")
        if self.choice is not None and (isinstance(self.choice, str) or not self.choice):
            text = f"structured_outputs.choice must be a list of texts, got {self.choice!r:.80}"
            raise InvalidSamplingParamsError(text, field="structured_outputs")
        read_parameters(self, "structured_outputs.")

    @property
    def kinds(self) -> list[str]:
        """Names of the constraints that are set."""
        return [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsParams:
        """The parameters as such, from themselves or from a dict of their fields.

        Raises:
            InvalidSamplingParamsError: it is neither, or see the class.
        """
        if isinstance(value, cls):
            value.__post_init__()  # attributes may have been assigned
            return value
        if not isinstance(value, Mapping):
            text = f" must be StructuredOutputsParams or a dict of its fields, got {value!r:.80}"
            raise WrongValueError(text)
        unknown = value.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            text = f" has no field {sorted(map(str, unknown))}; its fields are {known}"
            raise WrongValueError(text)
        return cls(**value)

    @property
    def num_bytes(self) -> int:
        """Size of the constraint as JSON."""
        return len(json.dumps(vars(self)))


def _read_processors(value: Any) -> list[LogitsProcessor | str]:
    """Functions, or names of the form "module:function"; imports nothing."""
    processors = [value] if isinstance(value, str) or callable(value) else value
    if not isinstance(processors, Iterable):
        raise WrongValueError(f" must be a list, got {value!r}")
    processors = list(processors)
    for processor in processors:
        module, _, name = processor.partition(":") if isinstance(processor, str) else ("", "", "")
        is_name = module and name and all(map(str.isidentifier, f"{module}.{name}".split(".")))
        if not is_name and not callable(processor):
            raise WrongValueError(
                f' must hold functions, or names of the form "module:function", got {processor!r}'
            )
    return processors


@dataclass
class SamplingParams:
    """Sampling parameters, with the names, order and meanings of vLLM 0.5.4.

    Attributes can be assigned. The constructor checks them; the engine takes a copy of its own when
    the request is added, and checks that again.

    Raises:
        InvalidSamplingParamsError: a value is out of its range; the message has both.
    """

    # `Any` stands for other forms that `check` turns into this one.
    n: int = parameter(1, at_least=1)
    """Number of output sequences to return."""
    best_of: int | None = parameter(None, at_least=1)
    """Number of sequences to generate; the `n` with the highest cumulative log probability are
    returned, once all are complete. In beam search the number of beams. None becomes n."""
    presence_penalty: float = parameter(0.0, at_least=-2, at_most=2)
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = parameter(0.0, at_least=-2, at_most=2)
    """Subtracted once for each time that the token is in the output."""
    repetition_penalty: float = parameter(1.0, more_than=0, at_most=2, is_option=True)
    """Make tokens of prompt and output less likely, in (0, 2]; 1 is neutral; default: what the
    model recommends, else 1.

    Divides positive logits, and multiplies negative ones (Keskar et al. 2019)."""
    temperature: float = parameter(1.0, at_least=0, is_option=True)
    """How freely tokens are drawn; 0 takes the most likely one; default: what the model recommends
    in its generation_config.json, or a GGUF file under general.sampling, with do_sample: false 0,
    and 0.7 if it recommends nothing. A client leaves this to its server.

    Logits are divided by it. Below 1e-5 it becomes 0; top_p, top_k and min_p then become neutral,
    since they change nothing."""
    top_p: float = parameter(1.0, more_than=0, at_most=1, is_option=True)
    """Draw from the most likely tokens whose probabilities reach this sum, in (0, 1]; default: what
    the model recommends, and 0.9 if it recommends nothing."""
    top_k: int = parameter(-1, at_least=1, besides=-1, advice="-1 keeps all tokens", is_option=True)
    """Draw from this many most likely tokens; -1 draws from all; default: what the model
    recommends, else -1."""
    min_p: float = parameter(0.0, at_least=0, at_most=1, is_option=True)
    """Leave out tokens below this share of the most likely one's probability, in [0, 1]; default:
    what the model recommends, else 0."""
    seed: int | None = parameter(None, at_least=-(2**63), at_most=2**64 - 1, is_option=True)
    """Seed of each prompt; default: made from the engine's seed and the number of the request, so
    that `tpengine generate` repeats its texts, and a server does not.

    Makes the samples the same in every run, independent of other requests. -1 becomes None."""
    use_beam_search: bool = parameter(False)
    """Keep the `best_of` most likely sequences, without sampling; temperature must be 0, top_p,
    top_k and min_p neutral, and no stop strings."""
    length_penalty: float = parameter(1.0, at_least=-10, at_most=10)
    """Beams are compared by their cumulative log probability, divided by their number of output
    tokens to this power."""
    early_stopping: bool | str = parameter(False, (False, True, "never"))
    """When beam search ends, as in transformers. True: with the `best_of`th complete beam. False:
    when no running beam is better than the worst complete one at its present length. "never": when
    no running beam can become better at any length."""
    stop: list[str] | Any = parameter(None, max_entries="max_stops", metavar="TEXT", is_option=True)
    """Text that ends the output; may be given more than once.

    In Python one string or several; becomes a list. It is removed from the output unless
    `include_stop_str_in_output`."""
    stop_token_ids: list[int] | Any = parameter(None, at_least=0, max_entries="max_stops")
    """Tokens that end the output, as the model's end tokens do. Becomes a list."""
    include_stop_str_in_output: bool = parameter(False)
    """Leave the stop string, or the stop token, in the output."""
    ignore_eos: bool = parameter(False, is_option=True)
    """Go on after the model's end tokens."""
    max_tokens: int | None = parameter(16, at_least=1, endless=True, is_option=True)
    """Most tokens to generate; default: max_new_tokens of the model's generation_config.json, else
    100, and 1024 in `tpengine chat`; `tpengine client chat` always asks for 1024.

    None: as many as the model's length allows."""
    min_tokens: int = parameter(0, at_least=0, endless=True)
    """No end token and no stop before this many output tokens. An output whose
    constraint is complete earlier, so that nothing else may follow, ends there."""
    logprobs: int | bool | None = parameter(None, at_least=WHOLE_VOCABULARY)
    """Report this many most likely tokens at each position, and the chosen one, with log
    probabilities of the raw logits. -1: the whole vocabulary; True becomes 1. The engine's
    `max_logprobs` bounds it."""
    prompt_logprobs: int | bool | None = parameter(None, at_least=WHOLE_VOCABULARY)
    """The same for each token of the prompt, given the tokens before it; such a request computes
    its whole prompt and does not use the prefix cache."""
    detokenize: bool = parameter(True)
    """Whether to produce text; without it `stop` cannot be used."""
    skip_special_tokens: bool = parameter(True)
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = parameter(True)
    """False is refused for a tokenizer written in Python, and has no effect on the text of any
    other."""
    logits_processors: list[LogitsProcessor | str] | Any | None = parameter(
        None, read=_read_processors, doors=()
    )
    """Functions that edit the logits before all else, or one such function. They are called with
    the output ids and the logits `[vocab_size]` of one position, or, with three parameters, with
    prompt ids, output ids and logits; they return the new logits. One that fails ends its request
    with finish reason error. Ranks in other processes get a pickled copy (cloudpickle, at most
    1 MiB), anew after a preemption or a recovery. A name "module:function" is imported on every
    rank instead. They are code that a server would run: they work offline only."""
    truncate_prompt_tokens: int | None = parameter(None, at_least=1, endless=True)
    """Only this many last tokens of the prompt are used."""
    _: KW_ONLY
    output_kind: RequestOutputKind = parameter(RequestOutputKind.CUMULATIVE, doors=())
    """What the engine reports while the request runs."""
    logit_bias: Mapping[int, float] | None = parameter(
        None, at_least=-1_000_000, at_most=1_000_000, max_entries="max_token_rules"
    )
    """Added to the logits of these ids. The limits are far more than logits differ, and far from
    those of float32."""
    allowed_token_ids: list[int] | Any | None = parameter(
        None, at_least=0, max_entries="max_token_rules"
    )
    """No other ids are sampled."""
    bad_words: list[str] | Any = parameter((), max_entries="max_bad_words")
    """Texts that are not generated, with and without a space before them: the token that would
    complete one is never sampled, also if the text begins in the prompt."""
    bad_words_token_ids: list[list[int]] | Any = parameter(
        (), at_least=0, max_entries="max_bad_words", doors=("grpc",)
    )
    """The same, each text as a sequence of ids."""
    visible_token_ids: list[int] | Any = parameter((), at_least=0, doors=())
    """Special tokens that `skip_special_tokens` does not leave out. A server sets it to find calls
    of tools."""
    structured_outputs: StructuredOutputsParams | Any | None = parameter(
        None, read=StructuredOutputsParams.read, metavar="JSON", is_option=True
    )
    """What the output must look like, as in '{"choice": ["yes", "no"]}' or '{"json": SCHEMA}': one
    of json, json_object, regex, choice, grammar and structural_tag (docs/structured.md).

    In Python `StructuredOutputsParams` or a dict of its fields. The model's end tokens end the
    output where the constraint is complete, also with `ignore_eos`. Such an output follows the
    constraint; one with finish reason length is the beginning of an output that does."""

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
        eos_token_id = generation_config.get("eos_token_id")
        if eos_token_id is None or self.ignore_eos:
            return
        end_ids = eos_token_id if isinstance(eos_token_id, Iterable) else [eos_token_id]
        known = {model_eos_token_id, *self.stop_token_ids}
        self.stop_token_ids = [*self.stop_token_ids, *(i for i in end_ids if i not in known)]

    def check(self) -> None:
        """Checks all attributes, after some were assigned, and brings them into the form that they
        have after construction.

        Raises:
            InvalidSamplingParamsError: a value is out of its range; the message has both.
        """
        known = self.__dataclass_fields__.keys()
        for name in vars(self).keys() - known if len(vars(self)) > len(known) else ():
            hint = did_you_mean(name, known)
            raise InvalidSamplingParamsError(f"SamplingParams has no attribute {name!r}{hint}")
        if self.best_of is None:
            self.best_of = self.n
        if self.top_k is None:
            self.top_k = -1
        read_parameters(self)
        if self.seed == -1:
            self.seed = None
        if self.top_k > _MOST_TOKENS:
            self.top_k = -1
        if self.temperature < _EPSILON:
            self.temperature = 0.0
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens = {self.max_tokens}"
            raise _refusal("min_tokens", f"{limit}, got {self.min_tokens}")
        self._check_lists()
        self._check_sequences()
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, -1, 0.0

    def _check_lists(self) -> None:
        """The engine checks that ids are in its vocabulary."""
        if self.stop and not self.detokenize:
            text = "strings need detokenize=True; use stop_token_ids, or drop one of the two"
            raise _refusal("stop", text)
        for text in self.stop:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                hint = "no output contains it; leave it out"
                raise _refusal("stop", f"holds {text!r:.80}, no valid Unicode: {hint}") from error
        if self.allowed_token_ids == []:
            hint = "give at least one id, or None to allow all"
            text = f"is empty, so that nothing could be sampled; {hint}"
            raise _refusal("allowed_token_ids", text)
        for word in self.bad_words:
            if not word.strip():
                raise _refusal("bad_words", f"must hold strings that are not blank, got {word!r}")
        if [] in self.bad_words_token_ids:
            raise _refusal("bad_words_token_ids", "holds an empty sequence")

    def _check_sequences(self) -> None:
        """More than one sequence, and beam search."""
        if self.num_sequences < self.n:
            limit = f"must be at least n = {self.n}"
            raise _refusal("best_of", f"{limit}, got {self.best_of}; None makes it n")
        if not self.use_beam_search:
            if self.greedy and self.num_sequences > 1:
                hint = "set use_beam_search=True, or a temperature above 0"
                same = f"would give the same sequence {self.num_sequences} times"
                raise _refusal("n", f"or best_of at temperature 0 {same}; {hint}")
            if abs(self.length_penalty - 1.0) > _EPSILON:
                only_beams = f"= {self.length_penalty!r} is only for use_beam_search=True"
                raise _refusal("length_penalty", only_beams)
            if self.early_stopping is not False:
                only_beams = f"= {self.early_stopping!r} is only for use_beam_search=True"
                raise _refusal("early_stopping", only_beams)
            return
        if self.num_sequences < 2:
            raise _refusal("use_beam_search", "needs best_of (or n) of at least 2, got 1")
        neutral_values = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": []}
        for name, value in neutral_values.items():
            if getattr(self, name) != value:
                text = f"beam search needs {name} = {value!r}, got {getattr(self, name)!r}"
                raise InvalidSamplingParamsError(text, field=name)


PARAMETERS = parameters(SamplingParams)
"""What each parameter may be, and who reads it."""


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
        why = f"{type(error).__name__}: {error}"
        text = f"the logits processor {processor!r} cannot be imported: {why}"
        raise InvalidSamplingParamsError(text) from error
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
