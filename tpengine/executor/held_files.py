"""Descriptors that a node's agent holds for a rank, and that cannot be opened by `/proc`: those of
GPU memory, where this would open the device anew. They travel over a Unix socket.

Its name is an abstract one, to which every user of the machine may connect. So both sides check
that the other one is of the same user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence

from tpengine import host

_ANSWER_S = 5.0
_LOOK_S, _PAUSE_S = 1.0, 0.05
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class HeldFiles:
    """The descriptors of one rank, by name; a thread answers its `AgentFiles` until `close`.

    Args:
        address: any text, unique to the machine.

    Raises:
        OSError: no descriptor is left.
        RuntimeError: no thread is left.
    """

    def __init__(self, address: str) -> None:
        self._files: dict[str, int] = {}
        self._address = f"\0{address}"
        self._is_over = threading.Event()
        self._listener = _socket()
        self._listener.settimeout(_LOOK_S)
        self._listener.bind(self._address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="held files", daemon=True)
        host.start_thread(self._thread)

    def close(self) -> None:
        """Closes the descriptors; what another process has taken stays open there."""
        self._is_over.set()
        with _socket() as visitor, contextlib.suppress(OSError):  # closed already
            visitor.settimeout(_ANSWER_S)
            visitor.connect(self._address)  # ends the wait of the thread
        self._thread.join(_LOOK_S + _ANSWER_S)

    def _serve(self) -> None:
        with self._listener:
            while not self._is_over.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # nobody has come, or this process has no descriptor left
                    self._is_over.wait(_PAUSE_S)
                    continue
                with connection, contextlib.suppress(OSError, ValueError):
                    connection.settimeout(_ANSWER_S)
                    self._answer(connection)
        while self._files:
            os.close(self._files.popitem()[1])

    def _answer(self, connection: socket.socket) -> None:
        _check_user(connection)
        text, files = _receive(connection)
        order, name = text.decode().split(" ", 1)
        held = [self._files[name]] if order == "take" and name in self._files else []
        if order in ("put", "drop") and name in self._files:
            os.close(self._files.pop(name))
        if order == "put" and files:
            self._files[name] = files.pop()
        for file in files:
            os.close(file)
        socket.send_fds(connection, [b"."], held)


class AgentFiles:
    """A rank's way to its `HeldFiles`.

    Raises:
        OSError: of each method: the agent does not answer, or is another user's.
    """

    def __init__(self, address: str) -> None:
        self._address = f"\0{address}"

    def put(self, name: str, file: int) -> None:
        """Has the agent hold a descriptor, in place of one of the same name."""
        self._ask("put", name, [file])

    def take(self, name: str) -> int | None:
        """Returns a descriptor of its own for what was put; None: nothing was."""
        return next(iter(self._ask("take", name)), None)

    def drop(self, name: str) -> None:
        """Has the agent close what was put, if anything was."""
        self._ask("drop", name)

    def _ask(self, order: str, name: str, files: Sequence[int] = ()) -> list[int]:
        with _socket() as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(self._address)
            _check_user(connection)
            socket.send_fds(connection, [f"{order} {name}".encode()], files)
            answer, taken = _receive(connection)
        if not answer:
            raise ConnectionError(f"the agent of this rank's node did not {order} {name}")
        return taken


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    text, files, *_ = socket.recv_fds(connection, 256, 1, socket.MSG_CMSG_CLOEXEC)
    return text, files


def _check_user(connection: socket.socket) -> None:
    size = _CREDENTIALS.size
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    if user != os.geteuid():
        raise PermissionError(f"user {user} is at the other end of a socket of ranks")
