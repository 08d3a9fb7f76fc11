"""A gRPC stream over a bare socket whose reader gives the server no window to write into.

Libraries read ahead on their own, so that their server never notices a program which does not read;
this one answers pings, like a healthy connection, and takes no byte of data before it is told to.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from support import http2

_WIDE = struct.pack(">I", 1 << 30)


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
        self._socket.settimeout(None)  # until `close`
        self._data = bytearray()
        self.ended = threading.Event()
        self._socket.sendall(http2.opening(target, method, request, window=0))
        self._thread = threading.Thread(target=self._read_frames, daemon=True)
        self._thread.start()

    @property
    def num_data_bytes(self) -> int:
        """Of the answer, so far."""
        return len(self._data)

    def read_all(self, timeout_s: float) -> list[bytes]:
        """Opens the window, and returns the messages of the whole stream."""
        wide = (http2.frame(http2.WINDOW_UPDATE, 0, stream, _WIDE) for stream in (0, http2.STREAM))
        self._socket.sendall(b"".join(wide))
        assert self.ended.wait(timeout_s), f"the stream has not ended within {timeout_s} s"
        return list(http2.messages(bytes(self._data)))

    def _read_frames(self) -> None:
        with suppress(OSError):
            for kind, flags, payload in http2.frames(self._socket):
                if kind == http2.DATA:
                    self._data += payload
                if http2.ends_stream(kind, flags):
                    self.ended.set()
        self.ended.set()

    def __enter__(self) -> SilentReader:
        return self

    def __exit__(self, *error: object) -> None:
        """Drops the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
