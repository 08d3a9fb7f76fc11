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
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tpengine.outputs import RequestOutput, cosine
from tpengine.server.http.calls import read_call
from tpengine.server.http.endpoints import PATHS, check_task
from tpengine.server.http.fields import FieldError
from tpengine.server.http.json_text import JsonAnswer, json_bytes
from tpengine.server.http.pooling_bodies import PoolingBody, Text
from tpengine.server.http.write import Json
from tpengine.server.state import ServerState

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
