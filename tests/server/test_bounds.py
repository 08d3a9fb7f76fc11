"""Open calls, watchers and silent clients are bounded; a client without a token holds nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.calls import SERVICE, TIMEOUT_S
from server.guarded import guarded_server
from tpengine.async_engine.admission import QueueLimits
from tpengine.errors import MalformedRequestError, QueueFullError
from tpengine.server.auth import Authenticator
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.grpc.server import HealthServicer
from tpengine.server.grpc.wire import check_fields
from tpengine.server.limits import Limits

Code = grpc.StatusCode
TOKEN = "one-0123456789abcdef"
HEALTH = "/grpc.health.v1.Health/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">HBBBL", 0, 0, 4, 0, 0)
MAX_CONCURRENT_STREAMS = 3


def _sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(**fields))


async def code(call: Any) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), TIMEOUT_S)


def on_channel(target: str, use: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            await use(channel)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "Tokenize", "Drain"])
def test_a_client_without_a_token_is_refused_before_its_message(name: str) -> None:
    async def park(channel: grpc.aio.Channel) -> None:
        call = channel.stream_unary(SERVICE + name)()  # neither message, nor token, nor deadline
        assert await code(call) is Code.UNAUTHENTICATED

    with guarded_server(Authenticator([TOKEN])) as target:
        on_channel(target, park)


@pytest.mark.parametrize(
    ("path", "metadata"),
    [(SERVICE + "Generate", (("authorization", f"Bearer {TOKEN}"),)), (HEALTH + "Check", ())],
)
def test_open_calls_are_bounded(path: str, metadata: tuple[tuple[str, str], ...]) -> None:
    limits = Limits(max_calls=3, max_health_calls=4, queue=QueueLimits(max_requests=1))

    async def park(channel: grpc.aio.Channel) -> None:
        open_call = channel.stream_unary(path)
        # They arrive in any order: any one of them is one too many.
        calls = [open_call(metadata=metadata) for _ in range(5)]
        waits = {asyncio.create_task(code(call)): call for call in calls}
        done, held = await asyncio.wait(waits, timeout=TIMEOUT_S, return_when="FIRST_COMPLETED")
        assert [task.result() for task in done] == [Code.RESOURCE_EXHAUSTED]
        assert len(held) == 4
        waits[next(iter(held))].cancel()
        later = Code.RESOURCE_EXHAUSTED
        end = asyncio.get_running_loop().time() + TIMEOUT_S
        while later is Code.RESOURCE_EXHAUSTED:
            assert asyncio.get_running_loop().time() < end
            later = await code(channel.unary_unary(path)(b"", metadata=metadata))
        assert later in (Code.OK, Code.UNAVAILABLE), "the place of one that left is free"
        for call in calls:
            call.cancel()
        await asyncio.wait(waits, timeout=TIMEOUT_S)

    with guarded_server(Authenticator([TOKEN]), limits=limits) as target:
        on_channel(target, park)


@pytest.mark.parametrize(
    ("path", "is_silent"),
    [
        (SERVICE + "Generate", True),
        (SERVICE + "Generate", False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
    ],
)
def test_a_message_must_arrive_in_time(path: str, is_silent: bool) -> None:
    async def park(channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(path)()
        if not is_silent:
            await call.done_writing()
        assert await code(call) is Code.INVALID_ARGUMENT
        assert ("0.05 s" in await call.details()) == is_silent

    with guarded_server(limits=Limits(message_s=0.05) if is_silent else None) as target:
        on_channel(target, park)


def test_a_connection_gets_its_limit_of_calls() -> None:
    limits = Limits(max_connection_calls=7, queue=QueueLimits(max_requests=2))
    with guarded_server(limits=limits) as target:
        host, _, port = target.partition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(PREFACE)
            with connection.makefile("rb") as stream:
                head = stream.read(9)  # the first frame is the settings
                length, kind = int.from_bytes(head[:3], "big"), head[3]
                settings = dict(struct.iter_unpack(">HL", stream.read(length)))
    assert kind == 4
    assert settings[MAX_CONCURRENT_STREAMS] == 9


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (pb.GenerateRequest(messages=pb.Conversation(messages=[pb.Message()] * 4097)), "messages"),
        (_sampling(bad_words_token_ids=[pb.TokenIds()] * 1025), "bad_words_token_ids"),
        (_sampling(stop=[""] * 2000), "stop"),
        (_sampling(logit_bias=dict.fromkeys(range(16385), 1.0)), "logit_bias"),
    ],
)
def test_entries_are_counted_before_they_are_parsed(
    request_: pb.GenerateRequest, name: str
) -> None:
    """The server still loads: a message that was parsed is answered with UNAVAILABLE."""
    data = request_.SerializeToString()

    async def send(channel: grpc.aio.Channel) -> None:
        call = channel.unary_unary(SERVICE + "Generate")(data)
        assert await code(call) is Code.INVALID_ARGUMENT
        assert f"entries of {name}" in await call.details()

    with guarded_server() as target:
        on_channel(target, send)


def test_messages_that_are_none_are_left_to_the_parser() -> None:
    for data in (b"\x22\xff" * 2000, bytes(5000), b"\xff" * 5000, b"\x0b" * 5000):
        check_fields(data, pb.GenerateRequest.DESCRIPTOR, Limits())
    with pytest.raises(MalformedRequestError, match="entries of unknown fields"):
        check_fields(b"\xf8\x07\x01" * 70_000, pb.GenerateRequest.DESCRIPTOR, Limits())


def test_watchers_are_bounded_in_total_and_per_host() -> None:
    async def watch() -> None:
        servicer = HealthServicer()
        request = health_pb2.HealthCheckRequest()

        def begin(host: str, port: int) -> Any:
            return servicer.Watch(request, SimpleNamespace(peer=lambda: f"ipv4:{host}:{port}"))

        open_ones = []
        for host in range(4):
            for port in range(64):
                open_ones.append(begin(f"10.0.0.{host}", port))
                await anext(open_ones[-1])
            with pytest.raises(QueueFullError, match="64 from your machine") as caught:
                await anext(begin(f"10.0.0.{host}", 99))
            assert caught.value.retry_after_s > 0
        with pytest.raises(QueueFullError, match="256 calls watch"):
            await anext(begin("10.0.0.9", 1))
        await open_ones[0].aclose()
        await anext(begin("10.0.0.9", 1))
        for one in open_ones:
            await one.aclose()

    asyncio.run(watch())


def test_watchers_over_the_wire() -> None:
    async def watch(channel: grpc.aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watchers = [stub.Watch(request, timeout=TIMEOUT_S) for _ in range(64)]
        for one in watchers:
            assert (await one.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await code(stub.Watch(request)) is Code.RESOURCE_EXHAUSTED
        assert await code(stub.Check(request)) is Code.OK
        for one in watchers:
            one.cancel()

    with guarded_server() as target:
        on_channel(target, watch)
