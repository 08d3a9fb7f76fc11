"""A very large answer does not delay other calls."""

from __future__ import annotations

import asyncio

import pytest

from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.server.grpc.convert import ResponseWriter
from tpengine.server.grpc.proto import tpengine_pb2 as pb


@pytest.mark.parametrize("of", ["output", "prompt"])
def test_other_tasks_run_while_a_large_answer_is_converted(of: str) -> None:
    """The event loop takes a turn after about every thousand candidates."""
    candidates = {token_id: Logprob(-1.0, token_id + 1, "x") for token_id in range(64)}
    many = [candidates] * 320
    one = CompletionOutput(0, "x", [9] * 320, logprobs=many if of == "output" else None)
    last = RequestOutput("r", None, [1], [one], finished=False)
    if of == "prompt":
        last.prompt_token_ids, last.prompt_logprobs = [9] * 320, many

    async def write() -> tuple[pb.GenerateResponse, int]:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        return await ResponseWriter().write(last), turns

    answer, turns = asyncio.run(write())
    written = answer.outputs[0].logprobs if of == "output" else answer.prompt_logprobs
    assert sum(len(token.candidates) for token in written) == 320 * 64
    assert turns >= 20
