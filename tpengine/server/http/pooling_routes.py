"""The routes of a model that embeds, scores or classifies, in the shapes of OpenAI, Jina, Cohere
and vLLM.

The way of a request is that of `openai_routes.py`; `PoolingBody` takes the place of `BodyReader`,
and batches.py adds the requests of a call to the engine.
"""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tpengine.async_engine.request_table import unique_id
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import PoolingParams
from tpengine.outputs import RequestOutput, cosine
from tpengine.sampling_params import SamplingParams
from tpengine.server.auth import Call
from tpengine.server.batches import MAX_INPUTS, naming_input, serve_all
from tpengine.server.http.calls import read_call
from tpengine.server.http.endpoints import PATHS, check_task
from tpengine.server.http.fields import FieldError, Fields, whole
from tpengine.server.http.json_text import JsonAnswer, json_bytes
from tpengine.server.http.read import read_common, read_prompts
from tpengine.server.http.write import Json
from tpengine.server.state import ServerState

_PARAMETERS: dict[str, type] = {
    "normalize": bool,
    "activation": bool,
    "dimensions": int,
    "prompt_name": str,
    "truncate_prompt_tokens": int,
}


class Text(NamedTuple):
    """A text of a body.

    Attributes:
        name: of its field, for errors.
        prompt_name: see `PoolingParams`.
    """

    name: str
    text: str
    prompt_name: str | None = None


class PoolingBody:
    """Reads one body, and serves its requests.

    Attributes:
        call: its `request_id` is that of the body, if that has one.
        pooling: what the model does.
        model: its name in the answer.
        fields: those that have not been read.
    """

    def __init__(self, call: Call, state: ServerState) -> None:
        pooling = state.loaded_engine().model_config.pooling
        assert pooling is not None, "`check_task` refuses the call"
        self.call, self.pooling = call, pooling
        self.fields = Fields(call.message)
        self._state = state
        self._common = read_common(self.fields, call, state)
        adapter = self._common["lora_request"]
        self.model = state.model if adapter is None else adapter.lora_name
        self._common["params"] = SamplingParams()  # made once: it takes longer than the rest
        self._params = PoolingParams()

    def end(self, *parameters: str) -> None:
        """Reads the parameters of all requests, and refuses the fields that are left.

        Args:
            parameters: those of `PoolingParams` that this kind of call has besides
                `truncate_prompt_tokens`.

        Raises:
            RequestError: a parameter has a wrong value, or a field is left.
        """
        fields, names = self.fields, (*parameters, "truncate_prompt_tokens")
        if fields.has("use_activation"):  # vLLM's name of both
            same = "normalize" if "normalize" in parameters else "activation"
            fields.left.setdefault(same, fields.pop("use_activation"))
        present = list(filter(fields.has, names))
        values: dict[str, Any] = {name: fields.take(name, _PARAMETERS[name], 0) for name in present}
        self._params = PoolingParams(**values)
        fields.end(is_call=True)

    async def serve_input(self, *parameters: str) -> list[RequestOutput]:
        """Serves the texts and lists of ids in `input`.

        Args:
            parameters: see `end`.
        """
        value = self.fields.left.get("input")
        prompts = read_prompts(self.fields, "input", MAX_INPUTS)
        names = [f"input[{place}]" for place in range(len(prompts))]
        if prompts[0] is value:
            names = ["input"]
        self.end(*parameters)
        return await self.serve(map(self.request, names, prompts))

    def read_texts(self, name: str, role: str | None = None) -> list[Text]:
        """The texts of a field, which is a text or a list of texts, or of objects with a text.

        Args:
            role: an embedding model's own prompt of this name stands before them, if it has one.

        Raises:
            FieldError: they are something else, none or too many.
        """
        value = self.fields.pop(name)
        if value is None or value == []:
            raise FieldError(name, "is missing, or empty")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_INPUTS:
            raise FieldError(name, f"holds {len(items)} texts, more than {MAX_INPUTS}; send fewer")
        is_known = self.pooling.task == "embed" and role in self.pooling.prompts
        prompt_name = role if is_known else None
        places = [f"{name}[{place}]" for place in range(len(items))] if items is value else [name]
        texts = zip(places, items, strict=True)
        return [Text(place, _text(place, item), prompt_name) for place, item in texts]

    def request(
        self,
        name: str,
        prompt: str | list[int],
        prompt_name: str | None = None,
        second: str | None = None,
    ) -> tuple[str, GenerateRequest]:
        """Returns a request and its name, for `serve`.

        Args:
            name: of the field that errors are about.
            prompt_name: instead of the one in the body.
            second: see `GenerateRequest`.

        Raises:
            RequestIgnoredError: the prompt is too long.
        """
        params, text, token_ids = self._params, None, None
        if prompt_name is not None:
            params = replace(params, prompt_name=prompt_name)
        if isinstance(prompt, str):
            text = prompt
            self._state.check_text(name, [text, second or ""])
        else:
            if params.truncate_prompt_tokens is None:
                with naming_input(name):
                    self._state.check_num_tokens(len(prompt))
            token_ids = whole(prompt)
        own: dict[str, Any] = {"request_id": unique_id(self.call.request_id), "second": second}
        return name, GenerateRequest(text, token_ids, pooling_params=params, **own, **self._common)

    async def serve(self, requests: Iterable[tuple[str, GenerateRequest]]) -> list[RequestOutput]:
        """Serves requests; see `serve_all`."""
        return await serve_all(self._state, requests)


def _text(name: str, item: Any) -> str:
    if isinstance(item, dict):
        fields = Fields(item, f"{name}.")
        item = fields.take("text", str, "")
        fields.end()
    if not isinstance(item, str):
        raise FieldError(name, f"must be a text, or an object with text, got {type(item).__name__}")
    return item


Item = TypeVar("Item")
_ITEMS_A_TURN = 16
"""Embeddings that are compared or written, in some milliseconds, before other tasks of the event
loop run."""
_MAX_PAIRED = 16 << 20
"""Characters of all pairs of a call: a text that stands in many pairs is tokenized for each."""
_PAIRS = (("text_1", "text_2"), ("queries", "documents"))


def pooling_routes(state: ServerState) -> list[Route]:
    """The routes. Their errors are the application's to tell.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
    """

    async def answer(
        request: Request, kind: str, make: Callable[[PoolingBody], Awaitable[Response]]
    ) -> Response:
        call = await read_call(request)
        check_task(state, kind, request.url.path)
        body = PoolingBody(call, state)
        request.state.request_id = call.request_id
        return await make(body)

    makers = {"embeddings": _embeddings, "score": _scores, "classify": _classes}
    routes = [(path, kind, make) for kind, make in makers.items() for path in PATHS[kind]]
    for path in PATHS["rerank"]:
        routes.append((path, "rerank", partial(_ranks, is_cohere=path == "/v2/rerank")))
    return [
        Route(path, partial(answer, kind=kind, make=make), methods=["POST"])
        for path, kind, make in routes
    ]


async def _embeddings(body: PoolingBody) -> Response:
    """OpenAI's answer of /v1/embeddings."""
    form = body.fields.take("encoding_format", str, "float")
    if form not in ("float", "base64"):
        raise body.fields.error("encoding_format", f"must be float or base64, got {form[:80]!r}")
    outputs = await body.serve_input("dimensions", "normalize", "prompt_name")
    write = _as_base64 if form == "base64" else array.tolist
    data = (
        {"object": "embedding", "index": place, "embedding": write(_pooled(output))}
        for place, output in enumerate(outputs)
    )
    return await _list("embd", body, data, outputs)


async def _classes(body: PoolingBody) -> Response:
    """vLLM's answer of /classify."""
    outputs, labels = await body.serve_input("activation"), body.pooling.labels
    data = []
    for place, output in enumerate(outputs):
        probs = _pooled(output).tolist()
        label = labels[probs.index(max(probs))]
        fields = {"index": place, "label": label, "probs": probs, "num_classes": len(probs)}
        data.append(fields)
    return await _list("classify", body, data, outputs)


async def _scores(body: PoolingBody) -> Response:
    """vLLM's answer of /score."""
    names = next((pair for pair in _PAIRS if body.fields.has(pair[0])), _PAIRS[0])
    roles = ("query", "document") if names[0] == "queries" else (None, None)
    firsts, seconds = map(body.read_texts, names, roles)
    if len(firsts) not in (1, len(seconds)):
        problem = f"must be one text, or as many as {names[1]}; got {len(firsts)}"
        raise FieldError(names[0], f"{problem} and {len(seconds)}")
    body.end("activation")
    scores, outputs = await _serve_pairs(body, firsts, seconds)
    data = (
        {"index": place, "object": "score", "score": score} for place, score in enumerate(scores)
    )
    return await _list("score", body, data, outputs)


async def _ranks(body: PoolingBody, is_cohere: bool) -> Response:
    """The answer of /rerank, in the shape of Jina, or of Cohere."""
    queries = body.read_texts("query", "query")
    if queries[0].name != "query":
        raise FieldError("query", "must be one text")
    documents = body.read_texts("documents", "document")
    top_n = body.fields.take("top_n", int, 0) or len(documents)  # clients send 0 for all
    if top_n < 0:
        raise FieldError("top_n", f"must be at least 1, got {top_n}; leave it out for all")
    shows = body.fields.take("return_documents", bool, True)
    body.end("activation")
    scores, outputs = await _serve_pairs(body, queries, documents)
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    results: list[Json] = []
    for place in order[:top_n]:
        result: Json = {"index": place, "relevance_score": scores[place]}
        if shows:
            result["document"] = {"text": documents[place].text}
        results.append(result)
    usage = _usage(outputs)
    fields: Json = {"id": f"rerank-{body.call.request_id}", "model": body.model, "usage": usage}
    fields["results"] = results
    if is_cohere:
        tokens = {"input_tokens": usage["prompt_tokens"]}
        fields["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
    return JsonAnswer(fields)


async def _serve_pairs(
    body: PoolingBody, firsts: list[Text], seconds: list[Text]
) -> tuple[list[float], list[RequestOutput]]:
    """The score of each pair, and the outputs of which they are made.

    Args:
        firsts: one, or as many as `seconds`.

    Raises:
        FieldError: the pairs of a model that reads both texts are together too long.
    """
    pairs = list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
    if body.pooling.task == "score":
        size = sum(len(first.text) + len(second.text) for first, second in pairs)
        if size > _MAX_PAIRED:
            problem = f"makes pairs of together {size} characters, more than {_MAX_PAIRED}"
            raise FieldError(firsts[0].name, f"{problem}; send a shorter one, or fewer pairs")
        outputs = await body.serve(
            body.request(last.name, first.text, second=last.text) for first, last in pairs
        )
        return [_pooled(output)[0] for output in outputs], outputs
    names = {text[1:]: text.name for text in (*seconds, *firsts)}  # each text is embedded once
    outputs = await body.serve(body.request(name, *key) for key, name in names.items())
    embedded = dict(zip(names, map(_pooled, outputs), strict=True))
    scores = (cosine(embedded[first[1:]], embedded[second[1:]]) for first, second in pairs)
    return await _in_turns(scores), outputs


async def _list(
    kind: str, body: PoolingBody, data: Iterable[Json], outputs: Sequence[RequestOutput]
) -> Response:
    """An answer with a list of results."""
    head = {"id": f"{kind}-{body.call.request_id}", "object": "list", "created": int(time.time())}
    start = json_bytes({**head, "model": body.model, "usage": _usage(outputs)})[:-1]
    items = b",".join(await _in_turns(map(json_bytes, data)))
    return Response(b'%b,"data":[%b]}' % (start, items), media_type="application/json")


async def _in_turns(items: Iterable[Item]) -> list[Item]:
    """Makes all items; in between, other tasks of the event loop run."""
    made: list[Item] = []
    for item in items:
        made.append(item)
        if len(made) % _ITEMS_A_TURN == 0:
            await asyncio.sleep(0)
    return made


def _usage(outputs: Sequence[RequestOutput]) -> Json:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


def _pooled(output: RequestOutput) -> array[float]:
    assert output.pooled is not None, "a request without it ends with an error"
    return output.pooled


def _as_base64(values: Any) -> str:
    """Little-endian float32, as all machines that torch runs on have it."""
    return base64.b64encode(values).decode()
