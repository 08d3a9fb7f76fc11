"""The application behind the HTTP port: who may call what, errors, and the routes of the server.

The routes that generate are in `openai_routes.py`, those that write down speech in
`sound_routes.py`, those that embed, score and classify in `pooling_routes.py`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tpengine
from tpengine.engine.requests import check_token_ids
from tpengine.errors import UnreadError, did_you_mean
from tpengine.proto import REQUEST_ID_KEY, RESUME_WINDOW_KEY
from tpengine.server.auth import Authenticator, is_own_host, wrong_host
from tpengine.server.http.calls import ParseTurns, read_call
from tpengine.server.http.error_answers import HttpError, refusal
from tpengine.server.http.fields import FieldError, Fields, whole
from tpengine.server.http.json_text import JsonAnswer
from tpengine.server.http.openai_routes import openai_routes
from tpengine.server.http.page import FILES, page_routes
from tpengine.server.http.pooling_routes import pooling_routes
from tpengine.server.http.read import BodyReader, naming_field
from tpengine.server.http.sound_routes import sound_routes
from tpengine.server.limits import OpenCalls, check_num_ids
from tpengine.server.state import METRICS_TYPE, ServerState

OPEN_PATHS = frozenset({"/health", "/ready", "/version", *FILES})
"""They need no token, and answer while the model loads."""
_post = partial(Route, methods=["POST"])


def make_app(
    state: ServerState,
    auth: Authenticator,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
) -> Starlette:
    """The application.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
        auth: identifies clients.
        origins: whose pages may call; "*": all.
        hosts: see `is_own_host`.
    """
    routes = [*_server_routes(state), *_text_routes(state)]
    if state.adapter_folder is not None:
        routes += _adapter_routes(state)
    routes += [*openai_routes(state), *sound_routes(state), *pooling_routes(state)]
    routes += page_routes(state)
    handlers: dict[Any, Any] = {HTTPException: _refuse}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.server, app.state.turns, app.state.origins = state, ParseTurns(), origins
    app.add_middleware(_Entrance, authenticator=auth, calls=state.calls, hosts=hosts)
    if origins:  # outermost: a browser's question has no token, and a page reads refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,  # a browser asks whether a page may call this network
            expose_headers=[REQUEST_ID_KEY, RESUME_WINDOW_KEY, "retry-after"],
        )
    return app


class _Entrance:
    """Gives each call its id and its client, and turns errors before the first byte into answers.

    Starlette's own handling of unknown errors logs their text, which may hold a prompt.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, calls: OpenCalls, hosts: Sequence[str]
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._calls = calls
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, headers = scope["state"], Headers(scope=scope)
        state["send"] = send
        # Gateways set it: all that a header may hold is taken, also if another call has it.
        state["request_id"] = headers.get(REQUEST_ID_KEY) or f"req-{uuid.uuid4().hex}"
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                own_id = (REQUEST_ID_KEY.encode(), state["request_id"].encode("latin-1"))
                message["headers"] = [*message["headers"], own_id]
            await send(message)

        try:
            for host in headers.getlist("host"):
                if not is_own_host(host, self._hosts):
                    raise HttpError(wrong_host(host), 403, "host_not_allowed")
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, answer)
                return
            tokens, certificate = headers.getlist("authorization"), state["certificate"]
            client = self._authenticator.identify(tokens, certificate, state["host"])
            state["client"] = client
            with self._calls.counted(client.owner.account):
                await self._app(scope, receive, answer)
        except asyncio.CancelledError:  # the client has left, or the server closes the connection
            return
        except UnreadError:
            state["drop"]()
        except Exception as error:
            response = refusal(error, state["request_id"])
            if not has_begun:  # else the connection is closed, and the client sees a cut answer
                await response(scope, receive, answer)


async def _refuse(request: Request, error: HTTPException) -> NoReturn:
    """Refuses a path or a method that does not exist, for `_Entrance`."""
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        text = f"{what} is not offered; this path takes {allowed}"
        raise HttpError(text, 405, "method_not_allowed", {"allow": allowed})
    paths = [getattr(route, "path", "") for route in request.app.routes]
    if request.url.path.startswith("/v1/"):
        served = [path for path in paths if path.startswith("/v1/") and "{" not in path]
        hint = f"; below /v1 it has {', '.join(served)}"
    else:
        hint = did_you_mean(request.url.path[:200], paths) or "; a client's base URL ends in /v1"
    raise HttpError(f"{what} is no URL of this server{hint}", error.status_code, "unknown_url")


def _server_routes(state: ServerState) -> list[Route]:
    def card(name: str) -> dict[str, Any]:
        engine = state.loaded_engine().llm_engine
        config = engine.get_model_config()
        fields = {
            "owned_by": "tpengine",
            "root": state.model,
            "max_model_len": config.max_model_len,
        }
        fields |= {"reads_pictures": engine.reads_pictures, "task": config.task}
        if name in state.adapters:
            fields["parent"] = state.model
        return {"id": name, "object": "model", "created": state.created, **fields}

    async def health(request: Request) -> Response:
        alive = state.engine is None or state.engine.health().alive
        return Response(status_code=200 if alive else 503)

    async def ready(request: Request) -> Response:
        why = state.why_not_ready()
        return Response(why, 200 if why is None else 503, media_type="text/plain")

    async def version(request: Request) -> Response:
        return JsonAnswer({"version": tpengine.__version__})

    async def metrics(request: Request) -> Response:
        return Response(state.metrics_text(), media_type=METRICS_TYPE)

    async def models(request: Request) -> Response:
        cards = [card(name) for name in (*state.names, *state.adapters)]
        return JsonAnswer({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        state.check_open(name)
        return JsonAnswer(card(name))

    routes = [Route(f"/{answer.__name__}", answer) for answer in (health, ready, version, metrics)]
    return [*routes, Route("/v1/models", models), Route("/v1/models/{name:path}", model)]


def _adapter_routes(state: ServerState) -> list[Route]:
    """The routes that load and unload adapters, in vLLM's form; they need the admin token."""

    async def load(request: Request) -> Response:
        fields = await _read_admin(request)
        name, path = fields.take("lora_name", str, ""), fields.take("lora_path", str, "")
        fields.end()
        await state.load_adapter(name, path)
        return Response(f"LoRA adapter {name!r} is loaded", media_type="text/plain")

    async def unload(request: Request) -> Response:
        fields = await _read_admin(request)
        name = fields.take("lora_name", str, "")
        fields.take("lora_int_id", int, 0)
        fields.end()
        state.unload_adapter(name)
        return Response(f"LoRA adapter {name!r} is unloaded", media_type="text/plain")

    return [_post("/v1/load_lora_adapter", load), _post("/v1/unload_lora_adapter", unload)]


async def _read_admin(request: Request) -> Fields:
    call = await read_call(request)
    call.client.require_admin(request.url.path)
    return Fields(call.message)


def _text_routes(state: ServerState) -> list[Route]:
    """The routes between text and token ids, in vLLM's form."""

    async def tokenize(request: Request) -> Response:
        call = await read_call(request)
        is_chat = "messages" in call.message
        with naming_field(is_chat):
            token_ids = await BodyReader(call, is_chat, state).tokenize()
        length = state.loaded_engine().model_config.max_model_len
        fields = {"count": len(token_ids), "max_model_len": length}
        return JsonAnswer({**fields, "tokens": token_ids, "token_strs": None})

    async def detokenize(request: Request) -> Response:
        fields, engine = Fields((await read_call(request)).message), state.loaded_engine()
        state.check_open(fields.take("model", str, state.model))
        if not fields.has("tokens"):
            raise FieldError("tokens", "is missing")
        token_ids: list[int] = fields.take("tokens", list, [])
        fields.end()
        check_num_ids("tokens", len(token_ids), engine.model_config.max_model_len)
        token_ids = whole(token_ids)
        check_token_ids("tokens", token_ids, engine.model_config.vocab_size)
        return JsonAnswer({"prompt": await engine.detokenize(token_ids, False)})

    return [_post("/tokenize", tokenize), _post("/detokenize", detokenize)]
