"""Bodies of OpenAI's calls as requests of the engine.

`fields.py` has the fields that are not read.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tpengine.engine.requests import GenerateRequest
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.sampling_params import PARAMETERS, RequestOutputKind, SamplingParams
from tpengine.server import limits
from tpengine.server.auth import Call
from tpengine.server.http.fields import FieldError, Fields, read_bias, read_constraint, whole
from tpengine.server.http.reasoning import THOUGHT_FIELDS
from tpengine.server.http.tools import Tools, read_calls, read_tools, template_text
from tpengine.server.http.write import Style
from tpengine.server.state import ServerState

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat completion may fill the model's length."""
_PARAMETERS = [name for name, spec in PARAMETERS.items() if "http" in spec.doors]
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")
"""Names that templates have for whether the model is to reason."""
_PARTS = ("text", "refusal", "thinking")
"""Types of parts of a message, each with its text in a field of the type's name."""
_ALSO_SAID = ("tool_calls", "function_call", "audio")
"""Fields of a message that are a part of what it says, and are refused where they are not read."""


@contextmanager
def naming_field(
    is_chat: bool, constraint: str = "structured_outputs", tools: Tools | None = None
) -> Iterator[None]:
    """Names the body's field in errors of the engine, which does not know bodies.

    Args:
        constraint: the field of the body that says what the output must look like.
        tools: of the body, if that is their grammar.
    """
    try:
        yield
    except InvalidPromptError as error:
        if error.field in (None, "prompt_token_ids"):
            error.field = "messages" if is_chat else "prompt"
        raise
    except InvalidSamplingParamsError as error:
        if error.field != "structured_outputs" or constraint == error.field:
            raise
        why = str(error).replace(error.field, constraint).removeprefix(f"{constraint} is refused: ")
        if tools is not None:
            constraint, why = tools.at_fault(why)
        raise FieldError(constraint, f"cannot be held by a grammar: {why}") from None


class BodyReader:
    """Reads the body of one call.

    Args:
        is_chat: whether it is a call of /v1/chat/completions.
    """

    def __init__(self, call: Call, is_chat: bool, state: ServerState) -> None:
        self._call = call
        self._is_chat = is_chat
        self._state = state
        self._limits = state.limits
        self._engine = state.loaded_engine()
        self._max_model_len = self._engine.model_config.max_model_len
        self._tokenizer = self._engine.llm_engine.tokenizer
        self._fields = Fields(call.message)

    async def read(self) -> tuple[list[GenerateRequest], Style]:
        """The engine's requests, one for each prompt, without ids; and what the answer has in it. A
        request_id in the body becomes the call's.

        Raises:
            RequestError, EngineError: a field cannot be used, or the server takes no requests.
        """
        fields = self._fields
        common = read_common(fields, self._call, self._state)
        others, path = ("prompt", "") if self._is_chat else ("messages", "chat/")
        if others in fields.left:
            raise fields.error(others, f"is a field of /v1/{path}completions, which this is not")
        special = fields.take("add_special_tokens", bool, not self._is_chat)
        style = self._read_style()
        params = self._read_params(style)
        if style.echo and params.logprobs is not None:
            if self._engine.model_config.encoder is not None:
                text = "does not fit logprobs: a model with an encoder predicts no token of its"
                raise fields.error("echo", f"{text} prompt; leave one of the two out")
            params.prompt_logprobs = max(params.prompt_logprobs or 0, params.logprobs)
        tools = read_tools(fields, self._tokenizer) if self._is_chat else None
        if tools is not None:
            tools.apply(params)
        given_form = self._call.message.get("structured_outputs")
        form = "structured_outputs" if given_form else "response_format"
        if tools is not None:
            form = "tools"
        style = dataclasses.replace(style, logprobs=params.logprobs, tools=tools, constraint=form)
        prompts: Any
        if self._is_chat:
            prompts = [self._read_chat(special, tools)]
        else:
            prompts = read_prompts(fields, "prompt", self._limits.queue.max_requests)
        fields.end(is_call=True)
        with naming_field(self._is_chat, form, tools):
            limits.check_sampling(params, self._limits, self._max_model_len, prompts)
        if not self._is_chat:
            prompts = [await self._prompt(raw, params, special, style.echo) for raw in prompts]
        common["params"] = params
        return [GenerateRequest(**prompt, **common) for prompt in prompts], style

    async def tokenize(self) -> list[int]:
        """The ids of the prompt or the conversation in a body of /tokenize.

        Raises:
            RequestError, EngineError: as `read`.
        """
        fields = self._fields
        self._state.check_open(fields.take("model", str, self._state.model))
        special = fields.take("add_special_tokens", bool, not self._is_chat)
        if self._is_chat:
            chat = self._read_chat(special, read_tools(fields, self._tokenizer))
            fields.end(is_call=True)
            return await self._engine.chat_token_ids(chat["messages"], **chat["chat_options"])
        if not fields.has("prompt"):
            raise FieldError("prompt", "is missing, and so is messages")
        text = fields.take("prompt", str, "")
        fields.end(is_call=True)
        self._state.check_text("prompt", [text])
        return await self._engine.tokenize(text, special)

    def _read_style(self) -> Style:
        fields = self._fields
        streams = fields.take("stream", bool, False)
        options = Fields(fields.take("stream_options", dict, {}), "stream_options.")
        usage = options.take("include_usage", bool, False)
        in_all = options.take("continuous_usage_stats", bool, False)
        options.take("include_obfuscation", bool, False)  # there is none in any case
        options.end()
        n = fields.left.get("n", 1)
        if streams and fields.left.get("best_of", n) != n:
            raise fields.error("best_of", "chooses at the end, which a stream cannot; leave it out")
        if streams and "prompt_logprobs" in fields.left:
            raise fields.error("prompt_logprobs", "is not for a stream; set stream to false")
        echo = not self._is_chat and fields.take("echo", bool, False)
        return Style(
            self._is_chat,
            streams,
            echo,
            echo_only=echo and fields.left.get("max_tokens") == 0,
            prompt_logprobs="prompt_logprobs" in fields.left,
            token_ids=fields.take("return_token_ids", bool, False),
            usage=streams and usage,
            usage_in_all=streams and usage and in_all,
        )

    def _read_params(self, style: Style) -> SamplingParams:
        fields = self._fields
        max_tokens = None if self._is_chat else COMPLETION_TOKENS
        if style.echo_only:
            fields.left["max_tokens"] = 1  # the engine's least; it is not sent
        if self._is_chat:
            self._read_chat_fields()
        constraint = read_constraint(fields)
        values = {name: fields.pop(name) for name in _PARAMETERS if fields.has(name)}
        values["structured_outputs"] = constraint
        for name, bound in self._limits.max_entries().items():
            if isinstance(values.get(name), (list, dict)):
                limits.at_most(f"the number of entries of {name}", len(values[name]), bound, name)
        values = {name: whole(value) for name, value in values.items()}
        if "logit_bias" in values:
            values["logit_bias"] = read_bias(values["logit_bias"])
        if values.get("logprobs") is False:
            del values["logprobs"]
        if values.get("top_k") == 0:
            values["top_k"] = -1  # vLLM's two ways to keep all tokens
        defaults = dict(self._state.sampling)
        if values.get("use_beam_search") is True:  # it does not sample
            defaults = {"temperature": 0.0}
        kind = RequestOutputKind.DELTA if style.streams else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**defaults | {"max_tokens": max_tokens} | values, output_kind=kind)
        if params.max_tokens is None and params.logprobs is not None:
            # As many as the limit allows, so that a client need not know it.
            most = self._limits.max_logprob_entries // (params.logprobs + 1)
            params.max_tokens = max(1, most // params.num_sequences)
        return params

    def _read_chat_fields(self) -> None:
        """Brings fields that only chat completions have into the form of completions."""
        fields = self._fields
        if fields.has("max_completion_tokens"):
            fields.left["max_tokens"] = fields.take("max_completion_tokens", int, 0)
        asks = fields.take("logprobs", bool, False)
        likeliest = fields.take("top_logprobs", int, 0)
        if likeliest < 0:
            raise fields.error("top_logprobs", f"must be at least 0, got {likeliest}")
        if likeliest and not asks:
            raise fields.error("top_logprobs", "needs logprobs = true")
        if asks:
            fields.left["logprobs"] = likeliest

    async def _prompt(
        self, prompt: str | list[int], params: SamplingParams, special: bool, echo: bool
    ) -> dict[str, Any]:
        """The fields of `GenerateRequest` for a prompt, with its text if that is to be repeated."""
        most = params.truncate_prompt_tokens
        text: str | None = None
        if isinstance(prompt, str):
            self._state.check_text("prompt", [prompt])
            if special and not (echo and most is not None):
                return {"prompt": prompt}
            text, prompt = prompt, await self._engine.tokenize(prompt, special)
        if most is not None:
            text, prompt = None, prompt[-most:]
        else:
            self._state.check_num_tokens(len(prompt))
        token_ids: list[int] = whole(prompt)
        if echo and text is None:
            text = await self._engine.detokenize(token_ids, params.skip_special_tokens)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _read_chat(self, special: bool, tools: Tools | None) -> dict[str, Any]:
        """The fields of `GenerateRequest` for a conversation."""
        if special:
            raise FieldError("add_special_tokens", "must be false: the template adds them")
        fields = self._fields
        continues = fields.take("continue_final_message", bool, False)
        adds = fields.take("add_generation_prompt", bool, not continues)
        options = fields.take("chat_template_kwargs", dict, {})
        effort = fields.take("reasoning_effort", str, "")
        if effort not in ("", *_EFFORTS):
            problem = f"must be one of {', '.join(_EFFORTS)}, got {effort[:80]!r}"
            raise fields.error("reasoning_effort", problem)
        if options and self._tokenizer is not None:
            # Names of the server's own arguments to Python's functions.
            apply = self._tokenizer.hf.apply_chat_template
            own = {"self", "messages", "picture_token", *inspect.signature(apply).parameters}
            for name in own & options.keys():
                raise FieldError(f"chat_template_kwargs.{name}", "is the server's; leave it out")
        template = template_text(self._tokenizer, tools is not None)
        messages = self._read_messages(template)
        if effort:
            known = {"reasoning_effort": effort} | dict.fromkeys(_SWITCHES, effort != "none")
            options = {name: known[name] for name in known if name in template} | options
        options = {**options, "add_generation_prompt": adds}
        if tools is not None:
            self._state.check_text("tools", [json.dumps(tools.definitions)])
            options["tools"] = tools.definitions
        if continues:
            options["continue_final_message"] = True
        return {"messages": messages, "chat_options": options}

    def _read_messages(self, template: str) -> list[dict[str, Any]]:
        """Messages, whose contents the engine checks."""
        items = self._fields.take("messages", list, [])
        limits.check_conversation((), len(items), self._limits)
        messages = [_read_message(f"messages[{place}]", item) for place, item in enumerate(items)]
        roles = (message["role"] for message in messages)
        limits.check_conversation(roles, len(items), self._limits)
        self._state.check_text("messages", (text for item in items for text in _texts(item)))
        for place, message in enumerate(messages):
            if message["role"] == "developer" and "developer" not in template:
                message["role"] = "system"  # the older name
            if "tool_calls" in message and "tool_calls" not in template:
                problem = "is not written by the model's chat template; give content alone"
                raise FieldError(f"messages[{place}].tool_calls", problem)
        return messages


def read_common(fields: Fields, call: Call, state: ServerState) -> dict[str, Any]:
    """Takes what every call to a model may have; returns fields of `GenerateRequest`. A request_id
    in the body becomes the call's.

    Raises:
        RequestError, EngineError: a field cannot be used, or the server takes no requests.
    """
    adapter = state.check_open(fields.take("model", str, state.model))
    if fields.has("request_id"):
        call.request_id = fields.take("request_id", str, "")
        limits.check_request_id(call.request_id)
    common = {"priority": fields.take("priority", int, 0), "lora_request": adapter}
    return {**common, "owner": call.client.owner, "deadline": call.deadline}


def read_prompts(fields: Fields, name: str, most: int) -> list[str | list[int]]:
    """The texts, and the lists of ids, whose entries are not checked, of a field.

    Args:
        most: prompts that it may hold.

    Raises:
        FieldError: it holds something else, nothing or too many.
    """
    value = fields.pop(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise FieldError(name, "must be a text, ids, or a list of these; and not empty")
    if not isinstance(value[0], (str, list)):
        return [value]
    if len(value) > most:
        raise FieldError(name, f"holds {len(value)} prompts, more than {most}; send fewer")
    for place, prompt in enumerate(value):
        if not isinstance(prompt, (str, list)):
            kind = type(prompt).__name__
            raise FieldError(f"{name}[{place}]", f"must be a text or ids, got {kind}")
    return value


def _read_message(place: str, value: object) -> dict[str, Any]:
    """A message. Null and empty fields are left out, and so are unknown ones: what a server writes
    into its answers comes back in conversations."""
    if not isinstance(value, dict):
        raise FieldError(place, f"must be an object, got {type(value).__name__}")
    fields = Fields({name: field for name, field in value.items() if field != []}, f"{place}.")
    message: dict[str, Any] = {"role": fields.take("role", str, "")}
    if not message["role"]:
        raise fields.error("role", "is missing")
    if message["role"] in ("assistant", "tool"):
        message["content"] = ""  # a tool may have nothing to say
    if message["role"] == "assistant" and fields.has("tool_calls"):
        message["tool_calls"] = read_calls(fields, place)
    if message["role"] == "tool":
        if not fields.has("tool_call_id"):
            raise fields.error("tool_call_id", "is missing")
        message["tool_call_id"] = fields.take("tool_call_id", str, "")
    if fields.has("name"):
        message["name"] = fields.take("name", str, "")
    thoughts = [fields.take(name, str, "") for name in THOUGHT_FIELDS if fields.has(name)]
    if fields.has("content"):
        content = fields.pop("content")
        message["content"], thought = _without_thoughts(content, f"{place}.content")
        thoughts += [thought] if thought else []
    if thoughts:
        message |= dict.fromkeys(THOUGHT_FIELDS, max(thoughts, key=len))
    fields.left = {name: value for name, value in fields.left.items() if name in _ALSO_SAID}
    fields.end()
    return message


def _without_thoughts(content: Any, place: str) -> tuple[Any, str]:
    """A message's content without parts that are thoughts, and these; some gateways write them."""
    if not isinstance(content, list):
        return content, ""
    rest, thoughts = list[Any](), list[str]()
    for at, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "thinking":
            thoughts.append(Fields(part, f"{place}[{at}].").take("thinking", str, ""))
        else:
            rest.append(part)
    return rest, "\n".join(thoughts)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """All texts of a message that are read, those of its parts and of the arguments of its calls
    too."""
    parts = message.get("content")
    names = ("role", "name", "tool_call_id", "content", *THOUGHT_FIELDS)
    values = [message.get(name) for name in names]
    if isinstance(parts, list):
        values += [part.get(name) for part in parts if isinstance(part, dict) for name in _PARTS]
    calls = message.get("tool_calls") or ()
    values += [(call.get("function") or {}).get("arguments") for call in calls]
    return (text for text in values if isinstance(text, str))
