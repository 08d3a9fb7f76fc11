"""Channels between a driver and ranks that are all in this process."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tpengine.executor import channel as wire

SECRET = b"s" * 32
EPOCH = 3
TIMEOUT_S = 60.0
"""A bound for waits that should end long before it."""


@contextmanager
def open_channels(size: int) -> Iterator[tuple[list[wire.Channel], list[wire.Channel]]]:
    """(the driver's ends, the ranks' ends), one channel per rank; the last rank connects first."""
    listener = wire.Listener("127.0.0.1", SECRET, EPOCH)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, size, TIMEOUT_S)
        ranks = [
            wire.connect(listener.address, SECRET, rank, EPOCH, TIMEOUT_S)
            for rank in reversed(range(size))
        ][::-1]
        driver = accepted.result(TIMEOUT_S)
    listener.close()
    yield driver, ranks
    for channel in driver + ranks:
        channel.close()


def receive(channel: wire.Channel, timeout_s: float) -> wire.Frame:
    """Waits for the next frame."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while (frame := channel.take()) is None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise wire.ChannelTimeoutError(f"no frame within {timeout_s:.1f} s")
    return frame


def check_frames(*ends: wire.Channel) -> None:
    """Frames that both ends of a channel send at once arrive whole and in order."""
    payloads = [b"", b"x", bytes(range(256)) * 40_000, b"y" * 100, b"z" * (3 << 20), b""]
    numbers = range(len(payloads))

    def send(end: wire.Channel, name: bytes) -> None:
        for number in numbers:
            end.send(wire.FrameKind.STEP, number, payloads[number] + name, TIMEOUT_S)

    def receive_all(end: wire.Channel) -> list[tuple[int, bytes]]:
        frames = [receive(end, TIMEOUT_S) for _ in numbers]
        return [(frame.number, bytes(frame.payload)) for frame in frames]

    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, *pair) for pair in zip(ends, [b"a", b"b"], strict=True)]
        of_a, of_b = ([(n, payloads[n] + name) for n in numbers] for name in (b"a", b"b"))
        assert list(pool.map(receive_all, ends)) == [of_b, of_a]
        for future in sent:
            future.result(TIMEOUT_S)


def answer(channel: wire.Channel, number: int, payload: bytes) -> None:
    """What a rank sends at the end of a step."""
    channel.send(wire.FrameKind.ANSWER, number, payload, TIMEOUT_S)
