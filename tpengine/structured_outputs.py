"""`StructuredOutputsParams`: what the output of a request must look like; and its grammar."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpengine.errors import InvalidSamplingParamsError

THINK_OPENING, THINK_CLOSING = "<think>", "</think>"
"""The tags around a model's reasoning, which comes before its answer."""
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NAME = "structured_outputs"
_WHITESPACE = r"( |\n[ \t]{0,32})"
"""White space between the parts of JSON: one space, or a line break and an indentation. With any
number of them a model may write nothing else."""


class Thinking(enum.Enum):
    """Whether an output may begin with free text between think tags, before its grammar."""

    NONE = enum.auto()
    ALLOWED = enum.auto()
    BEGUN = enum.auto()
    """The prompt ends with the opening tag."""


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
        given = self._given()
        if len(given) != 1:
            raise InvalidSamplingParamsError(
                f"{_NAME} needs exactly one of {', '.join(_CONSTRAINTS)}, got "
                f"{' and '.join(given) or 'none of them'}"
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

    def _given(self) -> list[str]:
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

    def to_grammar(self, thinking: Thinking, special_tokens: Sequence[str]) -> str:
        """Returns the constraint in the JSON that llguidance compiles.

        Args:
            special_tokens: texts of the tokens that are no text of the output.

        Raises:
            InvalidSamplingParamsError: it is not written as its kind demands. Most faults are found
                when the grammar is compiled.
        """
        try:
            grammar = self._read_grammar()
        except InvalidSamplingParamsError:
            raise
        except Exception as error:  # the converters of the library raise errors of several types
            told = f"{_NAME}.{self._given()[0]} cannot be read: {error!s:.300}"
            raise InvalidSamplingParamsError(told) from error
        if thinking is not Thinking.NONE:
            lark = _thinking_grammar(thinking, THINK_CLOSING in special_tokens)
            first, *rest = grammar["grammars"]
            named = {**first, "name": "answer"}
            grammar = {"grammars": [{"lark_grammar": lark}, named, *rest]}
        return json.dumps(grammar)

    def _read_grammar(self) -> dict[str, Any]:
        from llguidance import LLMatcher, StructTag
        from llguidance.gbnf_to_lark import any_to_lark

        if self.json is not None or self.json_object:
            options: Any = {"whitespace_pattern": self.whitespace_pattern or _WHITESPACE}
            if self.disable_any_whitespace:
                options = {"whitespace_flexible": False}
            schema = {"type": "object"} if self.json is None else self.json
            return _parsed(LLMatcher.grammar_from_json_schema(schema, defaults=options))
        if self.regex is not None:
            return _parsed(LLMatcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            return _lark("start: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            return _lark(any_to_lark(self.grammar))
        made = StructTag.to_grammar(_read_tags(self.structural_tag), assume_special=False)
        return _parsed(made) if made.startswith("{") else _lark(made)


def guided_options(given: Any) -> StructuredOutputsParams:
    """Reads `guided_options_request` of vLLM 0.5.4: a dict with the fields of
    `GuidedDecodingRequest`, or such an object.

    Raises:
        InvalidSamplingParamsError: it has another type or unknown fields, or see
            `StructuredOutputsParams`.
    """
    if isinstance(given, Mapping):
        try:
            given = GuidedDecodingRequest(**given)
        except TypeError as error:
            raise InvalidSamplingParamsError(f"guided_options_request: {error}") from None
    if not isinstance(given, GuidedDecodingRequest):
        raise InvalidSamplingParamsError(
            f"guided_options_request must be a dict or a GuidedDecodingRequest, got {given!r:.80}"
        )
    return StructuredOutputsParams(
        given.guided_json,
        given.guided_regex,
        given.guided_choice,
        given.guided_grammar,
        given.guided_json_object,
        whitespace_pattern=given.guided_whitespace_pattern,
    )


@dataclass
class GuidedDecodingRequest:
    """The constraint of a request in vLLM 0.5.4; `StructuredOutputsParams` says what the fields
    mean. `guided_decoding_backend` has no effect: there is one, llguidance."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None


LLMGuidedOptions = dict
"""In vLLM 0.5.4 a dict with the fields of `GuidedDecodingRequest`."""


def _thinking_grammar(thinking: Thinking, is_special: bool) -> str:
    """Free text up to the closing tag, and then the rule `answer`.

    Args:
        is_special: whether the tags are special tokens, which no text matches.
    """
    opening, closing, text = THINK_OPENING, THINK_CLOSING, r"/(.|\n)*/"
    if is_special:
        thought = f"thought: {text} {closing}"
    else:
        opening, thought = f'"{opening}"', f'thought[lazy]: {text} "{closing}"'
    if thinking is Thinking.BEGUN:
        return f"start: thought @answer\n{thought}\n"
    return f"start: ({opening} thought)? @answer\n{thought}\n"


def _read_tags(given: Any) -> list[Any]:
    """The tags of a structural tag; see `StructuredOutputsParams`."""
    from llguidance import StructTag

    name = f"{_NAME}.structural_tag"
    if "format" in given:
        raise InvalidSamplingParamsError(
            f"{name} has the field format, which is not served; give structures and triggers"
        )
    try:
        triggers = [str(one) for one in given["triggers"]]
        tags = []
        for one in given["structures"]:
            begin, schema, end = str(one["begin"]), dict(one["schema"]), str(one["end"])
            trigger = next(one for one in triggers if one and begin.startswith(one))
            tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    except (KeyError, TypeError, ValueError, StopIteration):
        tags = []
    if not tags:
        raise InvalidSamplingParamsError(
            f'{name} must have "structures" with begin, schema and end, and "triggers" of which '
            f"each begin starts with one; got {json.dumps(given)[:80]}"
        )
    return tags


def _lark(text: str) -> dict[str, Any]:
    return {"grammars": [{"lark_grammar": text}]}


def _parsed(grammar: str) -> dict[str, Any]:
    return dict(json.loads(grammar))


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
