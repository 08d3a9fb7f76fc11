"""Fewer turns of the event loop for gRPC's news."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 4096


def batch_wake_ups(loop: asyncio.AbstractEventLoop) -> None:
    """Has the loop take all of gRPC's news in one turn. To be called before gRPC knows the loop.

    `grpc.aio` writes a byte into a socket for each thing that is done, a message sent for one, and
    its reader takes a single byte, but all news. After a step of two hundred streams that leaves
    two hundred turns of the loop in which there is nothing to do, each with two system calls, and
    each a moment at which the engine's thread may take the interpreter's lock.
    """
    add_reader = loop.add_reader

    def add_batching_reader(file: Any, callback: Callable[..., Any], *args: Any) -> None:
        if isinstance(file, socket.socket) and _is_grpc(callback):
            add_reader(file, _read_batch, file, callback, *args)
        else:
            add_reader(file, callback, *args)

    loop.add_reader = add_batching_reader  # type: ignore[method-assign,assignment]


def _read_batch(wake_ups: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    num_bytes = len(wake_ups.recv(_MOST_BYTES, socket.MSG_PEEK))
    # One remains for the callback, which would wait for it. A byte is written after its news, so
    # that those of the bytes taken here are there for the callback.
    if num_bytes > 1:
        wake_ups.recv(num_bytes - 1)
    callback(*args)


def _is_grpc(callback: Callable[..., Any]) -> bool:
    if isinstance(callback, functools.partial):
        callback = callback.func
    return type(getattr(callback, "__self__", None)).__module__.startswith("grpc.")
