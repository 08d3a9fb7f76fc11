"""A wire between two bridges of this network namespace, which delays each frame: `delaying_relay.py
DELAY_S TAP TAP`.

It reads Ethernet frames from each of two tap devices, holds each frame for the delay, and writes it
to the other device. It changes no frame and limits no rate; frames keep their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 65_536
_AT_ONCE = 16
"""Frames that are read from one device before frames that are due are written."""


def open_tap(name: str) -> int:
    """Opens a tap device; returns its descriptor, of which each read gives a frame."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return file


def relay(delay_s: float, first: int, second: int) -> None:
    """Carries frames both ways until the process is ended."""
    others = {first: second, second: first}
    frames: deque[tuple[float, int, bytes]] = deque()
    while True:
        left_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        for file in select.select(others, [], [], left_s)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    frame = os.read(file, _FRAME_BYTES)
                    frames.append((time.monotonic() + delay_s, others[file], frame))
        while frames and frames[0][0] <= time.monotonic():
            _, file, frame = frames.popleft()
            with contextlib.suppress(OSError):  # the frame is lost, as on a wire
                os.write(file, frame)


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # the delay is that of the wire
    relay(float(sys.argv[1]), *map(open_tap, sys.argv[2:]))
