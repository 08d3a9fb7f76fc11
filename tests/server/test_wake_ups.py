"""All events of gRPC are handled in one turn of the event loop."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import deque
from typing import Any

import grpc
import pytest
from support.patches import on_call

from tpengine.server.grpc import server as grpc_server

NUM_EVENTS, WAIT_S = 200, 60.0
"""The socket holds only a few hundred bytes."""


class FakeQueue:
    """Behaves as gRPC's completion queue: one byte per event, and all events for one byte."""

    __module__ = "grpc.like"

    def __init__(self, loop: asyncio.AbstractEventLoop, is_partial: bool) -> None:
        self.reading, self.writing = socket.socketpair()
        self.events: deque[int] = deque()
        self.taken: list[int] = []
        self.num_turns = 0
        read = functools.partial(self.read, loop) if is_partial else self.read
        loop.add_reader(self.reading, read)

    def add(self, what: int) -> None:
        self.events.append(what)
        self.writing.send(b"1")

    def read(self, _: object = None) -> None:
        self.num_turns += 1
        assert self.reading.recv(1)
        while self.events:
            self.taken.append(self.events.popleft())

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.reading)
        self.reading.close()
        self.writing.close()


class OtherQueue(FakeQueue):
    __module__ = "not_grpc"


async def _taken(kind: type[FakeQueue], is_partial: bool = True) -> FakeQueue:
    loop = asyncio.get_running_loop()
    grpc_server.batch_wake_ups(loop)
    queue = kind(loop, is_partial)
    try:
        for what in range(NUM_EVENTS):
            queue.add(what)
        # After the first byte is read, and before the last one is.
        await asyncio.sleep(0)
        queue.add(NUM_EVENTS)
        for _ in range(2 * NUM_EVENTS):
            await asyncio.sleep(0)
        assert queue.taken == list(range(NUM_EVENTS + 1))
        queue.reading.setblocking(False)
        with pytest.raises(BlockingIOError):
            queue.reading.recv(1)
    finally:
        queue.close(loop)
    return queue


@pytest.mark.parametrize("is_partial", [True, False])
async def test_all_events_take_one_turn(is_partial: bool) -> None:
    assert (await _taken(FakeQueue, is_partial)).num_turns <= 3


async def test_readers_of_others_are_unchanged() -> None:
    assert (await _taken(OtherQueue)).num_turns == NUM_EVENTS + 1


async def test_the_installed_grpc_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if gRPC changes how it wakes its loop; the server would then work, but slower."""
    batches = on_call(monkeypatch, grpc_server, "read_batch")

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    grpc_server.batch_wake_ups(asyncio.get_running_loop())
    server = grpc.aio.server()
    echo = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", echo),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/echo/Echo")(b"hello", timeout=WAIT_S) == b"hello"
    await server.stop(None)
    assert batches
