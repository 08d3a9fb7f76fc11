"""A gRPC stream over a bare socket whose reader gives the server no window to write into.

Libraries read ahead on their own, so that their server never notices a program which does not read;
this one answers pings, like a healthy connection, and takes no byte of data before it is told to.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_STREAM = 1
_WIDE = 1 << 30
_POLL_S = 0.2


class SilentReader:
    """One call of a streaming method; nothing of its answer is taken until `read_all`.

    Args:
        target: HOST:PORT of a server without TLS.
        method: /package.Service/Method.
        request: the request, serialised.
    """

    def __init__(self, target: str, method: str, request: bytes) -> None:
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._data = bytearray()
        self.num_data_bytes = 0
        self.ended = threading.Event()
        self._closed = threading.Event()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": target,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        body = struct.pack(">BI", 0, len(request)) + request
        self._send_lock = threading.Lock()
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
            + _frame(_HEADERS, _END_HEADERS, _STREAM, _plain_headers(headers))
            + _frame(_DATA, END_STREAM, _STREAM, body)
        )
        self._socket.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._read_frames, daemon=True)
        self._thread.start()

    def read_all(self, timeout_s: float) -> list[bytes]:
        """Opens the window, and returns the messages of the whole stream."""
        widen = struct.pack(">I", _WIDE)
        with self._send_lock:
            self._socket.sendall(
                _frame(_WINDOW_UPDATE, 0, 0, widen) + _frame(_WINDOW_UPDATE, 0, _STREAM, widen)
            )
        assert self.ended.wait(timeout_s), f"the stream has not ended within {timeout_s} s"
        messages, rest = [], bytes(self._data)
        while rest:
            (length,) = struct.unpack(">xI", rest[:5])
            messages.append(rest[5 : 5 + length])
            rest = rest[5 + length :]
        return messages

    def close(self) -> None:
        """Drops the connection."""
        self._closed.set()
        self._socket.close()
        self._thread.join(10)

    def _read_frames(self) -> None:
        try:
            while not self._closed.is_set():
                head = self._take(9)
                length, (kind, flags, stream) = (
                    int.from_bytes(head[:3], "big"),
                    struct.unpack(">BBI", head[3:]),
                )
                self._handle(kind, flags, stream, self._take(length))
        except OSError:
            self.ended.set()

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (_PING, _SETTINGS) and not flags & _ACK:
            answer = payload if kind == _PING else b""
            with self._send_lock:
                self._socket.sendall(_frame(kind, _ACK, 0, answer))
        elif kind == _DATA:
            self.num_data_bytes += len(payload)
            self._data += payload
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & END_STREAM):
            self.ended.set()

    def _take(self, num_bytes: int) -> bytes:
        taken = b""
        while len(taken) < num_bytes:
            try:
                part = self._socket.recv(num_bytes - len(taken))
            except TimeoutError:
                if self._closed.is_set():
                    raise
                continue
            if not part:
                raise ConnectionError("the server has gone")
            taken += part
        return taken

    def __enter__(self) -> SilentReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _plain_headers(headers: dict[str, str]) -> bytes:
    """Each header as a literal without an index and without Huffman's code (RFC 7541, 6.2.2)."""
    block = b""
    for name, value in headers.items():
        assert max(len(name), len(value)) < 127, "longer ones need more than one byte of length"
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block
