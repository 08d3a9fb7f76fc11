"""Coroutines of tests: each on an event loop of its own, in bounded time, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import pytest

BOUND_S = 120.0
Answer = TypeVar("Answer")


def run_async(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Runs a coroutine for a bounded time. It must leave no task, and no exception may be lost."""

    async def bounded() -> Answer:
        lost: list[dict[str, Any]] = []

        def note(_: object, context: dict[str, Any]) -> None:
            # grpc.aio drops a future with this error where a call is cancelled between two steps.
            if not isinstance(context.get("exception"), grpc.aio.InternalError):
                lost.append(context)

        asyncio.get_running_loop().set_exception_handler(note)
        gc.freeze()  # so that the collection below looks at nothing but what is made from now on
        try:
            answer = await asyncio.wait_for(work, BOUND_S)
            gc.collect()
        finally:
            gc.unfreeze()
        for _ in range(5):  # each generator that was dropped is closed by a task
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"
        assert not lost, f"exceptions were lost: {lost}"
        return answer

    return asyncio.run(bounded())


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run_async(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
