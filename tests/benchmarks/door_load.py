"""Clients that cost next to nothing: they count messages and read none. See `doors.py`."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from dataclasses import dataclass

from support import http2

from tpengine.proto import tpengine_pb2 as pb

TIMEOUT_S = 600.0
_METHOD = "/tpengine.v1.GenerationService/GenerateStream"
_WINDOW = 1 << 30
_EVENT = b"\n\n"


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        door: "HTTP", with a connection for each stream, or "gRPC", with one for all.
        address: HOST:PORT.
        num_streams: requests, which arrive at once, each for a stream of `num_output` tokens.
    """

    door: str
    address: str
    num_streams: int
    num_prompt: int
    num_output: int
    vocab_size: int
    seed: int = 0


@dataclass(frozen=True)
class LoadResult:
    """What came of it; times in seconds, `own_s` is the CPU time of the clients."""

    elapsed_s: float
    num_messages: int
    own_s: float


class _Stream:
    """One answer, whose messages are counted."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.data = b""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, problem: str = "") -> None:
        if not self.ended.done():
            self.ended.set_result(problem)


class _Http(asyncio.Protocol):
    """A connection for one stream of server-sent events."""

    def __init__(self, stream: _Stream, request: bytes) -> None:
        self._stream, self._request, self._last = stream, request, b""

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._last and not data.startswith(b"HTTP/1.1 200"):
            self._stream.end(data[:500].decode(errors="replace"))
        is_split = self._last == b"\n" and data.startswith(b"\n")
        self._stream.num_messages += data.count(_EVENT) + is_split
        self._last = data[-1:]

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.num_messages -= 1  # the last event says that it is the last one
        self._stream.end("" if error is None else f"{error!r}")


class _Grpc(asyncio.Protocol):
    """A connection for many calls."""

    def __init__(self, address: str) -> None:
        self._address, self._data = address, b""
        self._streams: dict[int, _Stream] = {}

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport, wide = transport, struct.pack(">I", _WINDOW)
        transport.write(http2.greeting(_WINDOW) + http2.frame(http2.WINDOW_UPDATE, 0, 0, wide))

    def call(self, stream: _Stream, request: bytes) -> None:
        number = 2 * len(self._streams) + 1
        self._streams[number] = stream
        self._transport.write(http2.call(self._address, _METHOD, request, number))

    def data_received(self, data: bytes) -> None:
        data, at = self._data + data, 0
        while len(data) >= (start := at + http2.HEAD_BYTES):
            length, kind, flags = http2.read_head(data[at:start])
            if start + length > len(data):
                break
            number = int.from_bytes(data[at + 5 : start], "big")
            at = start + length
            self._transport.write(http2.reply(kind, flags, data[start:at]))
            if number in self._streams:
                self._read(self._streams[number], kind, flags, data[start:at])
        self._data = data[at:]

    def _read(self, stream: _Stream, kind: int, flags: int, payload: bytes) -> None:
        if kind == http2.DATA:
            stream.data += payload
            while len(stream.data) >= (size := 5 + int.from_bytes(stream.data[1:5], "big")):
                stream.data = stream.data[size:]
                stream.num_messages += 1
        elif kind == http2.HEADERS and http2.read_status(payload):
            stream.end(payload.decode(errors="replace"))
        if http2.ends_stream(kind, flags):
            stream.end()

    def connection_lost(self, error: Exception | None) -> None:
        for stream in self._streams.values():
            stream.end(f"the connection is lost: {error}")


def run_load(load: Load) -> LoadResult:
    """Runs the clients to the end of their streams.

    Raises:
        ConnectionError: a stream was refused, or ended with an error.
    """
    return asyncio.run(asyncio.wait_for(_run_streams(load), TIMEOUT_S))


async def _run_streams(load: Load) -> LoadResult:
    loop, rng = asyncio.get_running_loop(), random.Random(f"{load}")  # none in the prefix cache
    host, _, port = load.address.rpartition(":")
    make = _over_grpc if load.door == "gRPC" else _over_http
    requests = [
        make([rng.randrange(5, load.vocab_size) for _ in range(load.num_prompt)], load.num_output)
        for _ in range(load.num_streams)
    ]
    streams = [_Stream() for _ in requests]
    own, start = time.process_time(), time.perf_counter()
    if load.door == "gRPC":
        _, grpc = await loop.create_connection(lambda: _Grpc(load.address), host, int(port))
        for stream, request in zip(streams, requests, strict=True):
            grpc.call(stream, request)
    else:
        protocols = map(_Http, streams, requests)
        connecting = (loop.create_connection(lambda p=p: p, host, int(port)) for p in protocols)
        await asyncio.gather(*connecting)
    for problem in await asyncio.gather(*(stream.ended for stream in streams)):
        if problem:
            raise ConnectionError(problem)
    return LoadResult(
        time.perf_counter() - start,
        sum(stream.num_messages for stream in streams),
        time.process_time() - own,
    )


def _over_grpc(prompt: list[int], num_output: int) -> bytes:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    ids = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(prompt_token_ids=ids, sampling=sampling).SerializeToString()


def _over_http(prompt: list[int], num_output: int) -> bytes:
    """A call whose connection ends with its answer."""
    body = {"prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}, separators=(",", ":")).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
