"""Calls of a client, and what its streams say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from tpengine.client.generation_client import GenerationClient
from tpengine.outputs import CompletionOutput, RequestOutput

PATIENCE_S = 60.0
Talk = Callable[[GenerationClient], Coroutine[Any, Any, Any]]


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    """All parts of a stream."""
    return [output async for output in outputs]


def joined_parts(parts: Sequence[RequestOutput]) -> list[CompletionOutput]:
    """The outputs that the parts of a stream make together."""
    whole: dict[int, CompletionOutput] = {}
    for part in parts:
        for output in part.outputs:
            if (known := whole.get(output.index)) is not None:
                assert known.finish_reason is None, "a sequence goes on after its end"
                output.text = known.text + output.text
                output.token_ids = known.token_ids + output.token_ids
                output.logprobs = [*(known.logprobs or ()), *(output.logprobs or ())] or None
            whole[output.index] = output
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    return [whole[index] for index in sorted(whole)]
