"""Calls of a client, and what its streams say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tpengine.client.generation_client import GenerationClient
from tpengine.outputs import CompletionOutput, RequestOutput

PATIENCE_S = 60.0
LOGPROB_ERROR = 5e-5
"""In float32 a log probability depends on its neighbours in the batch and on what the prefix cache
holds, by up to 2.3e-5 measured."""
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


def but_for_rounding(outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    """Outputs that equal those with nearly the same log probabilities."""
    return [
        replace(
            output, cumulative_logprob=pytest.approx(output.cumulative_logprob, abs=LOGPROB_ERROR)
        )
        for output in outputs
    ]
