"""As much of HTTP/2 as one gRPC call on a connection of its own needs, to send and to understand.

For tests whose client must do what libraries do not let it do, or must cost next to nothing.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
STREAM = 1
"""The one call of a connection."""
HEAD_BYTES = 9
DEFAULT_WINDOW = 65535
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_END_HEADERS = 4
_HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 1, 3, 4
_STATUS_NAME = b"grpc-status"


def opening(target: str, method: str, request: bytes, window: int = DEFAULT_WINDOW) -> bytes:
    """All that a client has to say for a call.

    Args:
        target: HOST:PORT.
        method: /package.Service/Method.
        request: the request, serialised.
        window: bytes of the answer that the server may send unasked.
    """
    return greeting(window) + call(target, method, request)


def greeting(window: int = DEFAULT_WINDOW) -> bytes:
    """What a client says before its first call: see `opening`."""
    # Without a table of headers the server writes out every name, which `read_status` looks for.
    settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, window)
    return PREFACE + frame(SETTINGS, 0, 0, settings)


def call(target: str, method: str, request: bytes, stream: int = STREAM) -> bytes:
    """What a client says for one more call on a connection: see `opening`."""
    body = struct.pack(">BI", 0, len(request)) + request
    return head(target, method, stream) + frame(DATA, END_STREAM, stream, body)


def head(target: str, method: str, stream: int = STREAM) -> bytes:
    """The part of a call before its message."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": target,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return frame(HEADERS, _END_HEADERS, stream, _plain_headers(headers))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def read_head(head: bytes) -> tuple[int, int, int]:
    """(bytes of payload, kind, flags) of a frame's first `HEAD_BYTES`."""
    return int.from_bytes(head[:3], "big"), head[3], head[4]


def reply(kind: int, flags: int, payload: bytes) -> bytes:
    """What a frame of the server's wants for an answer; empty: nothing."""
    if kind in (PING, SETTINGS) and not flags & ACK:
        return frame(kind, ACK, 0, payload if kind == PING else b"")
    return b""


def ends_stream(kind: int, flags: int) -> bool:
    """Whether the call has ended with this frame."""
    return kind in (RESET, GO_AWAY) or (kind in (DATA, HEADERS) and bool(flags & END_STREAM))


def read_status(payload: bytes) -> int | None:
    """The number of gRPC's status in a block of headers; None: it is not there."""
    rest = payload.partition(_STATUS_NAME)[2]
    return int(rest[1 : 1 + rest[0]]) if rest else None


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """(kind, flags, payload) of each frame that the server sends, until it closes the connection;
    what wants an answer gets one."""
    with connection.makefile("rb") as stream:
        while head := stream.read(HEAD_BYTES):
            length, kind, flags = read_head(head)
            payload = stream.read(length)
            connection.sendall(reply(kind, flags, payload))
            yield kind, flags, payload


def messages(data: bytes) -> Iterator[bytes]:
    """The messages in a stream's data."""
    while data:
        (length,) = struct.unpack(">xI", data[:5])
        yield data[5 : 5 + length]
        data = data[5 + length :]


def _plain_headers(headers: dict[str, str]) -> bytes:
    """Each header as a literal without an index and without Huffman's code (RFC 7541, 6.2.2)."""
    block = b""
    for name, value in headers.items():
        assert max(len(name), len(value)) < 127, "longer ones need more than one byte of length"
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block
