"""What the output of a request must look like, as a grammar that llguidance compiles.

A wrong form is refused here; what only the compiler sees, by `Vocabulary.matcher` of `grammars.py`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any

from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.structured.schemas import ENDLESS, has_finite_value, without_annotations

THINK_OPENING, THINK_CLOSING = "<think>", "</think>"
"""The tags around a model's reasoning, which comes before its answer."""
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


def to_grammar(
    constraint: StructuredOutputsParams, thinking: Thinking, special_tokens: Sequence[str]
) -> str:
    """Returns a constraint in the JSON that llguidance compiles.

    Args:
        special_tokens: texts of the tokens that are no text of the output.

    Raises:
        InvalidSamplingParamsError: it is not written as its kind demands. Most faults are found
            when the grammar is compiled.
    """
    try:
        grammar = _read_grammar(constraint)
    except InvalidSamplingParamsError:
        raise
    except Exception as error:  # the converters of the library raise errors of several types
        reason = f"{_NAME}.{constraint.kinds[0]} cannot be read: {error!s:.300}"
        raise InvalidSamplingParamsError(reason, field=_NAME) from error
    if thinking is not Thinking.NONE:
        lark = _thinking_grammar(thinking, THINK_CLOSING in special_tokens)
        first, *rest = grammar["grammars"]
        grammar = {"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *rest]}
    return json.dumps(grammar)


def _read_grammar(constraint: StructuredOutputsParams) -> dict[str, Any]:
    from llguidance import LLMatcher, StructTag
    from llguidance.gbnf_to_lark import any_to_lark

    if constraint.json is not None or constraint.json_object:
        options: Any = {"whitespace_pattern": constraint.whitespace_pattern or _WHITESPACE}
        if constraint.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        schema = {"type": "object"} if constraint.json is None else constraint.json
        schema = _plain(schema)
        return _parsed(LLMatcher.grammar_from_json_schema(schema, defaults=options))
    if constraint.regex is not None:
        return _parsed(LLMatcher.grammar_from_regex(constraint.regex))
    if constraint.choice is not None:
        return _lark("start: " + " | ".join(map(json.dumps, constraint.choice)))
    if constraint.grammar is not None:
        return _lark(any_to_lark(constraint.grammar))
    made = StructTag.to_grammar(_read_tags(constraint.structural_tag), assume_special=False)
    return _parsed(made) if made.startswith("{") else _lark(made)


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


def _read_tags(value: Any) -> list[Any]:
    """The tags of a structural tag; see `StructuredOutputsParams`."""
    from llguidance import StructTag

    name = f"{_NAME}.structural_tag"
    if "format" in value:
        raise InvalidSamplingParamsError(
            f"{name} has the field format, which is not served; give structures and triggers",
            field=_NAME,
        )
    try:
        triggers = [str(text) for text in value["triggers"]]
        tags = []
        for item in value["structures"]:
            begin, schema, end = str(item["begin"]), dict(item["schema"]), str(item["end"])
            trigger = next(text for text in triggers if text and begin.startswith(text))
            tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    except (KeyError, TypeError, ValueError, StopIteration):
        tags = []
    if not tags:
        raise InvalidSamplingParamsError(
            f'{name} must have "structures" with begin, schema and end, and "triggers" of which '
            f"each begin starts with one; got {json.dumps(value)[:80]}",
            field=_NAME,
        )
    for tag in tags:
        tag.grammar = _plain(tag.grammar)
    return tags


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as the library takes it."""
    if not has_finite_value(schema):
        raise InvalidSamplingParamsError(f"{_NAME} is refused: a schema {ENDLESS}", field=_NAME)
    return without_annotations(schema)


def _lark(text: str) -> dict[str, Any]:
    return {"grammars": [{"lark_grammar": text}]}


def _parsed(grammar: str) -> dict[str, Any]:
    return dict(json.loads(grammar))
