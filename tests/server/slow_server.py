"""`tpengine serve` that lets requests of one seed wait: slow_server.py SEED SECONDS OPTIONS..."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.cli.main import main

seed, seconds, *options = sys.argv[1:]
begin = AsyncLLMEngine._begin


async def begin_late(engine: AsyncLLMEngine, request: Any, *more: Any) -> Any:
    if request.params.seed == int(seed):
        await asyncio.sleep(float(seconds))
    return await begin(engine, request, *more)


AsyncLLMEngine._begin = begin_late  # type: ignore[method-assign]
sys.exit(main(["serve", *options]))
