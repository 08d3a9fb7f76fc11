"""OpenAI's routes that write down speech.

A call is a form with a file. Each part of a long sound is a request of its own. Without a language
the model first says which one it hears in the first part, in one more request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tpengine.async_engine.request_table import unique_id
from tpengine.config import SAMPLING_RATE, EncoderConfig
from tpengine.engine.log_mel import Floats
from tpengine.engine.requests import GenerateRequest
from tpengine.engine.sound_prompts import begin, read_parts
from tpengine.errors import InvalidPromptError
from tpengine.outputs import CompletionOutput
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.server.auth import Call
from tpengine.server.batches import serve_all
from tpengine.server.http.calls import read_form
from tpengine.server.http.endpoints import PATHS, check_task
from tpengine.server.http.fields import FieldError, Fields
from tpengine.server.http.json_text import JsonAnswer
from tpengine.server.http.read import read_common
from tpengine.server.state import ServerState

_TASKS = {"transcriptions": "transcribe", "translations": "translate"}
_FORMS = ("json", "text", "verbose_json")
_NUMBERS: dict[str, Callable[[str], float]] = {"temperature": float, "seed": int, "priority": int}
_MOST_S = 1500.0
"""Of a sound; OpenAI's limit."""
_LONG_AT_ONCE = 4
"""Sounds of many parts that are in memory at a time: one has 96 MB at most."""
_BEFORE = "<|startofprev|>"
"""The token in front of what was said before."""


def sound_routes(state: ServerState) -> list[Route]:
    """The routes. Their errors are the application's to tell.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
    """

    turns = asyncio.Semaphore(_LONG_AT_ONCE)

    async def answer(request: Request, kind: str) -> Response:
        call = await read_form(request)
        check_task(state, kind, request.url.path)
        with state.begun():
            speech = await _read(call, state, _TASKS[kind])
            request.state.request_id = call.request_id
            if len(speech.parts) == 1:
                return await _write(speech, state)
            async with turns:
                speech.parts += await _decode(speech.later)
                return await _write(speech, state)

    return [Route(PATHS[kind][0], partial(answer, kind=kind), methods=["POST"]) for kind in _TASKS]


@dataclass(slots=True)
class _Speech:
    """What a call asks for.

    Attributes:
        parts: of the sound, see `read_parts`; at first two at most.
        later: decodes the other parts.
        language: a key of `SoundConfig.languages`; None: the model is to say it.
        before: ids of what was said before.
        form: of the answer, one of `_FORMS`.
        common: fields of `GenerateRequest`.
    """

    encoder: EncoderConfig
    task: str
    parts: list[Floats]
    later: Iterator[Floats]
    language: str | None
    before: list[int]
    form: str
    params: SamplingParams
    common: dict[str, Any]
    request_id: str

    async def serve(
        self, state: ServerState, parts: list[Floats], token_ids: list[int], params: SamplingParams
    ) -> list[CompletionOutput]:
        """The outputs for parts of the sound and a prompt of the decoder."""

        def ask(part: Floats) -> GenerateRequest:
            data = {"audio": (part, SAMPLING_RATE)}
            prompt: Any = {"prompt_token_ids": token_ids, "multi_modal_data": data}
            request_id = unique_id(self.request_id)
            return GenerateRequest(prompt, request_id=request_id, params=params, **self.common)

        outputs = await serve_all(state, [("file", ask(part)) for part in parts])
        return [output.outputs[0] for output in outputs]


async def _read(call: Call, state: ServerState, task: str) -> _Speech:
    """Reads the fields of a call, and decodes its file.

    Raises:
        RequestError, EngineError: a field cannot be used, or the server takes no requests.
    """
    engine = state.loaded_engine()
    encoder, fields = engine.model_config.encoder, Fields(call.message)
    assert encoder is not None, "`check_task` refuses other models"
    assert encoder.sound is not None, "the same"
    for name in _NUMBERS.keys() & fields.left.keys():
        try:
            fields.left[name] = _NUMBERS[name](fields.take(name, str, ""))
        except ValueError:
            raise FieldError(name, "must be a number") from None
    common = read_common(fields, call, state)
    form = fields.take("response_format", str, "json")
    if form not in _FORMS:
        problem = f"must be one of {', '.join(_FORMS)}, got {form[:80]!r}"
        raise FieldError("response_format", problem)
    if fields.take("stream", str, "false").lower() not in ("false", "0"):
        raise FieldError("stream", "must be false: the answer comes whole")
    language, text = fields.pop("language"), fields.take("prompt", str, "").strip()
    params = SamplingParams(
        temperature=fields.pop("temperature", 0.0),
        seed=fields.pop("seed"),
        max_tokens=None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    file = fields.pop("file")
    if not isinstance(file, bytes):
        raise FieldError("file", "is missing, or has no filename; send the sound as a file")
    fields.end(is_call=True)
    begin(encoder, language, task)  # refuses a language before the sound is decoded
    before = await _ids_before(text, state) if text else []
    reading = read_parts(file, encoder.sound.longest_s, _MOST_S)
    parts = await _decode(islice(reading, 2))
    own = language, before, form, params, common, call.request_id
    return _Speech(encoder, task, parts, reading, *own)


async def _decode(parts: Iterator[Floats]) -> list[Floats]:
    """Decodes parts of a sound, in a thread."""
    try:
        return await asyncio.to_thread(list, parts)
    except InvalidPromptError as error:
        raise FieldError("file", str(error).removeprefix("audio ")) from None


async def _ids_before(text: str, state: ServerState) -> list[int]:
    """The ids of what was said before; of a long text the last ones, as in transformers."""
    engine = state.loaded_engine()
    state.check_text("prompt", [text])
    first = await engine.tokenize(_BEFORE, False)
    if len(first) != 1:
        raise FieldError("prompt", f"is not for this model: its tokenizer has no token {_BEFORE}")
    own = await engine.tokenize(f" {text}", False)
    return first + own[1 - engine.model_config.max_model_len // 2 :]


async def _write(speech: _Speech, state: ServerState) -> Response:
    """Serves a call; returns the answer in the form that it asks for."""
    encoder, sound = speech.encoder, speech.encoder.sound
    assert sound is not None, "`_read` has seen it"
    if speech.language is None and sound.languages:
        by_id = {token_id: name for name, token_id in sound.languages.items()}
        hears = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=list(by_id))
        start = list(encoder.start_token_ids[:1])
        (first,) = await speech.serve(state, speech.parts[:1], start, hears)
        speech.language = by_id[first.token_ids[0]]
    token_ids = speech.before + begin(encoder, speech.language, speech.task)
    outputs = await speech.serve(state, speech.parts, token_ids, speech.params)
    text = "".join(output.text for output in outputs).strip()
    if speech.form == "text":
        return Response(f"{text}\n", media_type="text/plain")
    fields: dict[str, Any] = {"text": text}
    duration_s = sum(map(len, speech.parts)) / SAMPLING_RATE
    if speech.form == "verbose_json":
        language = speech.language or "en"
        fields |= {"task": speech.task, "language": language, "duration": duration_s}
    usage = {"type": "duration", "seconds": math.ceil(duration_s)}
    return JsonAnswer({**fields, "usage": usage})
