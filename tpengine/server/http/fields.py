"""The fields of a body: each is read, has no effect and is accepted, or is refused by its name.

docs/openai.md lists them. A null is the same as no field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tpengine.errors import InvalidSamplingParamsError, RequestError, did_you_mean
from tpengine.options import WrongValueError
from tpengine.sampling_params import StructuredOutputsParams

Value = TypeVar("Value")

NO_EFFECT: Mapping[str, Sequence[Any] | None] = {
    # fields: the values that change nothing here; None: all
    "user metadata safety_identifier service_tier store verbosity prediction": None,
    "prompt_cache_key prompt_cache_options prompt_cache_retention": None,
    "return_tokens_as_token_ids return_token_strs": (False,),
    "include_reasoning": (True,),
    "suffix cache_salt": ("",),
    "tools functions documents logits_processors": ([],),
    "tool_choice function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "reasoning_effort thinking_token_budget audio moderation web_search_options": ("none",),
    "kv_transfer_params vllm_xargs mm_processor_kwargs": ({},),
}
REFUSED: Mapping[str, str] = {
    # fields: what to do instead
    "suffix": "put the text before the gap into prompt",
    "tools tool_choice parallel_tool_calls": "it is for /v1/chat/completions",
    "functions function_call": "give tools and tool_choice instead",
    "tool_calls": "it is a field of messages of the role assistant",
    "tool_call_id": "it is a field of messages of the role tool",
    "guided_json guided_regex guided_choice guided_grammar": "give structured_outputs instead",
    "reasoning_effort": "it is for /v1/chat/completions",
    "reasoning thinking enable_thinking thinking_token_budget": (
        "give reasoning_effort, or the template's own chat_template_kwargs"
    ),
    "include_reasoning": "leave it out; reasoning has a field of its own",
    "modalities audio": "ask for text, which every answer is",
    "moderation web_search_options": "leave it out; the answer comes from the model alone",
    "documents": "put them into messages",
    "chat_template": "the model's own is used; chat_template_kwargs are its arguments",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "prompt_embeds mm_processor_kwargs": "leave it out; this engine reads text and token ids",
    "return_tokens_as_token_ids return_token_strs": "ask for ids; /detokenize gives their text",
    "cache_salt kv_transfer_params vllm_xargs": "leave it out",
    "top_logprobs": "give logprobs a number",
    "max_completion_tokens": "use max_tokens",
    "echo": "it is for /v1/completions",
}
KINDS = {
    bool: "true or false", int: "an integer", str: "a text", list: "a list", dict: "an object",
}  # fmt: skip


class FieldError(RequestError):
    """A field of a body cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}", field=field)


class Fields:
    """The fields of a JSON object that have not been read yet.

    Args:
        place: of the object, with a dot at the end; empty: the body.

    Attributes:
        left: by name.
        known: the names that the reader has asked for.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.left = {name: value for name, value in values.items() if value is not None}
        self.known: list[str] = []
        self._place = place

    def has(self, name: str) -> bool:
        """Whether a field is left."""
        self.known.append(name)
        return name in self.left

    def pop(self, name: str, default: Any = None) -> Any:
        """Reads a field of any type."""
        self.known.append(name)
        return self.left.pop(name, default)

    def take(self, name: str, kind: type[Value], default: Value) -> Value:
        """Reads a field of one type.

        Raises:
            FieldError: it has another type.
        """
        value: Any = self.pop(name, default)
        if kind is int:
            value = whole(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"must be {KINDS[kind]}, got {type(value).__name__}")
        return value

    def error(self, name: str, problem: str) -> FieldError:
        """The error about a field."""
        return FieldError(f"{self._place}{name[:80]}", problem)

    def end(self, is_call: bool = False) -> None:
        """Refuses what is left.

        Args:
            is_call: whether it is the body of a call to a model, in which `NO_EFFECT` holds.

        Raises:
            FieldError: a field is left, and could have an effect.
        """
        for name, value in self.left.items():
            harmless = _find(name, NO_EFFECT, ()) if is_call else ()
            if harmless is None or value in harmless:
                continue
            advice = _find(name, REFUSED, None)
            if advice is not None:
                works = " or ".join(json.dumps(value) for value in harmless)
                problem = f"may only be {works}" if works else "is not supported"
                raise self.error(name, f"{problem}: {advice}")
            hint = did_you_mean(name[:80], self.known if is_call else ())
            raise self.error(name, f"is not a field that this server knows{hint}")


def _find(name: str, table: Mapping[str, Value], default: Value) -> Value:
    return next((value for key, value in table.items() if name in key.split()), default)


def whole(value: Any) -> Any:
    """A number without a fraction as an integer, also in lists: JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [whole(item) for item in value]
    return value


def read_bias(value: object) -> object:
    """A bias by id; in JSON the ids are texts.

    Raises:
        FieldError: a key is no integer.
    """
    try:
        return {int(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
    except ValueError:
        raise FieldError("logit_bias", "must have ids as keys, in decimal digits") from None


def read_constraint(fields: Fields) -> StructuredOutputsParams | None:
    """What the output must look like, by `response_format` or `structured_outputs`; None: anything.

    Raises:
        FieldError: both are given, or one is no constraint.
    """
    constraint: Any = fields.take("structured_outputs", dict, {})
    form = Fields(fields.take("response_format", dict, {"type": "text"}), "response_format.")
    kind = form.take("type", str, "")
    name = "structured_outputs"
    if kind == "text":
        form.end()
    elif constraint:
        raise FieldError(name, "and response_format are given; leave one of them out")
    else:
        name, constraint = "response_format", _read_format(form, kind)
    if not constraint:
        return None
    try:
        return StructuredOutputsParams.read(constraint)
    except WrongValueError as error:
        raise FieldError(name, str(error).strip()) from None
    except InvalidSamplingParamsError as error:
        raise FieldError(name, f"cannot be used: {error}") from None


def _read_format(form: Fields, kind: str) -> dict[str, Any]:
    """The fields of `StructuredOutputsParams` for a `response_format` that is not text."""
    if kind == "json_object":
        form.end()
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": {"type": kind, **form.left}}
    if kind != "json_schema":
        known = "text, json_object, json_schema or structural_tag"
        raise form.error("type", f"must be {known}, got {kind[:80]!r}")
    inner = Fields(form.take("json_schema", dict, {}), "response_format.json_schema.")
    form.end()
    for name, value_type in (("name", str), ("description", str), ("strict", bool)):
        inner.take(name, value_type, value_type())  # the schema is always held
    if not inner.has("schema"):
        raise inner.error("schema", "is missing")
    schema = inner.take("schema", dict, {})
    inner.end()
    return {"json": schema}
