"""Outputs of a stream are sent by the call that delivers them, however fast the client reads."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.deltas import delta

from tpengine.async_engine.mailbox import Mailbox
from tpengine.proto import tpengine_pb2 as pb
from tpengine.server.grpc.generation_messages import ResponseWriter
from tpengine.server.stream_sender import send_stream

WAIT_S = 60.0


class Connection:
    """Takes one message at a time, as `context.write` does; each write waits for `let_go`."""

    def __init__(self, is_fast: bool = True) -> None:
        self.is_fast = is_fast
        self.messages: list[pb.GenerateResponse] = []
        self.waiting: asyncio.Future[None] | None = None
        self.num_left = 0

    async def write(self, message: pb.GenerateResponse) -> None:
        assert self.waiting is None, "a write has begun before the last has ended"
        # Serialized at once, as gRPC does: the sender uses the message again.
        self.messages.append(pb.GenerateResponse.FromString(message.SerializeToString()))
        self.waiting = asyncio.get_running_loop().create_future()
        if self.is_fast:
            self.waiting.set_result(None)
        try:
            await self.waiting
        except BaseException:
            self.num_left += 1
            raise
        finally:
            self.waiting = None

    def let_go(self) -> None:
        """Ends the write that has not ended."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each message."""
        return [list(message.outputs[0].token_ids) for message in self.messages]


def begin(is_fast: bool = True) -> tuple[Mailbox, Connection, asyncio.Task[None]]:
    """A mailbox whose outputs a task sends over a connection."""
    box, connection = Mailbox(merges=True), Connection(is_fast)
    sending = send_stream(box, ResponseWriter(), connection.write, WAIT_S)
    return box, connection, asyncio.create_task(sending)


async def _turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_output_is_sent_by_the_call_that_delivers_it() -> None:
    box, connection, sending = begin()
    await _turns()
    for token in range(5):
        box.put(delta({0: [token]}, has_logprobs=False))
        assert len(connection.messages) == token + 1
        await _turns()
    assert not sending.done()
    box.put(delta({0: [9]}, True, has_logprobs=False, num_output_tokens=6))
    await sending
    assert connection.token_ids == [[0], [1], [2], [3], [4], [9]]
    first, *_, last = connection.messages
    assert (first.request_id, first.outputs[0].text, first.finished) == ("it", "0 ", False)
    fields = [[field.name for field, _ in m.outputs[0].ListFields()] for m in (first, last)]
    always = ["index", "text", "token_ids"]
    assert fields == [always, [*always, "finish_reason"]]
    assert not first.HasField("usage")
    assert (last.finished, last.usage.num_output_tokens) == (True, 6)


@pytest.mark.parametrize("seed", range(20))
async def test_all_arrives_in_order_whenever_writes_end(seed: int) -> None:
    rng = random.Random(seed)

    box, connection, sending = begin(is_fast=False)
    for token in range(60):
        box.put(delta({0: [token]}, token == 59, has_logprobs=rng.random() < 0.1))
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.6:
                connection.let_go()
            await _turns(rng.randrange(3))
    while not sending.done():
        connection.let_go()
        await _turns(1)
    await sending
    assert [token for ids in connection.token_ids for token in ids] == list(range(60))
    outputs = [output for message in connection.messages for output in message.outputs]
    assert "".join(output.text for output in outputs) == "".join(f"{token} " for token in range(60))
    assert [message.finished for message in connection.messages].index(True) + 1 == len(outputs)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_a_stream_that_is_left_leaves_nothing(num_tokens: int) -> None:
    box, connection, sending = begin(is_fast=False)
    await _turns()
    for token in range(num_tokens):
        box.put(delta({0: [token]}, has_logprobs=False))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert box.listener is None
    assert connection.num_left == min(num_tokens, 1)
    box.put(delta({0: [7]}, has_logprobs=False))  # no reader is left
    box.put(delta({0: [8]}, True, has_logprobs=False))
    await _turns()
    assert connection.token_ids == [[0]][:num_tokens]
