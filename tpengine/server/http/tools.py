"""Tools of a chat: the fields of a body, and the grammar that holds a model to a choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpengine.engine.tokenizer import Tokenizer
from tpengine.sampling_params import SamplingParams
from tpengine.server.http.fields import FieldError, Fields
from tpengine.server.http.tool_formats import FORMATS, NAME, ToolFormat, ToolParser
from tpengine.structured_outputs import StructuredOutputsParams, schema_fault

MAX_TOOLS = 128
"""Functions of a request, as OpenAI bounds them."""
_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of arguments in a grammar: that of the templates, which write JSON as Python does."""
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        given: what the template gets.
        names: the functions that may be called.
        form: of the calls.
        visible_token_ids: special tokens around calls.
        grammar: in Lark, of the answer; None: any answer is allowed.
    """

    given: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    form: ToolFormat
    visible_token_ids: Sequence[int]
    grammar: str | None

    def parser(self) -> ToolParser:
        """A parser of one answer."""
        return ToolParser(self.form, self.names)

    def apply(self, params: SamplingParams, max_grammar_bytes: int) -> None:
        """Changes the parameters of a request so that calls are found in its text.

        Args:
            max_grammar_bytes: see `Limits`.

        Raises:
            FieldError: a parameter contradicts the tools, or the grammar is too large.
        """
        if params.structured_outputs is not None:
            raise FieldError(
                "tools",
                'cannot be called in an answer of a given form; set tool_choice to "none", or '
                "leave out response_format and structured_outputs",
            )
        if not params.detokenize:
            raise FieldError("detokenize", "must be true: calls of tools are found in the text")
        params.visible_token_ids = list(self.visible_token_ids)
        if self.grammar is not None:
            size = len(self.grammar) * params.num_sequences
            if size > max_grammar_bytes:
                raise FieldError(
                    "tools",
                    f"need a grammar of {size} bytes, for {params.num_sequences} sequences, and it "
                    f"may have {max_grammar_bytes}; send fewer tools, or shorter schemas",
                )
            params.structured_outputs = StructuredOutputsParams(grammar=self.grammar)


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that a model may call.

    Attributes:
        parameters: a JSON schema of its arguments.
        is_strict: whether each call follows it.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    is_strict: bool

    def for_template(self) -> dict[str, Any]:
        """The tool as templates know it."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": self.parameters}
        return {"type": "function", "function": function}


def read_calls(fields: Fields, place: str) -> list[dict[str, Any]]:
    """The calls in a message of the assistant, with arguments as text.

    Args:
        place: of the message.

    Raises:
        FieldError: they are no calls of functions.
    """
    calls = []
    for index, one in enumerate(fields.take("tool_calls", list, [])):
        where = f"{place}.tool_calls[{index}]"
        if not isinstance(one, dict):
            raise FieldError(where, f"must be an object, got {type(one).__name__}")
        call = Fields(one, f"{where}.")
        call.take("index", int, 0)  # from a stream; the order says it
        kind = call.take("type", str, "function")
        if kind != "function":
            raise call.error("type", f"must be 'function', got {kind!r:.80}")
        function = Fields(call.take("function", dict, {}), f"{where}.function.")
        about = {name: function.take(name, str, "") for name in ("name", "arguments")}
        if NAME.fullmatch(about["name"]) is None:
            raise function.error("name", f"is no name of a function: {about['name']!r:.80}")
        calls.append({"id": call.take("id", str, ""), "type": kind, "function": about})
        function.end()
        call.end()
    return calls


def arguments_as_objects(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls with arguments as objects, which templates write as JSON. Text that is no JSON
    object stays text."""
    changed = []
    for call in calls:
        function = dict(call["function"])
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
        changed.append({**call, "function": function})
    return changed


def template_text(tokenizer: Tokenizer | None, has_tools: bool) -> str:
    """The chat template that is used; empty: there is none."""
    found = None if tokenizer is None else tokenizer.hf.chat_template
    if isinstance(found, Mapping):  # transformers chooses by these names
        found = (has_tools and found.get("tool_use")) or found.get("default")
    return found or ""


def read_tools(fields: Fields, tokenizer: Tokenizer | None) -> Tools | None:
    """Reads the fields of a body that are about tools; None: the model may call none.

    Raises:
        FieldError: one of them cannot be used.
    """
    given = fields.take("tools", list, [])
    if len(given) > MAX_TOOLS:
        raise fields.error("tools", f"must be at most {MAX_TOOLS}, got {len(given)}; send fewer")
    try:
        json.dumps(given)
    except RecursionError:
        raise fields.error("tools", "is nested too deeply; send simpler schemas") from None
    functions = [_read_function(f"tools[{place}]", one) for place, one in enumerate(given)]
    names = [one.name for one in functions]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise FieldError(f"tools[{place}].function.name", f"is {name!r}, as an earlier one is")
    is_parallel = fields.take("parallel_tool_calls", bool, True)
    choice, allowed = _read_choice(fields.left.pop("tool_choice", None), names)
    if choice == "none" or not functions:
        return None
    form = _find_form(template_text(tokenizer, True))
    tokens, special_ids = {}, frozenset[int]()
    if tokenizer is not None:  # it is not, because it has a template
        added = tokenizer.hf.get_added_vocab()
        tokens = {marker: added[marker] for marker in form.markers if marker in added}
        special_ids = tokenizer.special_token_ids
    must = choice == "required"
    grammar = None
    if must or not is_parallel or any(one.is_strict for one in functions):
        schemas = {
            one.name: _held_schema(place, one) if must or one.is_strict else _ANY_OBJECT
            for place, one in enumerate(functions)
            if one.name in allowed
        }
        grammar = choice_grammar(form, schemas, tokens, must, is_parallel)
    visible = [one for one in tokens.values() if one in special_ids]
    return Tools([one.for_template() for one in functions], allowed, form, visible, grammar)


def _read_function(place: str, given: object) -> _Function:
    """A function of a tool.

    Args:
        place: of the tool.
    """
    if not isinstance(given, dict):
        raise FieldError(place, f"must be an object, got {type(given).__name__}")
    tool = Fields(given, f"{place}.")
    kind = tool.take("type", str, "")
    if kind != "function":
        raise tool.error("type", f"must be 'function', got {kind!r:.80}")
    fields = Fields(tool.take("function", dict, {}), f"{place}.function.")
    tool.end()
    name = fields.take("name", str, "")
    if NAME.fullmatch(name) is None:
        raise fields.error("name", f"must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {name!r:.80}")
    description = fields.take("description", str, "")
    parameters = fields.take("parameters", dict, {})
    if parameters.get("type", "object") != "object":
        raise fields.error("parameters.type", f"must be 'object', got {parameters['type']!r:.80}")
    is_strict = fields.take("strict", bool, False)
    fields.end()
    parameters = {"type": "object", **({} if parameters else {"properties": {}}), **parameters}
    return _Function(name, description or None, parameters, is_strict)


def _read_choice(given: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The choice as auto, none or required; and the functions that may be called."""
    name: str | None = None
    match given:
        case None | "auto" | "none":
            return str(given or "auto"), names
        case "required":
            pass
        case {"type": "allowed_tools"}:
            problem = "of type allowed_tools is not supported; give only those in tools"
            raise FieldError("tool_choice", problem)
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case _:
            raise FieldError("tool_choice", f"must be {_CHOICES}, got {given!r:.80}")
    if not names:
        raise FieldError("tool_choice", "needs tools, and there are none")
    if name is not None and name not in names:
        known = ", ".join(names)
        raise FieldError("tool_choice.function.name", f"is {name!r:.80}; tools has {known:.200}")
    return "required", names if name is None else [name]


def _find_form(template: str) -> ToolFormat:
    """The form of calls in which a template writes them."""
    has_tools = re.search(r"\btools\b", template) is not None
    found = (one for one in FORMATS if has_tools and one.sign.search(template))
    form = next(found, None)
    if form is not None:
        return form
    lack = "writes calls in no form that this server knows" if has_tools else "does not read tools"
    if not template:
        lack = "is missing"
    known = "; ".join(one.about for one in FORMATS)
    raise FieldError("tools", f"cannot be used: the model's chat template {lack}. Known: {known}")


def _held_schema(place: int, function: _Function) -> Mapping[str, Any]:
    """The schema of arguments for a grammar."""
    fault = schema_fault(function.parameters)
    if fault:
        where = f"tools[{place}].function.parameters"
        raise FieldError(where, f"cannot be held by a grammar: {fault:.300}")
    return function.parameters


def choice_grammar(
    form: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, int],
    must: bool,
    is_parallel: bool,
) -> str:
    """The grammar of an answer that calls tools, in Lark.

    Args:
        schemas: of the arguments, by function.
        tokens: ids of the markers that are tokens of their own, which no text matches.
        must: whether the answer is calls; else it is text, and may end with calls.
        is_parallel: whether more than one call is allowed.
    """

    def lark(text: str) -> str:
        split = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        # Some tokenizers put a space before what follows a token.
        parts = [
            f'<[{tokens[one]}]> " "?' if one in tokens else json.dumps(one) for one in split if one
        ]
        return " ".join(parts)

    rules = []
    for place, (name, schema) in enumerate(schemas.items()):
        before, after = form.call.replace("NAME", name).split("ARGUMENTS")
        arguments = json.dumps({**schema, "x-guidance": _SPACES})
        rules.append(f"call{place}: {lark(before)} %json {arguments} {lark(after)}")
    rules.append("call: " + " | ".join(f"call{place}" for place in range(len(schemas))))
    has_more = is_parallel and form.begin
    rules.append("calls: call " + (f"({lark(form.between)} call)* " if has_more else ""))
    rules[-1] += lark(form.end)
    marker, text = form.markers[0], r"/(?s:.*)/"
    lines = r"/\n{0,2}/"  # after a thought
    if must:
        start = f"{lines} {lark(form.begin)} calls"
    elif not form.begin:
        text = r"/\s*([^{\s](?s:.*))?/"
        start = f"TEXT | {lines} calls" + (f" | {lark(marker)} calls" if marker in tokens else "")
    elif marker in tokens:
        start = f"TEXT | TEXT {lark(form.begin)} calls"
    else:
        start = "TEXT | opening calls"
        rules.append(f"opening[lazy]: TEXT {lark(form.begin)}")
    return "\n".join([f"start: {start}", *rules, f"TEXT: {text}", ""])
