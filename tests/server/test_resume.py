"""Streams that resume: what is kept, for whom, how long, and that no token is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from client.talks import collect, joined_parts
from support.server_process import ServerProcess, serving, wait_until

from server import calls
from server.cutting_proxy import CuttingProxy
from server.http import openai_door as http_door
from server.http.openai_door import QUESTIONS, joined
from server.processes import rank_pid
from tpengine import errors
from tpengine.client.generation_client import GenerationClient
from tpengine.proto import tpengine_pb2 as pb
from tpengine.server.kept_streams import KeptStream, KeptStreams, Resumption
from tpengine.server.limits import Limits, OpenCalls

Code = grpc.StatusCode
ONE, TWO, ADMIN = (f"{name}-0123456789abcdef" for name in ("one", "two", "admin"))
WINDOW_S, LONG = 120.0, 1900
OPTIONS = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--max-model-len", "2048"]
AT_ONCE = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that keeps streams, for two clients and the operator."""
    folder = tmp_path_factory.mktemp("resume")
    options = ["--http-port", "0", "--resume-window", str(WINDOW_S)]
    options += calls.token_files(folder, ONE, TWO, admin=ADMIN)
    with serving(folder, *OPTIONS, *options) as process:
        yield process


def loads(server: ServerProcess) -> pb.GetLoadsResponse:
    return server.stub.GetLoads(pb.GetLoadsRequest(), **calls.as_client(ADMIN))


def holds(server: ServerProcess, num_running: int, num_kept: int | None = None) -> None:
    """Waits until this many requests run and this many streams are kept (None: any number). If no
    request is to run, also until all blocks are free."""

    def is_so() -> bool:
        now = loads(server)
        kept = now.num_kept_streams == num_kept or num_kept is None
        free = num_running or now.num_free_blocks == now.num_total_blocks
        return now.num_running == num_running and kept and bool(free)

    wait_until(is_so, calls.TIMEOUT_S, more=lambda: str(loads(server)))


class Door:
    """Begins and resumes streams of one client, and ends them all at the end.

    Attributes:
        after: where the stream begins that was opened last.
        positions: after each piece that was read last; under load a piece has several tokens.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.keys: set[str] = set()
        self.after = 0
        self.positions = [0]

    def open(
        self, key: str, after: int = 0, length: int = LONG, window_s: float = WINDOW_S,
        token: str = ONE,
    ) -> Any:  # fmt: skip
        """A stream that begins, or goes on after a position."""
        self.keys.add(key)
        self.after = after
        return self.begin(key, after, length, window_s, token)

    def begin(self, key: str, after: int, length: int, window_s: float, token: str) -> Any:
        raise NotImplementedError

    def abort(self, key: str, token: str = ADMIN) -> bool:
        request = pb.AbortRequest(request_id=key)
        return self.server.stub.Abort(request, **calls.as_client(token)).aborted

    def close(self) -> None:
        for key in self.keys:
            self.abort(key)
        holds(self.server, 0, 0)


class Grpc(Door):
    """Over gRPC; a position is a number of tokens."""

    def begin(self, key: str, after: int, length: int, window_s: float, token: str) -> Any:
        request = calls.long_request(
            length, request_id=key, resume_window_s=window_s, resume_from=after
        )
        return self.server.stub.GenerateStream(request, **calls.as_client(token))

    def read(self, stream: Any, count: int | None = None) -> list[int]:
        """The first `count` tokens or some more; None: all."""
        assert 0 < float(dict(stream.initial_metadata())["x-resume-window"]) <= WINDOW_S
        token_ids: list[int] = []
        self.positions = [self.after]
        while count is None or len(token_ids) < count:
            message = next(stream, None)
            if message is None:
                break
            token_ids += [token for output in message.outputs for token in output.token_ids]
            self.positions.append(self.after + len(token_ids))
        return token_ids

    def leave(self, stream: Any) -> None:
        stream.cancel()

    def fault(self, stream: Any) -> str:
        """How a stream is refused or ends, in HTTP's codes."""
        codes = {Code.NOT_FOUND: "stream_not_kept", Code.ALREADY_EXISTS: "duplicate_request_id"}
        codes |= {Code.CANCELLED: "request_aborted", Code.UNAVAILABLE: "draining"}
        return codes[calls.refused(lambda timeout: stream).code]


class Http(Door):
    """Over HTTP; a position is the id of an event.

    Attributes:
        gateway_id: of all requests; empty: each has its key.
    """

    gateway_id = ""

    def begin(self, key: str, after: int, length: int, window_s: float, token: str) -> Any:
        body = {"prompt": [5, 6, 7], "max_tokens": length, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.0, "return_token_ids": True, "detokenize": False}
        headers = {"idempotency-key": key, "x-resume-window": str(window_s)}
        headers["x-request-id"] = self.gateway_id or key
        if after:
            headers["last-event-id"] = str(after)
        return post(self.server, "/v1/completions", body, headers, token)

    def read(self, stream: HTTPResponse, count: int | None = None) -> list[int]:
        assert stream.status == 200, stream.read()
        assert 0 < float(stream.headers["x-resume-window"]) <= WINDOW_S
        token_ids: list[int] = []
        self.positions = [self.after]
        for number, data in events(stream):
            if data != "[DONE]":
                token_ids += json.loads(data)["choices"][0]["token_ids"]
                self.positions.append(number)
                if count is not None and len(token_ids) >= count:
                    break
        return token_ids

    def leave(self, stream: HTTPResponse) -> None:
        stream.close()

    def fault(self, stream: HTTPResponse) -> str:
        data = [*events(stream)][-1][1] if stream.status == 200 else stream.read()
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["code"])


def post(
    server: ServerProcess, path: str, body: dict[str, Any], headers: dict[str, str],
    token: str = ONE, host: str | None = None,
) -> HTTPResponse:  # fmt: skip
    door = http_door.Door(f"http://{host}" if host else server.http_address, token)
    return door.open(path, body, **headers, connection="close")


def events(answer: HTTPResponse) -> Iterator[tuple[int, str]]:
    """The complete events of a stream with their ids, until it ends or breaks; an error has the
    id 0."""
    number, data = 0, ""
    with suppress(OSError, HTTPException):
        while line := answer.readline():
            name, _, value = line.decode().partition(": ")
            if name == "id":
                number = int(value)
            elif name == "data":
                data = value.removesuffix("\n")
            elif line == b"\n":
                yield number, data
                number, data = 0, ""


@pytest.fixture(params=[Grpc, Http])
def door(request: Any, server: ServerProcess) -> Iterator[Any]:
    door = request.param(server)
    yield door
    door.close()


def test_a_stream_goes_on_without_a_reader(door: Any) -> None:
    first = door.open("goes-on", length=300, window_s=2 * WINDOW_S)
    begun = door.read(first, 5)
    door.leave(first)
    holds(door.server, 0, 1)  # it runs to its end
    rest = door.read(door.open("goes-on", after=door.positions[-1], length=300))
    assert len(begun + rest) == 300
    # The last piece may be lost, and so may all of it.
    last = door.read(door.open("goes-on", after=door.positions[-2], length=300))
    assert last == rest[-len(last) :] != []
    assert door.read(door.open("goes-on", length=300)) == begun + rest
    assert door.read(door.open("other", length=300)) == begun + rest


def test_a_new_reader_takes_over(door: Any) -> None:
    old = door.open("taken")
    begun = door.read(old, 3)
    new = door.open("taken", after=door.positions[-1])
    assert door.fault(old) == "request_aborted"
    assert len(begun + door.read(new, 9)) >= 12


def test_only_its_owner_may_resume(door: Any) -> None:
    own = door.open("shared")
    begun = door.read(own, 4)
    position = door.positions[-1]
    assert door.fault(door.open("shared", after=position, token=TWO)) == "stream_not_kept"
    others = door.open("shared", token=TWO)
    assert door.read(others, 4)[:4] == begun[:4], "a request of its own"
    assert not door.abort("unknown", token=TWO)
    assert door.abort("shared", token=TWO)
    assert door.fault(others) == "request_aborted"
    door.leave(own)
    assert len(door.read(door.open("shared", after=position), 9)) >= 9
    assert door.fault(door.open("shared", length=LONG - 1)) == "duplicate_request_id"


def test_streams_with_one_request_id_have_keys_of_their_own(server: ServerProcess) -> None:
    door = Http(server)
    door.gateway_id = "of-all"
    for key, stream in [(key, door.open(key)) for key in ("k1", "k2")]:
        door.after = 0
        begun = door.read(stream, 3)
        door.leave(stream)
        assert len(begun + door.read(door.open(key, after=door.positions[-1]), 9)) >= 12
    assert door.abort("of-all", token=ONE)
    holds(server, 0, 0)


@pytest.mark.parametrize("has_reader", [True, False])
def test_an_abort_ends_it(door: Any, has_reader: bool) -> None:
    stream = door.open("aborted")
    door.read(stream, 2)
    if not has_reader:
        door.leave(stream)
    assert door.abort("aborted", token=ONE)
    if has_reader:
        assert door.fault(stream) == "request_aborted"
    holds(door.server, 0, 0)
    assert door.fault(door.open("aborted", after=2)) == "stream_not_kept"
    assert not door.abort("aborted")
    assert door.read(door.open("aborted", length=2)), "the key is free"


def test_a_stream_that_has_ended_is_aborted_beside_that_of_another_client(door: Any) -> None:
    running = door.open("both")
    door.read(running, 2)
    assert len(door.read(door.open("both", length=3, token=TWO))) == 3
    assert door.abort("both", token=TWO)
    assert door.fault(door.open("both", after=3, token=TWO)) == "stream_not_kept"
    assert door.read(running, 2), "the other one goes on"


def test_without_a_reader_in_time_all_is_freed(door: Any) -> None:
    """While there is a reader, the window may pass."""
    stream = door.open("late", window_s=0.1)
    assert len(door.read(stream, 200)) >= 200
    door.leave(stream)
    holds(door.server, 0, 0)
    assert loads(door.server).num_kept_bytes == 0
    assert door.fault(door.open("late", after=1)) == "stream_not_kept"


@pytest.mark.parametrize("window_s", [0.0, None])
def test_other_streams_end_with_their_reader(server: ServerProcess, window_s: float | None) -> None:
    """Their blocks are free at once: no window begins."""
    request = calls.long_request(LONG, request_id="other", resume_window_s=window_s)
    stream = server.stub.GenerateStream(request, **calls.as_client(ONE))
    next(stream)
    assert "x-resume-window" not in dict(stream.initial_metadata())
    body = {"prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    headers = {} if window_s is None else {"x-resume-window": "0"}
    answer = post(server, "/v1/completions", body, {"idempotency-key": "other", **headers})
    assert answer.readline().startswith(b"data: "), "without ids"
    assert answer.headers["x-resume-window"] is None
    steps = loads(server).num_steps
    stream.cancel()
    answer.close()
    holds(server, 0, 0)
    assert loads(server).num_steps < steps + LONG / 2


def test_a_position_is_the_end_of_a_message(server: ServerProcess) -> None:
    request = pb.GenerateRequest(
        prompt_token_ids=calls.ids(5, 6, 7), request_id="inside", resume_window_s=WINDOW_S
    )
    params = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    request.sampling.CopyFrom(calls.sampling(**params, logprobs=2, prompt_logprobs=1))
    whole = [*server.stub.GenerateStream(request, **calls.as_client(ONE))]
    assert sum(len(output.token_ids) for output in whole[0].outputs) == 3
    for position in (1, 13, 999):
        request.resume_from = position
        refusal = calls.refused(server.stub.GenerateStream, request, metadata=calls.bearer(ONE))
        assert refusal.code is Code.NOT_FOUND
        assert f"begins after position {position} " in refusal.text
    request.resume_from = 3
    assert [*server.stub.GenerateStream(request, **calls.as_client(ONE))] == whole[1:]
    assert Grpc(server).abort("inside")


GOOD = {"idempotency-key": "k", "x-resume-window": "5"}


@pytest.mark.parametrize(
    ("headers", "fields", "word"),
    [
        ({"x-resume-window": "5"}, {}, "idempotency-key"),
        ({"last-event-id": "5"}, {}, "idempotency-key"),
        (GOOD, {"stream": False}, '"stream": true'),
        ({**GOOD, "x-resume-window": "soon"}, {}, "'soon'"),
        ({**GOOD, "x-resume-window": "-1"}, {}, "at least 0"),
        ({**GOOD, "last-event-id": "x"}, {}, "last-event-id"),
        ({**GOOD, "idempotency-key": "two words"}, {}, "idempotency-key"),
        (GOOD, {"prompt": [5] * 3000}, "maximum context length"),
    ],
)
def test_headers_that_cannot_be_used(
    server: ServerProcess, headers: dict[str, str], fields: dict[str, Any], word: str
) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 1, **fields}
    answer = post(server, "/v1/completions", body, headers)
    assert answer.status == 400
    assert word in json.load(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Generate", {"resume_from": 1, "request_id": "k"}),
        ("Generate", {"resume_window_s": 5.0}),
        ("GenerateStream", {"resume_window_s": 5.0}),
        ("GenerateStream", {"resume_window_s": float("nan"), "request_id": "k"}),
        ("GenerateStream", {"resume_from": -1, "request_id": "k"}),
    ],
)
def test_fields_refused(server: ServerProcess, method: str, fields: dict[str, Any]) -> None:
    request = pb.GenerateRequest(prompt="a", **fields)
    refusal = calls.refused(getattr(server.stub, method), request, metadata=calls.bearer(ONE))
    assert refusal.code is Code.INVALID_ARGUMENT
    assert any(name in refusal.text for name in fields)


class Kept(KeptStreams):
    """Kept streams without a server, whose requests do not end by themselves."""

    def __init__(self, **limits: int) -> None:
        bounds = Limits(resume_window_s=WINDOW_S, **limits)
        super().__init__(bounds, OpenCalls(bounds))

    def begin(self, key: str, account: str = "one") -> KeptStream:
        stream = self.try_to_begin(key, account)
        assert stream is not None, "there is no room to keep it"
        return stream

    def try_to_begin(self, key: str, account: str) -> KeptStream | None:
        asked = Resumption(account, key, b"", WINDOW_S, 0)
        return self.open(asked, key, lambda _: asyncio.Event().wait())


async def read_all(stream: KeptStream, positions: range, size: int) -> int:
    """Adds messages while a client reads them; returns how many it has got."""
    read: list[bytes] = []

    async def write(message: bytes) -> None:
        read.append(message)

    reading = asyncio.create_task(stream.send(stream.position, write))
    await asyncio.sleep(0)
    for position in positions:
        stream.add(b"x" * size, position)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    return len(read)


async def take(_: bytes) -> None:
    """Reads a message."""


async def bytes_of_a_stream(kept: Kept) -> None:
    """What was sent is dropped first; what no reader takes ends the stream."""
    stream = kept.begin("a")
    assert await read_all(stream, range(1, 40), 900) == 39
    assert stream.num_bytes <= 20_000
    words = "dropped for want of room; the stream has come to 39"
    with pytest.raises(errors.NotKeptError, match=words):
        await stream.send(3, take)
    stream.add(b"x" * 15_000, 40)
    with pytest.raises(errors.NotKeptError, match="wait for a reader"):
        stream.add(b"x" * 5000, 41)
    kept.drop(stream)
    assert kept.num_bytes == 0


async def bytes_of_all_streams(kept: Kept) -> None:
    """A stream that has ended gives way to one that runs."""
    ended, running = kept.begin("a"), kept.begin("b")
    ended.add(b"x" * 9000, 1)
    ended.end()
    running.add(b"x" * 9000, 1)
    assert (len(kept), kept.num_bytes) == (1, running.num_bytes)
    with pytest.raises(errors.NotKeptError, match="max_all_resume_bytes"):
        running.add(b"x" * 9000, 2)


async def shares_of_clients(kept: Kept) -> None:
    """What one client does not read gives way to others, up to their share. A client above its own
    is not kept any more, and a stream that is read goes on."""
    for number in range(4):
        kept.begin(f"flood-{number}", "flood").add(b"x" * 5000, 1)
    assert kept.try_to_begin("flood-4", "flood") is None
    stream = kept.begin("a", "other")
    assert await read_all(stream, range(1, 6), 3000) == 5
    assert stream.num_bytes > 15_000, "all of it is kept"
    assert len(kept) == 3, "no more streams of the flood gave way than needed"
    assert kept.num_bytes <= 40_000
    assert kept.try_to_begin("flood-4", "flood") is None
    assert kept.try_to_begin("third", "third") is not None
    assert await read_all(stream, range(6, 40), 3000) == 34


async def a_full_server(kept: Kept) -> None:
    """Without room a call is served unkept, and a stream that is read goes on."""
    streams = [kept.begin(account, account) for account in ("a", "b")]
    readings = [asyncio.create_task(s.send(0, take)) for s in streams]
    await asyncio.sleep(0)
    streams[1].add(b"x" * 8000, 1)
    assert kept.try_to_begin("more", "a") is None
    assert await read_all(streams[0], range(1, 9), 4000) == 8
    with pytest.raises(errors.NotKeptError, match="dropped for want of room"):
        await streams[0].send(1, take)
    assert not readings[1].done()


async def requests_without_a_reader(kept: Kept) -> None:
    """They count for their client until they end or are read."""
    streams = [kept.begin("a"), kept.begin("b")]
    words = r"2 requests of yours .* one client may have 1 "
    with pytest.raises(errors.QueueFullError, match=words):
        kept.begin("c")
    kept.begin("c", "other")
    streams[0].end()
    reading = asyncio.create_task(streams[1].send(0, take))
    await asyncio.sleep(0)
    kept.begin("c")
    streams[1].end(errors.RequestAbortedError("aborted"))
    with pytest.raises(errors.RequestAbortedError):
        await reading
    kept.begin("d")  # beside "c"; "a" has ended


@pytest.mark.parametrize(
    ("check", "limits"),
    [
        (bytes_of_a_stream, {"max_resume_bytes": 20_000}),
        (bytes_of_all_streams, {"max_all_resume_bytes": 20_000}),
        (shares_of_clients, {"max_all_resume_bytes": 40_000}),
        (a_full_server, {"max_all_resume_bytes": 17_000}),
        (requests_without_a_reader, {"max_client_requests": 1}),
    ],
)
def test_bounds(check: Any, limits: dict[str, int]) -> None:
    asyncio.run(check(Kept(**limits)))


async def cut_once(
    server: ServerProcess, before_cut: Callable[[CuttingProxy], Any], **options: Any
) -> None:
    """Reads a long stream by our client over a connection that is cut."""
    proxy = CuttingProxy(server.target, [3000], lambda: asyncio.to_thread(before_cut, proxy))
    async with proxy.listening() as target, GenerationClient(target, token=ONE) as client:
        params = {"max_tokens": LONG, "ignore_eos": True}
        await collect(client.stream([5, 6, 7], params, request_id="once", **options))


@pytest.mark.parametrize(
    "options",
    [{"resume_window_s": 0.5}, {"timeout_s": 3.0}, {"resume_window_s": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_our_client_gives_up_in_time(server: ServerProcess, options: dict[str, float]) -> None:
    """When the window or the deadline is over, or at once if it asks for no window."""

    async def talk() -> None:
        loop = asyncio.get_running_loop()

        def close(proxy: CuttingProxy) -> None:
            loop.call_soon_threadsafe(proxy.close)

        await asyncio.wait_for(cut_once(server, close, **options), WINDOW_S)

    # The deadline may be over before the connection is cut.
    with pytest.raises((errors.ServerUnavailableError, errors.DeadlineExceededError)):
        asyncio.run(talk())
    Grpc(server).abort("once")
    holds(server, 0, 0)


def test_our_client_tells_that_a_stream_is_lost(server: ServerProcess) -> None:
    with pytest.raises(errors.NotKeptError, match="no stream of yours with this key is kept"):
        asyncio.run(cut_once(server, lambda _: Grpc(server).abort("once")))


async def test_our_client_ends_what_it_leaves(server: ServerProcess) -> None:
    async def num_kept() -> int:
        return (await asyncio.to_thread(loads, server)).num_kept_streams

    async with GenerationClient(server.target, token=ONE) as client:
        left, cancelled, open_one = [
            client.stream([5, 6, 7], {"max_tokens": LONG, "ignore_eos": True}) for _ in range(3)
        ]
        await anext(left)
        assert await num_kept() == 1
        await left.aclose()
        assert await num_kept() == 0
        await anext(cancelled)
        reading = asyncio.create_task(collect(cancelled))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert await num_kept() == 0
        await anext(open_one)
    assert await num_kept() == 0


def test_a_whole_answer_comes_over_a_new_call(server: ServerProcess) -> None:
    """However early the connections break; and the request runs once."""
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 60, "ignore_eos": True}

    async def talk() -> tuple[Any, Any]:
        async with GenerationClient(server.target, token=ONE) as client:
            wanted = await client.generate([5, 6, 7], params, resume_window_s=0)
        begun = (await asyncio.to_thread(loads, server)).num_steps
        async with proxy.listening() as target, GenerationClient(target, token=ONE) as client:
            answer = await client.generate([5, 6, 7], params, request_id="whole")
        assert (await asyncio.to_thread(loads, server)).num_steps <= begun + 61
        return wanted, answer

    proxy = CuttingProxy(server.target, [60, 300, 500])
    wanted, answer = asyncio.run(talk())
    assert proxy.num_cuts == 3
    assert answer.outputs == wanted.outputs
    assert answer.usage.num_output_tokens == 180
    assert Grpc(server).abort("whole")


def test_our_client_takes_an_answer_for_no_reason_to_try_again(server: ServerProcess) -> None:
    with pytest.raises(errors.InvalidPriorityError):
        asyncio.run(cut_once(server, print, priority=1, resume_window_s=WINDOW_S))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that loses its rank, and is drained by the last test that has it."""
    folder = tmp_path_factory.mktemp("alone")
    options = ["--http-port", "0", "--resume-window", str(WINDOW_S), "--isolate"]
    options += ["--served-model-name", "one", "two", "--disable-log-requests"]
    options += calls.token_files(folder, ONE, admin=ADMIN)
    with ServerProcess(*OPTIONS, *options, log=folder / "log") as process:
        yield process


def test_a_rank_is_lost_while_no_client_reads(alone: ServerProcess) -> None:
    def about() -> Any:
        return alone.stub.GetServerInfo(pb.GetServerInfoRequest(), **calls.as_client(ONE))

    doors = [Grpc(alone), Http(alone)]
    wanted = doors[0].read(doors[0].open("undisturbed", length=800))
    begun = []
    for key, door in enumerate(doors):
        stream = door.open(f"lost-{key}", length=800)
        begun.append(door.read(stream, 5))
        door.leave(stream)
    os.kill(rank_pid(about().ranks[0]), signal.SIGKILL)
    for key, door in enumerate(doors):
        rest = door.read(door.open(f"lost-{key}", after=door.positions[-1], length=800))
        assert begun[key] + rest == wanted
    assert about().recoveries == 1


def answer_of(events: list[str]) -> dict[str, Any]:
    """What the events of a stream say together, without what differs between two requests."""
    *chunks, end = events
    assert end == "[DONE]"
    whole = joined([json.loads(chunk) for chunk in chunks])
    del whole["usage"]["prompt_tokens_details"]
    return {name: whole[name] for name in ("choices", "usage", "model", "object")}


def drawn_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 1.0, "seed": rng.randrange(1 << 30)}
    params |= {"n": rng.randint(1, 3), "max_tokens": rng.randint(16, 48), "min_tokens": 12}
    return params | rng.choice([{}, {"ignore_eos": True}, {"stop": [" the", "a"]}])


def drawn_budgets(rng: random.Random, num_bytes: int) -> list[int]:
    """Numbers of bytes after which one to three connections of a stream are cut."""
    return [rng.randrange(150, num_bytes) for _ in range(rng.randint(1, 3))]


async def cut_grpc(server: ServerProcess, rng: random.Random) -> int:
    """Reads a stream over a broken connection by our own client; returns the number of cuts."""
    params = drawn_params(rng)
    if rng.random() < 0.1:  # its only message comes at the end
        params = {"use_beam_search": True, "temperature": 0.0, "n": 2, "max_tokens": 16}
    question = rng.choice(QUESTIONS)
    prompt: Any = rng.choice([question, [{"role": "user", "content": question}], [5, 6, 7]])
    async with GenerationClient(server.target, token=ONE) as client:
        wanted = [part async for part in client.stream(prompt, params, resume_window_s=0)]
    least = 200 if "use_beam_search" in params else 250 + 50 * len(wanted)
    proxy = CuttingProxy(server.target, drawn_budgets(rng, least))
    async with proxy.listening() as target, GenerationClient(target, token=ONE) as client:
        parts = [part async for part in client.stream(prompt, params, resume_window_s=WINDOW_S)]
    for name in ("num_prompt_tokens", "num_output_tokens"):
        assert getattr(parts[-1].usage, name) == getattr(wanted[-1].usage, name)
    assert joined_parts(parts) == joined_parts(wanted)
    return proxy.num_cuts


async def cut_http(server: ServerProcess, rng: random.Random) -> int:
    """The same over HTTP, where the client repeats its request with the last id."""
    body = drawn_params(rng) | {"stream": True, "stream_options": {"include_usage": True}}
    body["return_token_ids"] = True
    path, question = "/v1/completions", rng.choice(QUESTIONS)
    if rng.random() < 0.5:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question}]
    else:
        body["prompt"] = rng.choice([question, [5, 6, 7], QUESTIONS])
    whole = await asyncio.to_thread(lambda: [*events(post(server, path, body, {}))])
    wanted = [data for _, data in whole]
    budgets = drawn_budgets(rng, sum(map(len, wanted)))
    proxy = CuttingProxy(urlsplit(server.http_address).netloc, budgets)
    key, received = f"cut-{rng.random()}", []
    headers = {"idempotency-key": key, "x-resume-window": str(WINDOW_S)}
    async with proxy.listening() as host:

        def read() -> None:
            with suppress(OSError, HTTPException):
                for number, data in events(post(server, path, body, headers, host=host)):
                    assert number == len(received) + 1
                    received.append(data)
                    headers["last-event-id"] = str(number)

        for _ in range(10):
            if received[-1:] != ["[DONE]"]:
                await asyncio.to_thread(read)
    assert answer_of(received) == answer_of(wanted)
    return proxy.num_cuts


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.soak)])
def test_cut_streams_end_with_the_output_of_uncut_ones(server: ServerProcess, count: int) -> None:
    rng = random.Random(23)
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(place: int) -> int:
        async with at_once:
            cut = cut_grpc if place % 2 else cut_http
            async with asyncio.timeout(calls.TIMEOUT_S):
                while not (num_cuts := await cut(server, seeds[place])):
                    pass  # under load messages are merged, and the stream ends before the cut
            return num_cuts

    async def all_cuts() -> list[int]:
        return await asyncio.gather(*map(one, range(count)))

    seeds = [random.Random(rng.random()) for _ in range(count)]
    cuts = asyncio.run(all_cuts())
    print(f"{count} streams, {sum(cuts)} cuts")


def test_a_server_that_drains_ends_kept_streams(alone: ServerProcess) -> None:
    """The last test of this server. What has not finished in time is aborted with an error."""
    stub, doors = alone.stub, [Grpc(alone), Http(alone)]
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), **calls.as_client(ONE)).model == "one"
    unary = stub.Generate.future(calls.long_request(LONG, model="two"), **calls.as_client(ONE))
    read, left = ([(door, door.open(f"{key}-{place}")) for place, door in enumerate(doors)]
                  for key in ("read", "left"))  # fmt: skip
    for door, stream in (*read, *left):
        door.read(stream, 2)
    for door, stream in left:
        door.leave(stream)
    drain = pb.DrainRequest(timeout_ms=1000)
    refusal = calls.refused(stub.Drain, drain, metadata=calls.bearer(ONE))
    assert refusal.code is Code.PERMISSION_DENIED
    stub.Drain(drain, **calls.as_client(ADMIN))
    _, over_http = doors
    again = over_http.open("left-1", after=2)  # while it drains
    for door, stream in (*read, (over_http, again)):
        assert door.fault(stream) == "draining"
    assert calls.refused(lambda timeout: unary.result(timeout)).code is Code.UNAVAILABLE
    assert alone.process.wait(calls.TIMEOUT_S) == 0
    assert "request '" not in alone.log.read_text()
