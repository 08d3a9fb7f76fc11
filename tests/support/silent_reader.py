"""A gRPC stream over a bare socket whose reader gives the server no window to write into.

Libraries read ahead on their own, so that their server never notices a program which does not read;
this one answers pings, like a healthy connection, and takes no byte of data before it is told to.
"""

from __future__ import annotations

import socket
import struct
import threading

from support import http2

_WIDE = struct.pack(">I", 1 << 30)
_POLL_S = 0.2


class SilentReader:
    """One call of a streaming method; nothing of its answer is taken until `read_all`.

    Args:
        target: HOST:PORT of a server without TLS.
        method: /package.Service/Method.
        request: the request, serialised.
        source: the address of this side; default: any.
    """

    def __init__(self, target: str, method: str, request: bytes, source: str = "") -> None:
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 10, (source, 0))
        self._data = bytearray()
        self.num_data_bytes = 0
        self.ended = threading.Event()
        self._closed = threading.Event()
        self._send_lock = threading.Lock()
        self._socket.sendall(http2.opening(target, method, request, window=0))
        self._socket.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._read_frames, daemon=True)
        self._thread.start()

    def read_all(self, timeout_s: float) -> list[bytes]:
        """Opens the window, and returns the messages of the whole stream."""
        with self._send_lock:
            for stream in (0, http2.STREAM):
                self._socket.sendall(http2.frame(http2.WINDOW_UPDATE, 0, stream, _WIDE))
        assert self.ended.wait(timeout_s), f"the stream has not ended within {timeout_s} s"
        return list(http2.messages(bytes(self._data)))

    def close(self) -> None:
        """Drops the connection."""
        self._closed.set()
        self._socket.close()
        self._thread.join(10)

    def _read_frames(self) -> None:
        try:
            while not self._closed.is_set():
                length, kind, flags = http2.read_head(self._take(http2.HEAD_BYTES))
                self._handle(kind, flags, self._take(length))
        except OSError:
            self.ended.set()

    def _handle(self, kind: int, flags: int, payload: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(http2.reply(kind, flags, payload))
        if kind == http2.DATA:
            self.num_data_bytes += len(payload)
            self._data += payload
        if http2.ends_stream(kind, flags):
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

    def __exit__(self, *error: object) -> None:
        self.close()
