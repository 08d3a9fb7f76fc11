"""The forms in which models write calls of tools, and the parser that finds them in an answer."""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a function."""
_SPACE = re.compile(r"[ \t\r\n]*")
_SHORT_ID = 9
_Pattern: TypeAlias = Sequence[str | re.Pattern[str]]


def _patterns(*texts: str) -> list[_Pattern]:
    """Patterns of texts in which a space stands for any white space, and NAME for a name."""
    kinds = {" ": _SPACE, "NAME": NAME}
    return [[kinds.get(one, one) for one in re.split("( |NAME)", text) if one] for text in texts]


def _json_calls(key: str, *befores: str) -> list[_Pattern]:
    """Patterns of a call in JSON, up to the brace that opens its arguments.

    Args:
        key: of the arguments.
        befores: what stands before it.
    """
    rest = f'"name" : "NAME" , "{key}" : {{'
    kinds = ("{ ", '{ "type" : "function" , ')
    return _patterns(*(before + kind + rest for before in befores for kind in kinds))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls.

    A grammar writes the texts `begin`, `call`, `between` and `end`, which are those of the models'
    templates; NAME and ARGUMENTS in `call` stand for those. The parser follows the
    patterns, which allow more. The pattern of a call ends with the brace that opens its arguments.

    Attributes:
        about: for people.
        sign: is found in the templates of models that write this form.
        markers: texts around calls, which are special tokens in many tokenizers. In the middle of
            an answer a call begins with the first one.
        begin, between, end: before, between and after calls. If `begin` is empty, an answer that is
            a call has no marker, and a grammar allows one call.
        call: one call.
        first: patterns of the first call.
        following: patterns of a further call, and of what may stand after the last one.
        closing: patterns of what follows the arguments.
        has_short_ids: whether the template wants ids of nine letters and digits.
    """

    about: str
    sign: re.Pattern[str]
    markers: Sequence[str]
    begin: str
    call: str
    between: str
    end: str
    first: Sequence[_Pattern]
    following: Sequence[_Pattern]
    closing: Sequence[_Pattern]
    has_short_ids: bool = False


_MISTRAL = ("[TOOL_CALLS] NAME [ARGS] {", "[TOOL_CALLS] NAME [CALL_ID] NAME [ARGS] {")
_TAG = "<|python_tag|>"
FORMATS = (
    ToolFormat(
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen)',
        # Other models write XML or pairs between the same tags.
        re.compile(r"(?s)\A(?!.*(?:<function=|<arg_key>)).*<tool_call>"),
        ("<tool_call>", "</tool_call>"),
        begin="<tool_call>",
        call='\n{"name": "NAME", "arguments": ARGUMENTS}\n',
        between="</tool_call>\n<tool_call>",
        end="</tool_call>",
        first=_json_calls("arguments", " <tool_call> "),
        following=_json_calls("arguments", " <tool_call> "),
        closing=_patterns(" } </tool_call>"),
    ),
    ToolFormat(
        f'{{"name": ..., "parameters": {{...}}}}, alone or after {_TAG} (Llama 3)',
        re.compile(r'(?s)(?=.*"parameters\\?":).*(?:ipython|<\|python_tag\|>)'),
        (_TAG,),
        begin="",
        call='{"name": "NAME", "parameters": ARGUMENTS}',
        between="",
        end="",
        first=_json_calls("parameters", " ", f" {_TAG} "),
        following=_json_calls("parameters", " ", " ; ", f" {_TAG} ", f" ; {_TAG} "),
        closing=_patterns(" }"),
    ),
    ToolFormat(
        "[TOOL_CALLS]name[ARGS]{...} (Mistral since 2025)",
        re.compile(r"(?s)(?=.*\[ARGS\]).*\[TOOL_CALLS\]"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        begin="[TOOL_CALLS]",
        call="NAME[ARGS]ARGUMENTS",
        between="[TOOL_CALLS]",
        end="",
        first=_patterns(*(f" {one}" for one in _MISTRAL)),
        following=_patterns(*(f" {one}" for one in _MISTRAL)),
        closing=_patterns(""),
        has_short_ids=True,
    ),
    ToolFormat(
        '[TOOL_CALLS][{"name": ..., "arguments": {...}}] (Mistral)',
        re.compile(r"\[TOOL_CALLS\]"),
        ("[TOOL_CALLS]",),
        begin="[TOOL_CALLS][",
        call='{"name": "NAME", "arguments": ARGUMENTS}',
        between=", ",
        end="]",
        first=_json_calls("arguments", " [TOOL_CALLS] [ "),
        following=[*_json_calls("arguments", " , "), *_patterns(" ]")],
        closing=_patterns(" }", ' , "id" : "NAME" }'),
        has_short_ids=True,
    ),
)
"""The known forms. A model's is the first one whose sign its template has."""


class _Fit(enum.IntEnum):
    """How much of a pattern a text has."""

    NO = 0
    BEGINS = 1
    """The text ends within the pattern."""
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class _Found:
    """How a text fits a pattern.

    Attributes:
        start, end: where the pattern begins in the text and, if it is whole, ends.
        name: the first name in it; None: it has none.
    """

    fit: _Fit
    start: int = 0
    end: int = 0
    name: str | None = None


def _follow(pattern: _Pattern, text: str, start: int) -> _Found:
    name, at = None, start
    for part in pattern:
        if isinstance(part, str):
            if not text.startswith(part, at):
                begins = part.startswith(text[at : at + len(part)])
                return _Found(_Fit.BEGINS if begins else _Fit.NO, start)
            at += len(part)
            continue
        match = part.match(text, at)
        if match is None:
            return _Found(_Fit.BEGINS if at == len(text) else _Fit.NO, start)
        if part is NAME and name is None:
            name = match[0]
        at = match.end()
    return _Found(_Fit.WHOLE, start, at, name)


class _Place(enum.Enum):
    """What the next character of an answer belongs to."""

    START = enum.auto()
    """Text or a call; there was nothing but white space."""
    TEXT = enum.auto()
    ARGUMENTS = enum.auto()
    CLOSING = enum.auto()
    """The end of a call, after its arguments."""
    AFTER = enum.auto()
    """Another call, or text; there was nothing but white space after the last call."""


class ToolParser:
    """Finds the calls in the text of one answer as it grows.

    What is no call of a known function is text, also if it begins like one. Text that may be the
    beginning of a call is held back. The result does not depend on where the text is cut.

    Args:
        form: of the calls.
        names: the functions that may be called.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._place = _Place.START
        self._held = ""
        self._num_calls = 0
        self._depth = 0  # of braces in the arguments
        self._in_string = self._is_escaped = False

    def finish_reason(self, reason: str) -> str:
        """The reason that OpenAI's clients expect, from that of the engine."""
        has_calls = self._num_calls > 0 and self._place is not _Place.ARGUMENTS
        return "tool_calls" if has_calls and reason == "stop" else reason

    def take(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Takes the next piece of the answer.

        Args:
            is_last: no more text comes; nothing is held back.

        Returns:
            Text outside calls; and what each call gains, in the form of a stream's `tool_calls`.
        """
        text, self._held = self._held + text, ""
        content, gains = "", list[dict[str, Any]]()
        while text:
            if self._place is _Place.ARGUMENTS:
                end = self._end_of_arguments(text)
                self._gain(gains, text[:end])
                text = text[end:]
                continue
            found = self._find(text)
            if found.fit is _Fit.WHOLE:
                content += text[: found.start]
                text = text[found.end :]
                if found.name is None or self._place is _Place.CLOSING:
                    self._place = _Place.AFTER
                else:
                    self._place = _Place.ARGUMENTS
                    self._begin(gains, found.name)
                    text = "{" + text
            elif found.fit is _Fit.BEGINS and not is_last:
                content += text[: found.start]
                self._held, text = text[found.start :], ""
            elif found.fit is _Fit.NO and self._place is not _Place.TEXT:
                self._place = _Place.TEXT  # look again, for a call in the middle
            else:
                is_space = self._place is _Place.AFTER and text.isspace()
                if self._place is not _Place.CLOSING and not is_space:
                    content += text
                text = ""
        return content, gains

    def _find(self, text: str) -> _Found:
        """The first place that fits what may come."""
        form = self._form
        patterns = {_Place.CLOSING: form.closing, _Place.AFTER: form.following}
        if self._place is not _Place.TEXT:
            return self._fit(patterns.get(self._place, form.first), text, 0)
        at = text.find(form.markers[0][0])
        while at >= 0:
            found = self._fit(form.first, text, at)
            if found.fit is not _Fit.NO:
                return found
            at = text.find(form.markers[0][0], at + 1)
        return _Found(_Fit.NO)

    def _fit(self, patterns: Sequence[_Pattern], text: str, start: int) -> _Found:
        found = max((_follow(one, text, start) for one in patterns), key=lambda one: one.fit)
        is_call = found.name is not None and self._place is not _Place.CLOSING
        return _Found(_Fit.NO) if is_call and found.name not in self._names else found

    def _begin(self, gains: list[dict[str, Any]], name: str) -> None:
        own_id = uuid.uuid4().hex
        own_id = own_id[:_SHORT_ID] if self._form.has_short_ids else f"call_{own_id}"
        function = {"name": name, "arguments": ""}
        gains.append(
            {"index": self._num_calls, "id": own_id, "type": "function", "function": function}
        )
        self._num_calls += 1

    def _gain(self, gains: list[dict[str, Any]], arguments: str) -> None:
        """Adds to the arguments of the last call."""
        if not gains:
            gains.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
        gains[-1]["function"]["arguments"] += arguments

    def _end_of_arguments(self, text: str) -> int:
        """Number of characters that belong to the arguments."""
        for at, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._is_escaped = char == "\\"
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    self._place = _Place.CLOSING
                    return at + 1
        return len(text)
