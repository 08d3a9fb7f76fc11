"""Tools of a chat: the fields of a body, and the grammar that holds a model to a choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpengine.engine.tokenizer import Tokenizer
from tpengine.sampling_params import SamplingParams, StructuredOutputsParams
from tpengine.server.http.fields import FieldError, Fields
from tpengine.server.http.tool_formats import FORMATS, NAME, ToolFormat, ToolParser
from tpengine.structured.schemas import ENDLESS, has_finite_value, without_annotations

MAX_TOOLS = 128
"""Functions of a request, as OpenAI bounds them."""
_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
_FIRST_CALL_LINE = 3
"""In the text of `choice_grammar`; each function has a line."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of arguments in a grammar: that of the templates, which write JSON as Python does."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        definitions: what the template gets.
        names: the functions that may be called.
        form: of the calls.
        visible_token_ids: special tokens around calls.
        grammar: in Lark, of the answer; None: any answer is allowed.
    """

    definitions: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    form: ToolFormat
    visible_token_ids: Sequence[int]
    grammar: str | None

    def parser(self) -> ToolParser:
        """A parser of one answer."""
        return ToolParser(self.form, self.names)

    def at_fault(self, why: str) -> tuple[str, str]:
        """The field at fault, and the reason, from what the library says of the grammar: where it
        is wrong, the reason, and some lines of it."""
        match = re.match(r"at (\d+)\(\d+\): .*?JSON schema: (.*)", why)
        if match is None:
            return "tools", why.partition("\n")[0]
        name = self.names[int(match[1]) - _FIRST_CALL_LINE]
        place = [tool["function"]["name"] for tool in self.definitions].index(name)
        return f"tools[{place}].function.parameters", match[2]

    def apply(self, params: SamplingParams) -> None:
        """Changes the parameters of a request so that calls are found in its text.

        Raises:
            FieldError: a parameter contradicts the tools.
        """
        if params.structured_outputs is not None:
            problem = (
                'cannot be called in an answer of a given form; set tool_choice to "none", or '
                "leave out response_format and structured_outputs"
            )
            raise FieldError("tools", problem)
        if not params.detokenize:
            raise FieldError("detokenize", "must be true: calls of tools are found in the text")
        params.visible_token_ids = list(self.visible_token_ids)
        if self.grammar is not None:
            params.structured_outputs = StructuredOutputsParams(grammar=self.grammar)


def read_tools(fields: Fields, tokenizer: Tokenizer | None) -> Tools | None:
    """Reads the fields of a body that are about tools; None: the model may call none.

    Raises:
        FieldError: one of them cannot be used.
    """
    entries = fields.take("tools", list, [])
    if len(entries) > MAX_TOOLS:
        raise fields.error("tools", f"must be at most {MAX_TOOLS}, got {len(entries)}; send fewer")
    try:
        json.dumps(entries)
    except RecursionError:
        raise fields.error("tools", "is nested too deeply; send simpler schemas") from None
    read = [_read_function(place, entry) for place, entry in enumerate(entries)]
    names = [function["name"] for function, _ in read]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise FieldError(f"tools[{place}].function.name", f"is {name!r}, as an earlier one is")
    is_parallel = fields.take("parallel_tool_calls", bool, True)
    must, allowed = _read_choice(fields.pop("tool_choice", "auto"), names)
    if not allowed:
        return None
    form = find_form(template_text(tokenizer, True))
    added = {} if tokenizer is None else tokenizer.hf.get_added_vocab()
    tokens = {marker: added[marker] for marker in form.markers if marker in added}
    grammar = None
    if must or not is_parallel or any(is_strict for _, is_strict in read):
        schemas = {}
        for place, (function, is_strict) in enumerate(read):
            if function["name"] in allowed:
                schema = function["parameters"] if must or is_strict else {"type": "object"}
                if not has_finite_value(schema):
                    raise FieldError(f"tools[{place}].function.parameters", ENDLESS)
                schemas[function["name"]] = {**without_annotations(schema), "x-guidance": _SPACES}
        grammar = choice_grammar(form, schemas, tokens, must, is_parallel)
    special = () if tokenizer is None else tokenizer.special_token_ids
    visible = [token_id for token_id in tokens.values() if token_id in special]
    shown = [{"type": "function", "function": function} for function, _ in read]
    return Tools(shown, allowed, form, visible, grammar)


def _read_function(place: int, value: object) -> tuple[dict[str, Any], bool]:
    """The function of a tool as templates know it, and whether each call follows its schema."""
    if not isinstance(value, dict):
        raise FieldError(f"tools[{place}]", f"must be an object, got {type(value).__name__}")
    tool = Fields(value, f"tools[{place}].")
    kind = tool.take("type", str, "")
    if kind != "function":
        raise tool.error("type", f"must be 'function', got {kind!r:.80}")
    fields = Fields(tool.take("function", dict, {}), f"tools[{place}].function.")
    name = fields.take("name", str, "")
    if re.fullmatch(NAME, name) is None:
        raise fields.error("name", f"must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {name!r:.80}")
    head = {"description": fields.take("description", str, "")}
    nothing = {"properties": {}, "additionalProperties": False}
    schema = fields.take("parameters", dict, nothing)
    if schema.get("type", "object") != "object":
        raise fields.error("parameters.type", f"must be 'object', got {schema['type']!r:.80}")
    is_strict = fields.take("strict", bool, False)
    return {"name": name, **head, "parameters": {"type": "object", **schema}}, is_strict


def _read_choice(choice: Any, names: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether a function must be called, and the functions that may be."""
    name: str | None = None
    match choice:
        case "auto":
            return False, names
        case "none":
            return False, ()
        case "required":
            pass
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case {"type": "allowed_tools"}:
            problem = "of type allowed_tools is not supported; give only those in tools"
            raise FieldError("tool_choice", problem)
        case _:
            raise FieldError("tool_choice", f"must be {_CHOICES}, got {choice!r:.80}")
    if not names:
        raise FieldError("tool_choice", "needs tools, and there are none")
    if name is not None and name not in names:
        known = ", ".join(names)
        raise FieldError("tool_choice.function.name", f"is {name!r:.80}; tools has {known:.200}")
    return True, names if name is None else [name]


def template_text(tokenizer: Tokenizer | None, has_tools: bool) -> str:
    """The chat template that is used; empty: there is none."""
    template = None if tokenizer is None else tokenizer.hf.chat_template
    if isinstance(template, Mapping):  # transformers chooses by these names
        template = (has_tools and template.get("tool_use")) or template.get("default")
    return template or ""


def find_form(template: str) -> ToolFormat:
    """The form in which a template writes calls."""
    lack = "does not read tools" if template else "is missing"
    if re.search(r"\btools\b", template):
        lack = "writes calls in no form that this server knows"
        for form in FORMATS:
            if re.search(form.sign, template, re.DOTALL):
                return form
    known = "; ".join(entry.description for entry in FORMATS)
    raise FieldError("tools", f"cannot be used: the model's chat template {lack}. Known: {known}")


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
        kinds = {marker: f'<[{token_id}]> " "?' for marker, token_id in tokens.items()}
        return " ".join(kinds.get(part, json.dumps(part)) for part in split if part)

    rules = ["call: " + " | ".join(f"call{place}" for place in range(len(schemas)))]
    for place, (name, schema) in enumerate(schemas.items()):
        before, after = form.call.replace("NAME", name).split("ARGUMENTS")
        rules.append(f"call{place}: {lark(before)} %json {json.dumps(schema)} {lark(after)}")
    more = f"({lark(form.between)} call)*" if is_parallel and form.begin else ""
    rules.append(f"calls: call {more} {lark(form.end)}")
    marker, text, lines = form.markers[0], r"/(?s:.*)/", r"/\n{0,2}/"  # lines after a thought
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


def read_calls(fields: Fields, place: str) -> list[dict[str, Any]]:
    """The calls in a message of the assistant, with their arguments as objects: templates write
    these as JSON. Text that is no JSON object stays text.

    Args:
        place: of the message.

    Raises:
        FieldError: they are no calls of functions.
    """
    calls = []
    for index, item in enumerate(fields.take("tool_calls", list, [])):
        where = f"{place}.tool_calls[{index}]"
        if not isinstance(item, dict):
            raise FieldError(where, f"must be an object, got {type(item).__name__}")
        call = Fields(item, f"{where}.")
        head = {"id": call.take("id", str, ""), "type": call.take("type", str, "function")}
        if call.has("custom"):
            raise call.error("custom", "is no call of a function; give function")
        function = Fields(call.take("function", dict, {}), f"{where}.function.")
        name, text = function.take("name", str, ""), function.take("arguments", str, "")
        if not name:
            raise function.error("name", "is missing")
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = text
        arguments = value if isinstance(value, dict) else text
        calls.append({**head, "function": {"name": name, "arguments": arguments}})
    return calls
