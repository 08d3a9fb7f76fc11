"""The page at `/`, a chat and a live picture of the engine: its files, and the feed of the picture.

The files are those of the folder `page`, as they are. They need no key and hold nothing secret; the
page asks its user for a key and sends it with every call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tpengine
from tpengine.engine.stats import EngineHealth, EngineStats
from tpengine.errors import RankLoss
from tpengine.server.http.json_text import JsonAnswer
from tpengine.server.state import ServerState, State

FEED = "/engine/state"
"""Path of the feed, which needs a key where the server has one."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Only files of this server: no inline script or style, no other host, no frame around the
    # page, and no text that becomes HTML (the last two words; browsers that know them obey).
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the browser asks each time: an upgrade shows at once
}
_FIGURES = (
    *("epoch", "num_ranks", "num_ranks_wanted", "prompt_tokens", "output_tokens"),
    *("output_tokens_per_s", "num_preemptions"),
)
_OF_LOSS = ("rank", "place", "epoch", "step", "phase", "cause")
_NUM_RECOVERIES = 8


def _read_files() -> Iterator[tuple[str, Response]]:
    """The path and the answer of each file."""
    for path in sorted(Path(__file__).with_name("page").glob("[!.]*")):
        data = path.read_bytes()
        url = "/" if path.name == "index.html" else f"/page/{path.name}"
        headers = {**_HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
        yield url, Response(data, headers=headers, media_type=_TYPES[path.suffix[1:]])


FILES = dict(_read_files())
"""The answer of each path of the page. No path is looked up on the disk."""


def page_routes(state: ServerState) -> list[Route]:
    """The routes of the page.

    Args:
        state: of the server; has the engine once it is loaded.
    """

    async def file(request: Request, whole: Response) -> Response:
        if whole.headers["etag"] not in request.headers.get("if-none-match", ""):
            return whole
        return Response(status_code=304, headers={**_HEADERS, "etag": whole.headers["etag"]})

    async def feed(request: Request) -> Response:
        return JsonAnswer(describe(state), headers={"cache-control": "no-store"})

    files = [Route(path, partial(file, whole=whole)) for path, whole in FILES.items()]
    return [*files, Route(FEED, feed)]


def describe(state: ServerState) -> dict[str, Any]:
    """The server and its engine at this moment, as the page draws them; without `engine` while the
    model loads. Bytes and seconds are numbers, a share is in [0, 1]."""
    status: dict[str, Any] = {
        "version": tpengine.__version__,
        "model": state.model,
        "state": state.state.value,
        "uptime_s": state.uptime_s,
    }
    if state.engine is None:
        return status
    stats, engine = state.engine.stats(), state.engine.llm_engine
    health = engine.health()
    if state.state is State.RUNNING:
        status["state"] = stats.state
    recovery = None
    if health.recovery is not None:
        recovery = {**asdict(health.recovery), "loss": _loss(health.recovery.loss)}
    records = engine.recoveries[-_NUM_RECOVERIES:]
    status["engine"] = {
        **{name: getattr(stats, name) for name in _FIGURES},
        "num_recoveries": stats.recoveries,
        "queues": asdict(stats.queues),
        "cache": asdict(stats.cache),
        "ranks": list(_ranks(stats, health)),
        "num_drafted": sum(counts.num_drafted for counts in stats.drafts.values()),
        "num_accepted": sum(counts.num_accepted for counts in stats.drafts.values()),
        "recovery": recovery,
        "recoveries": [{**asdict(record), "loss": _loss(record.loss)} for record in records],
    }
    return status


def _ranks(stats: EngineStats, health: EngineHealth) -> Iterator[dict[str, Any]]:
    """Each rank, with its memory by use; while ranks are replaced, with that of the last ones."""
    # Not strict: another thread may replace the group of ranks at this moment.
    for ledger, device, node in zip(stats.ledgers, stats.devices, stats.nodes, strict=False):
        yield {
            "rank": ledger.rank,
            "state": _rank_state(ledger.rank, health),
            "stage": ledger.stage,
            "device": device,
            "node": node,
            "total_bytes": ledger.total_bytes,
            "memory_bytes": ledger.uses(stats.cache.num_total_blocks),
        }


def _rank_state(rank: int, health: EngineHealth) -> str:
    if health.recovery is None:
        return health.state.value
    loss = health.recovery.loss
    if loss is None or health.epoch > loss.epoch:
        return "starting"
    return "lost" if rank == loss.rank else "ended"


def _loss(loss: RankLoss | None) -> dict[str, Any] | None:
    """A loss without its stack and its log, which are for the operator."""
    return None if loss is None else {name: getattr(loss, name) for name in _OF_LOSS}
