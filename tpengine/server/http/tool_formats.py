"""The forms in which models write calls of tools, and the parser that finds them in an answer."""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import regex  # unlike `re`, it finds the beginning of a match at the end of a text

NAME = r"[A-Za-z0-9_-]{1,64}"
"""Of a function, as a regular expression."""
_SHORT_ID = 9
_PARTS = {" ": r"[ \t\r\n]{0,64}", "NAME": f"({NAME})", "WORD": NAME}
"""Of a pattern. White space is bounded, and so is what is held back."""


def _pattern(*texts: str) -> Any:
    """A compiled expression for one of several texts, in which a space stands for some white space,
    NAME for the name of a function, which is the only group, and WORD for another one."""
    split = [re.findall("NAME|WORD|.", text) for text in texts]
    parts = [[_PARTS.get(piece, re.escape(piece)) for piece in text] for text in split]
    return regex.compile("|".join(map("".join, parts)))


def _calls(key: str, *befores: str) -> tuple[str, ...]:
    """The beginning of a call in JSON, for `_pattern`.

    Args:
        key: of the arguments.
        befores: what may stand before it.
    """
    rest = f'"name" : "NAME" , "{key}" : {{'
    kinds = ("{ ", '{ "type" : "function" , ')
    return tuple(before + kind + rest for before in befores for kind in kinds)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls.

    A grammar writes the four texts, which are those of the models' templates. The parser follows
    the patterns, which allow more.

    Attributes:
        description: for people.
        sign: is found in the templates of models that write this form.
        markers: texts around calls, which are special tokens in many tokenizers. In the middle of
            an answer a call begins with the first one.
        begin, call, between, end: what is before the calls, each of them, between and after them.
            NAME and ARGUMENTS in `call` stand for those. If `begin` is empty, an answer that is a
            call has no marker, and a grammar allows one call.
        first: the first call, up to the brace that opens its arguments.
        following: the same of a further call; or what may stand after the last one.
        closing: what follows the arguments.
        has_short_ids: whether the template wants ids of nine letters and digits.
    """

    description: str
    sign: str
    markers: tuple[str, ...]
    begin: str
    call: str
    between: str
    end: str
    first: Any
    following: Any
    closing: Any
    has_short_ids: bool = False


_TAG = "<|python_tag|>"
_BEFORE = (" ", f" {_TAG} ")
_TAGGED = _pattern(*_calls("arguments", " <tool_call> "))
_NAMED = _pattern(" [TOOL_CALLS] NAME [ARGS] {", " [TOOL_CALLS] NAME [CALL_ID] WORD [ARGS] {")
FORMATS = (
    ToolFormat(
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen)',
        # Other models write XML or pairs between the same tags.
        r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>",
        ("<tool_call>", "</tool_call>"),
        *("<tool_call>", '\n{"name": "NAME", "arguments": ARGUMENTS}\n'),
        *("</tool_call>\n<tool_call>", "</tool_call>"),
        *(_TAGGED, _TAGGED, _pattern(" } </tool_call>")),
    ),
    ToolFormat(
        f'{{"name": ..., "parameters": {{...}}}}, alone or after {_TAG} (Llama 3)',
        r'(?=.*"parameters\\?":).*(?:ipython|<\|python_tag\|>)',
        (_TAG,),
        *("", '{"name": "NAME", "parameters": ARGUMENTS}', "", ""),
        _pattern(*_calls("parameters", *_BEFORE)),
        _pattern(*_calls("parameters", *_BEFORE, *(f" ;{before}" for before in _BEFORE))),
        _pattern(" }"),
    ),
    ToolFormat(
        "[TOOL_CALLS]name[ARGS]{...} (Mistral since 2025)",
        r"(?=.*\[ARGS\]).*\[TOOL_CALLS\]",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", "[TOOL_CALLS]", ""),
        *(_NAMED, _NAMED, _pattern("")),
        has_short_ids=True,
    ),
    ToolFormat(
        '[TOOL_CALLS][{"name": ..., "arguments": {...}}] (Mistral)',
        r"\[TOOL_CALLS\]",
        ("[TOOL_CALLS]",),
        *("[TOOL_CALLS][", '{"name": "NAME", "arguments": ARGUMENTS}', ", ", "]"),
        _pattern(*_calls("arguments", " [TOOL_CALLS] [ ")),
        _pattern(*_calls("arguments", " , "), " ]"),
        _pattern(" }", ' , "id" : "WORD" }'),
        has_short_ids=True,
    ),
)
"""The known forms. A model's is the first one whose sign its template has."""


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
    beginning of a call is held back. The result does not depend on where the text is cut. Arguments
    end with the brace that closes them; they are not read as JSON, so that a client gets what the
    model wrote, also if it is not valid or not complete.

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
            at, match = self._find(text)
            if match is not None:
                content += text[:at]
                text = text[match.end() :]
                self._place = _Place.AFTER
                if match.lastindex is not None:
                    self._place = _Place.ARGUMENTS
                    self._begin(gains, match[match.lastindex])
                    text = "{" + text
            elif at < len(text) and not is_last:
                content += text[:at]
                text, self._held = "", text[at:]
            elif at == len(text) and self._place is not _Place.TEXT:
                self._place = _Place.TEXT  # look again, for a call in the middle
            else:
                is_space = self._place is _Place.AFTER and text.isspace()
                if self._place is not _Place.CLOSING and not is_space:
                    content += text
                text = ""
        return content, gains

    def _find(self, text: str) -> tuple[int, Any]:
        """Looks for what may come next.

        Returns:
            Where it begins, and the match; None: all of it, or the rest, is not there.
        """
        form, is_inside = self._form, self._place is _Place.TEXT
        patterns = {_Place.CLOSING: form.closing, _Place.AFTER: form.following}
        pattern, marker = patterns.get(self._place, form.first), form.markers[0][0]
        at = text.find(marker) if is_inside else 0
        while at >= 0:
            match = pattern.match(text, at, partial=True)
            if match is not None and match.partial:
                return at, None
            # A call of an unknown function is text.
            if match is not None and (
                match.lastindex is None or match[match.lastindex] in self._names
            ):
                return at, match
            at = text.find(marker, at + 1) if is_inside else -1
        return len(text), None

    def _begin(self, gains: list[dict[str, Any]], name: str) -> None:
        own_id = uuid.uuid4().hex
        own_id = own_id[:_SHORT_ID] if self._form.has_short_ids else f"call_{own_id}"
        call = {"id": own_id, "type": "function", "function": {"name": name, "arguments": ""}}
        gains.append({"index": self._num_calls, **call})
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
