"""gRPC's news is taken in as few turns of the event loop as there can be."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import deque
from typing import Any

import grpc
import pytest

from tpengine.server.grpc import wake_ups

NUM_NEWS, WAIT_S = 200, 20.0
"""More bytes than a few hundred do not fit into the socket."""


class FakeQueue:
    """Tells news as gRPC's completion queue does: a byte for each, all that there is for a byte."""

    __module__ = "grpc.like"

    def __init__(self, loop: asyncio.AbstractEventLoop, is_partial: bool) -> None:
        self.reading, self.writing = socket.socketpair()
        self.news: deque[int] = deque()
        self.taken: list[int] = []
        self.num_turns = 0
        read = functools.partial(self.read, loop) if is_partial else self.read
        loop.add_reader(self.reading, read)

    def tell(self, what: int) -> None:
        self.news.append(what)
        self.writing.send(b"1")

    def read(self, _: object = None) -> None:
        self.num_turns += 1
        assert self.reading.recv(1)
        while self.news:
            self.taken.append(self.news.popleft())

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.reading)
        self.reading.close()
        self.writing.close()


class OtherQueue(FakeQueue):
    __module__ = "not_grpc"


async def _taken(kind: type[FakeQueue], is_partial: bool = True) -> FakeQueue:
    loop = asyncio.get_running_loop()
    wake_ups.batch_wake_ups(loop)
    queue = kind(loop, is_partial)
    try:
        for what in range(NUM_NEWS):
            queue.tell(what)
        # Later than the first byte, and before the last is read.
        await asyncio.sleep(0)
        queue.tell(NUM_NEWS)
        for _ in range(2 * NUM_NEWS):
            await asyncio.sleep(0)
        assert queue.taken == list(range(NUM_NEWS + 1))
        queue.reading.setblocking(False)
        with pytest.raises(BlockingIOError):
            queue.reading.recv(1)
    finally:
        queue.close(loop)
    return queue


@pytest.mark.parametrize("is_partial", [True, False])
def test_all_news_takes_a_turn(is_partial: bool) -> None:
    assert asyncio.run(_taken(FakeQueue, is_partial)).num_turns <= 3


def test_readers_of_others_are_left_alone() -> None:
    assert asyncio.run(_taken(OtherQueue)).num_turns == NUM_NEWS + 1


def test_grpc_as_it_is_installed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should gRPC change how it wakes its loop, this says so: all works on, and costs more."""
    num_batches = 0
    read_batch = wake_ups._read_batch

    def counted(*args: Any) -> None:
        nonlocal num_batches
        num_batches += 1
        read_batch(*args)

    monkeypatch.setattr(wake_ups, "_read_batch", counted)

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    async def ask() -> bytes:
        wake_ups.batch_wake_ups(asyncio.get_running_loop())
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("echo", {"Echo": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            said: bytes = await channel.unary_unary("/echo/Echo")(b"hello", timeout=WAIT_S)
        await server.stop(None)
        return said

    assert asyncio.run(ask()) == b"hello"
    assert num_batches > 0
