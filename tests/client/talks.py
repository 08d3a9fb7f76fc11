"""Conversations of a client with a server, bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tpengine.client.generation_client import GenerationClient

PATIENCE_S = 60.0
Talk = Callable[[GenerationClient], Coroutine[Any, Any, Any]]


def talk_with(target: str, talk: Talk, **options: Any) -> Any:
    """What a coroutine returns that is given a client of this server."""

    async def connected() -> Any:
        async with GenerationClient(target, **options) as client:
            return await asyncio.wait_for(talk(client), PATIENCE_S)

    return asyncio.run(connected())
