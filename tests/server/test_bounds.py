"""Open calls, watchers and silent clients are bounded; a client without a token holds nothing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import http2
from support.patches import on_call
from support.server_process import ServerProcess
from support.silent_reader import SilentReader
from support.waiting import wait_until

from server.calls import SERVICE, SERVING, TIMEOUT_S, check, long_request, running, sampling
from server.guarded import guarded_server
from server.http.open_port import open_port, posted, read_answer, request
from server.processes import rank_pid
from tpengine.async_engine.admission import QueueLimits
from tpengine.errors import QueueFullError
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc
from tpengine.server.auth import Authenticator
from tpengine.server.grpc import server
from tpengine.server.grpc.guard import address_of
from tpengine.server.grpc.server import MAX_WATCHERS, HealthServicer
from tpengine.server.limits import Limits, UntrustedCalls
from tpengine.server.state import State

Code = grpc.StatusCode
TOKEN = "one-0123456789abcdef"
HEALTH = "/grpc.health.v1.Health/"
OTHER = "127.0.0.2"
"""The address of a client that holds what it can get."""
WRITE_S, MAX_FILES = 1.0, 420
STREAM_ALL = {"n": 4, "logprobs": 5, "max_tokens": 500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two doors, few descriptors, and little patience."""
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--swap-space", "0"]
    options += ["--http-port", "0", "--isolate", "--max-client-requests", "3"]
    options += ["--write-timeout", str(WRITE_S)]
    log = tmp_path_factory.mktemp("strict") / "log"
    with ServerProcess(*options, log=log, max_files=MAX_FILES) as process:
        yield process


def _connect(address: str, source: str = "", buffer: int = 0) -> socket.socket:
    """A connection to HOST:PORT, over HTTP or not."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(TIMEOUT_S)
    connection.bind((source, 0))
    connection.connect((host, int(port)))
    return connection


def _sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(**fields))


async def code(call: Any) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), TIMEOUT_S)


@asynccontextmanager
async def channel_to(*args: Any, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server without an engine."""
    with guarded_server(*args, **options) as target:
        async with grpc.aio.insecure_channel(target) as channel:
            yield channel


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "Tokenize", "Drain"])
async def test_a_client_without_a_token_is_refused_before_its_message(name: str) -> None:
    async with channel_to(Authenticator([TOKEN])) as channel:
        call = channel.stream_unary(SERVICE + name)()  # neither message, nor token, nor deadline
        assert await code(call) is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_calls=3, queue=QueueLimits(max_requests=1)), "4 calls are open at this server"),
        (Limits(max_client_requests=4), "one client may have 4 (--max-client-requests)"),
    ],
)
async def test_open_calls_are_bounded(limits: Limits, words: str) -> None:
    path = SERVICE + "Generate"
    async with channel_to(limits=limits) as channel:
        open_call = channel.stream_unary(path)
        # They arrive in any order: any one of them is one too many.
        calls = [open_call() for _ in range(5)]
        waits = {asyncio.create_task(code(call)): call for call in calls}
        done, held = await asyncio.wait(waits, timeout=TIMEOUT_S, return_when="FIRST_COMPLETED")
        assert [task.result() for task in done] == [Code.RESOURCE_EXHAUSTED]
        refused = waits[done.pop()]
        assert words in await refused.details()
        assert "grpc-status-details-bin" in dict(await refused.trailing_metadata())
        assert len(held) == 4
        stub = health_pb2_grpc.HealthStub(channel)
        assert await code(stub.Check(health_pb2.HealthCheckRequest())) is Code.OK
        waits[next(iter(held))].cancel()
        later = Code.RESOURCE_EXHAUSTED
        end = asyncio.get_running_loop().time() + TIMEOUT_S
        while later is Code.RESOURCE_EXHAUSTED:
            assert asyncio.get_running_loop().time() < end
            later = await code(channel.unary_unary(path)(b""))
        assert later is Code.UNAVAILABLE, "the place of one that left is free"
        for call in calls:
            call.cancel()
        await asyncio.wait(waits, timeout=TIMEOUT_S)


def test_an_address_is_that_of_a_machine() -> None:
    peers = ["ipv4:10.0.0.1:5", "ipv6:%5B::ffff:10.0.0.1%5D:6", "ipv6:%5B2001:db8::1%5D:7"]
    peers += ["ipv6:[2001:db8::2%25eth0]:8", "unix:"]
    names = [address_of(SimpleNamespace(peer=lambda peer=peer: peer)) for peer in peers]
    assert names == ["10.0.0.1", "10.0.0.1", "2001:db8::/64", "2001:db8::/64", ""]


def test_probes_are_answered_beside_calls_without_a_message() -> None:
    """Six hundred calls, of the probe's own address: the oldest that wait give way. No other bound
    ends them."""
    path, limits = HEALTH + "Check", Limits(health_message_s=3 * TIMEOUT_S)
    with (
        guarded_server(Authenticator([TOKEN]), limits=limits) as target,
        _connect(target) as flood,
        grpc.insecure_channel(target) as channel,
    ):
        numbers, empty = range(1, 1200, 2), bytes(5)
        heads = [http2.head(target, path, number) for number in numbers]
        flood.sendall(http2.greeting() + b"".join(heads))
        num_left, frames = len(numbers), http2.frames(flood)
        while num_left > limits.max_host_health_calls:
            assert check(channel, "liveness") == SERVING
            for kind, flags, _ in itertools.islice(frames, 40):
                num_left -= kind == http2.HEADERS and http2.ends_stream(kind, flags)
                if num_left == limits.max_host_health_calls:
                    break
        messages = [http2.frame(http2.DATA, http2.END_STREAM, number, empty) for number in numbers]
        flood.sendall(b"".join(messages))
        while num_left:
            kind, flags, _ = next(frames)
            num_left -= kind == http2.HEADERS and http2.ends_stream(kind, flags)


@pytest.mark.parametrize(
    ("path", "is_silent"),
    [
        (SERVICE + "Generate", True),
        (SERVICE + "Generate", False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
    ],
)
async def test_a_message_must_arrive_in_time(path: str, is_silent: bool) -> None:
    async with channel_to(limits=Limits(message_s=0.05) if is_silent else None) as channel:
        call = channel.stream_stream(path)()
        if not is_silent:
            await call.done_writing()
        assert await code(call) is Code.INVALID_ARGUMENT
        assert ("0.05 s" in await call.details()) == is_silent


def test_calls_wait_while_the_loop_is_busy() -> None:
    """By default gRPC ends some of those beyond 1000 with CANCELLED before Python sees them."""
    is_free = threading.Event()

    class Busy(Authenticator):
        def identify(self, *sent: Any) -> Any:
            assert is_free.wait(TIMEOUT_S)
            return super().identify(*sent)

    with guarded_server(Busy([TOKEN])) as target, _connect(target) as flood:
        path, numbers = SERVICE + "Generate", range(1, 2 * 1270, 2)
        calls = [http2.call(target, path, b"", number) for number in numbers]
        # gRPC answers the ping when it has read the calls before it.
        flood.sendall(http2.greeting() + b"".join(calls) + http2.frame(http2.PING, 0, 0, bytes(8)))
        ends: list[int | None] = []
        for kind, flags, payload in http2.frames(flood):
            if kind == http2.PING and flags & http2.ACK:
                is_free.set()
            if http2.ends_stream(kind, flags):
                ends.append(http2.read_status(payload))
            if len(ends) == len(calls):
                break
    assert is_free.is_set()
    assert set(ends) == {Code.UNAUTHENTICATED.value[0]}


async def test_a_call_that_gives_way_takes_no_other_calls_place() -> None:
    """When it wakes, a later call has ended."""
    calls = UntrustedCalls(Limits(max_host_health_calls=1, health_message_s=2 * TIMEOUT_S))
    gave_way, came = asyncio.Event(), asyncio.Event()

    async def begin_first() -> None:
        async with calls.message_of("a"):
            try:
                await asyncio.sleep(3 * TIMEOUT_S)
            finally:
                gave_way.set()
                await came.wait()

    first = asyncio.create_task(begin_first())
    await asyncio.sleep(0)
    async with calls.message_of("a"):
        await asyncio.wait_for(gave_way.wait(), TIMEOUT_S)
    came.set()
    with pytest.raises(TimeoutError):
        await first


def test_a_connection_gets_its_limit_of_calls() -> None:
    limits = Limits(max_connection_calls=7, queue=QueueLimits(max_requests=2))
    with guarded_server(limits=limits) as target, _connect(target) as connection:
        connection.sendall(http2.greeting())
        kind, _, payload = next(http2.frames(connection))
    assert kind == http2.SETTINGS
    assert dict(struct.iter_unpack(">HL", payload))[http2.MAX_CONCURRENT_STREAMS] == 9


def test_connections_of_an_address_are_bounded_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above the bound end, also after a look that failed; older ones and those of other
    addresses go on."""

    def look(*_: object) -> None:
        if len(looks) == 1:
            raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(server, "_HOSTS_POLL_S", 0.01)
    looks = on_call(monkeypatch, server, "end_excess", look)
    with guarded_server(limits=Limits(max_host_connections=3)) as target, ExitStack() as stack:
        held = [stack.enter_context(_connect(target, OTHER)) for _ in range(3)]
        frames = [http2.frames(client) for client in held]
        for client, its in zip(held, frames, strict=True):
            client.sendall(http2.greeting())
            next(its)  # the server has accepted it
        count = len(looks) + 2
        wait_until(lambda: len(looks) >= count, TIMEOUT_S)
        for _ in range(3):
            with _connect(target, OTHER) as more, suppress(ConnectionError):
                while more.recv(4096):
                    pass
        with grpc.insecure_channel(target) as channel:
            assert check(channel, "liveness") == SERVING
        for client, its in zip(held, frames, strict=True):
            client.sendall(http2.frame(http2.PING, 0, 0, bytes(8)))
            assert any((kind, flags) == (http2.PING, http2.ACK) for kind, flags, _ in its)


def test_an_open_call_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping goes over it, so that no proxy takes it for dead."""
    monkeypatch.setattr(server, "_PING_MS", 50)
    with guarded_server() as target, _connect(target) as client:
        watch = http2.call(target, HEALTH + "Watch", b"")
        client.sendall(http2.greeting() + watch)
        assert any(kind == http2.PING and not flags for kind, flags, _ in http2.frames(client))


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (b"\xf8\x07\x01" * 70_000, "unknown fields"),
        (pb.GenerateRequest(messages=pb.Conversation(messages=[pb.Message()] * 4097)), "messages"),
        (_sampling(bad_words_token_ids=[pb.TokenIds()] * 1025), "bad_words_token_ids"),
        (_sampling(stop=[""] * 2000), "stop"),
        (_sampling(logit_bias=dict.fromkeys(range(16385), 1.0)), "logit_bias"),
    ],
)
async def test_entries_are_counted_before_a_parse(sent: Any, name: str) -> None:
    """The server still loads: a message that was parsed is answered with UNAVAILABLE."""
    data = sent if isinstance(sent, bytes) else sent.SerializeToString()
    async with channel_to() as channel:
        call = channel.unary_unary(SERVICE + "Generate")(data)
        assert await code(call) is Code.INVALID_ARGUMENT
        assert f"entries of {name}" in await call.details()


async def test_watchers_are_bounded_by_host_and_in_total() -> None:
    servicer = HealthServicer(64)
    request = health_pb2.HealthCheckRequest()

    def begin(host: str, port: int) -> Any:
        return servicer.Watch(request, SimpleNamespace(peer=lambda: f"ipv4:{host}:{port}"))

    open_ones = []
    for host in range(MAX_WATCHERS // 64):
        for port in range(64):
            open_ones.append(begin(f"10.0.0.{host}", port))
            await anext(open_ones[-1])
        with pytest.raises(QueueFullError, match="64 of them from your address") as caught:
            await anext(begin(f"10.0.0.{host}", 99))
        assert caught.value.retry_after_s > 0
    with pytest.raises(QueueFullError, match=r"1024 calls watch.*; 0 of them"):
        await anext(begin("10.0.0.99", 1))
    await open_ones[0].aclose()
    await anext(begin("10.0.0.99", 1))
    for stream in open_ones:
        await stream.aclose()


def test_clients_that_do_not_read_lose_their_places(strict: ServerProcess) -> None:
    params = sampling(max_tokens=400, ignore_eos=True, logprobs=20)
    asked = pb.GenerateRequest(prompt="Once upon a time", sampling=params).SerializeToString()
    silent = (strict.target, SERVICE + "GenerateStream", asked, OTHER)
    models = request("/v1/models")
    with ExitStack() as stack:
        tried = [stack.enter_context(SilentReader(*silent)) for _ in range(4)]
        wait_until(lambda: any(call.ended.is_set() for call in tried), TIMEOUT_S)
        readers = [call for call in tried if not call.ended.is_set()]
        assert len(readers) == 3, "one is refused"
        other = stack.enter_context(_connect(strict.http_address, OTHER))
        answers = stack.enter_context(other.makefile("rb"))
        other.sendall(models)
        refusal = read_answer(answers)
        assert (refusal.status, refusal.headers["retry-after"]) == (429, "1")
        assert "one client may have 3 (--max-client-requests)" in refusal.error["message"]
        wait_until(lambda: strict.loads().num_open_calls == 0, TIMEOUT_S)
        assert [reader.num_data_bytes for reader in readers] == [0] * 3
        other.sendall(models)
        assert read_answer(answers).status == 429, "what it has not read counts as its own"
        assert len(readers[0].read_all(TIMEOUT_S)) < 400
        other.sendall(models)
        wait_until(lambda: read_answer(answers).status == 200 or other.sendall(models), TIMEOUT_S)
    with _connect(strict.http_address, OTHER, buffer=4096) as client:
        body = json.dumps({"prompt": "Once", "temperature": 1.0, **STREAM_ALL}).encode()
        client.sendall(posted(body).replace(b"/tokenize", b"/v1/completions"))
        assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: strict.loads().num_open_calls == 0, TIMEOUT_S)
        with pytest.raises(ConnectionResetError):
            list(iter(lambda: client.recv(1 << 16), b""))


def test_readiness_counts_places() -> None:
    limits = Limits(max_calls=1, queue=QueueLimits(max_requests=1))
    health = SimpleNamespace(ready=True, alive=True, reason=None)
    with open_port(limits=limits) as port:
        port.state.engine = SimpleNamespace(health=lambda: health)  # type: ignore[assignment]
        port.state.state = State.RUNNING
        with port.state.calls.counted("one"):
            assert port.send(request("/ready")).status == 200
            with port.state.calls.counted("one"):
                answer = port.send(request("/ready"))
                assert answer.status == 503
                assert b"all 2 places for calls are taken, by 1 client;" in answer.body
                statuses = [port.send(request(path)).status for path in ("/health", "/v1/models")]
                assert statuses == [200, 429], "the doors share the places"
        assert port.send(request("/ready")).status == 200


def test_silent_connections_leave_descriptors_for_new_ranks(strict: ServerProcess) -> None:
    with ExitStack() as stack:
        stream = stack.enter_context(running(strict.stub, long_request(1500)))
        rank = strict.stub.GetServerInfo(pb.GetServerInfoRequest()).ranks[0]
        for _ in range(150):
            stack.enter_context(_connect(strict.http_address, OTHER))
            stack.enter_context(_connect(strict.target, OTHER))
        wait_until(lambda: strict.system.num_fds() > MAX_FILES // 2, TIMEOUT_S)
        with _connect(strict.http_address, "127.0.0.1") as new, new.makefile("rb") as answers:
            new.sendall(request("/ready"))
            assert read_answer(answers).status == 200, "the others have the places of one address"
        os.kill(rank_pid(rank), signal.SIGKILL)
        tokens = [len(output.token_ids) for message in stream for output in message.outputs]
        assert sum(tokens) > 1400
        assert strict.system.num_fds() < MAX_FILES - 64
        with grpc.insecure_channel(strict.target) as channel:
            stub = tpengine_pb2_grpc.GenerationServiceStub(channel)
            assert stub.Generate(long_request(1), wait_for_ready=True, timeout=TIMEOUT_S).finished
    assert strict.stub.GetServerInfo(pb.GetServerInfoRequest()).recoveries == 1
