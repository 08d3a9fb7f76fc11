"""The channel between driver and rank: who may speak, how much, how long, and what its end does."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from executor.channels import EPOCH, SECRET, TIMEOUT_S, check_frames, open_channels, receive
from tpengine.executor import channel as wire
from tpengine.executor.channel import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", SECRET, EPOCH)
    yield listener
    listener.close()


def close_all(channels: list[wire.Channel]) -> None:
    for channel in channels:
        channel.close()


def test_frames_arrive_whole_and_in_order() -> None:
    with open_channels(2) as ends:
        for pair in zip(*ends, strict=True):
            check_frames(*pair)


def test_strangers_are_turned_away(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, one sends nonsense, one has the wrong secret, one the wrong epoch, one claims
    a rank that does not exist; the right one does not wait for their handshakes."""
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 2 * TIMEOUT_S)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        accepted = pool.submit(listener.accept, 1, TIMEOUT_S)
        stack.enter_context(socket.create_connection(listener.address))
        babbler = stack.enter_context(socket.create_connection(listener.address))
        babbler.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200)
        for secret, epoch in ((b"t" * 32, 3), (SECRET, 2)):
            with pytest.raises(wire.ChannelError):
                wire.connect(listener.address, secret, 0, epoch, 0.3)
        with_wrong_rank = wire.connect(listener.address, SECRET, 7, 3, TIMEOUT_S)
        right = wire.connect(listener.address, SECRET, 0, 3, TIMEOUT_S)
        driver = accepted.result(TIMEOUT_S)
    right.send(wire.FrameKind.ANSWER, 1, b"yes", TIMEOUT_S)
    assert receive(driver[0], TIMEOUT_S).payload == b"yes"
    with pytest.raises(wire.ChannelClosedError):
        receive(with_wrong_rank, TIMEOUT_S)
    close_all([right, with_wrong_rank, *driver])


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_relay_cannot_exchange_the_channels_of_a_rank(listener: Listener, claimed: int) -> None:
    """The proof covers the channel's role: one for steps is not taken for one of heartbeats."""

    def relay(server: socket.socket) -> None:
        with server.accept()[0] as rank, socket.create_connection(listener.address) as driver:
            rank.sendall(driver.recv(32, socket.MSG_WAITALL))
            hello = bytearray(rank.recv(80, socket.MSG_WAITALL))
            assert struct.unpack_from("<I", hello, 12) == (0,)
            struct.pack_into("<I", hello, 12, claimed)
            driver.sendall(hello)
            rank.sendall(driver.recv(32, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        relayed = pool.submit(relay, server)
        joined = pool.submit(wire.connect, server.getsockname(), SECRET, 0, EPOCH, 0.05)
        if claimed == 0:
            close_all(listener.accept(1, TIMEOUT_S))
            close_all([joined.result(TIMEOUT_S)])
        else:
            with pytest.raises(wire.ChannelTimeoutError):
                listener.accept(1, 0.5, per_rank=2)
            with pytest.raises(wire.ChannelError, match="no handshake"):
                joined.result(TIMEOUT_S)
        relayed.result(TIMEOUT_S)


def test_silent_stranger_is_cut_off(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_connection(listener.address, TIMEOUT_S) as silent:
        listener.greet()
        assert len(silent.recv(100)) == 32
        assert silent.recv(100) == b""


def test_late_rank_does_not_delay_the_second_channel_of_the_first(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come later than a handshake may take, as on a node that still starts its process."""
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.3)

    def join(rank: int) -> list[wire.Channel]:
        time.sleep(rank * 0.8)
        return [wire.connect(listener.address, SECRET, rank, EPOCH, TIMEOUT_S, i) for i in range(2)]

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(join, rank) for rank in range(2)]
        accepted = listener.accept(2, TIMEOUT_S, per_rank=2)
        joined = [channel for rank in ranks for channel in rank.result(TIMEOUT_S)]
    for number, (mine, drivers) in enumerate(zip(joined, accepted, strict=True)):
        mine.send(wire.FrameKind.ANSWER, 1, bytes([number]), TIMEOUT_S)
        assert receive(drivers, TIMEOUT_S).payload == bytes([number])
    close_all(accepted + joined)


def test_handshake_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gave the first connection up before it had greeted."""
    given_up = []

    def token_bytes(count: int) -> bytes:
        if not given_up:
            given_up.append(threading.current_thread().name)
            raise OSError
        return bytes(count)

    monkeypatch.setattr(wire, "secrets", SimpleNamespace(token_bytes=token_bytes))
    with open_channels(1) as ([driver], [rank]):
        rank.send(wire.FrameKind.ANSWER, 1, b"yes", TIMEOUT_S)
        assert receive(driver, TIMEOUT_S).payload == b"yes"
    assert given_up == ["tpengine-handshake"]


def test_rank_does_not_trust_a_false_driver() -> None:
    """It sends a challenge, as a driver would, and then cannot answer the rank's."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"c" * 32)
            hello = sock.recv(1000)
            sock.sendall(hello[-32:])  # the rank's own proof, sent back

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(wire.ChannelError, match="does not know the group's secret"):
        wire.connect(server.getsockname()[:2], SECRET, 0, 3, TIMEOUT_S)
    thread.join(TIMEOUT_S)
    server.close()


def test_missing_ranks_are_named(listener: Listener) -> None:
    rank = threading.Thread(target=wire.connect, args=(listener.address, SECRET, 1, 3, TIMEOUT_S))
    rank.start()
    while rank.is_alive():
        listener.greet()
    with pytest.raises(wire.ChannelTimeoutError, match=r"ranks \[0, 2\] did not connect"):
        listener.accept(3, 1.0)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP" + b"\0" * 16,
        struct.pack("<4sIIQ", b"tpe1", wire.MAX_FRAME_BYTES + 1, 1, 1),
        struct.pack("<4sIIQ", b"tpe1", 4, 99, 1),
    ],
    ids=["foreign", "too long", "unknown kind"],
)
def test_other_data_than_frames_is_refused(head: bytes) -> None:
    with open_channels(1) as ([driver], [rank]):
        os.write(rank.fileno(), head)
        with pytest.raises(wire.ChannelError, match="not a frame"):
            receive(driver, TIMEOUT_S)


def test_too_long_a_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with open_channels(1) as ([driver], _), pytest.raises(wire.ChannelError, match="101 bytes"):
        driver.send(wire.FrameKind.STEP, 1, b"x" * 101, TIMEOUT_S)


def test_send_to_a_peer_that_does_not_read_ends() -> None:
    with open_channels(1) as ([driver], _), pytest.raises(wire.ChannelTimeoutError):
        driver.send(wire.FrameKind.STEP, 1, b"x" * (64 << 20), 0.3)


@pytest.mark.parametrize("is_late", [False, True], ids=["before the end", "after the end"])
def test_a_channel_that_no_accept_takes_is_closed(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A rank that connects again, when its first attempt has been accepted."""
    go_on, greet_rank = threading.Event(), wire._greet_rank

    def slow(*args: Any) -> Any:
        greeted = greet_rank(*args)
        return greeted if go_on.wait(TIMEOUT_S) else None

    monkeypatch.setattr(wire, "_greet_rank", slow)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(wire.connect, listener.address, SECRET, 0, EPOCH, TIMEOUT_S)
        wait_until(lambda: listener.greet() is None and connecting.done())
    if not is_late:
        go_on.set()
        wait_until(lambda: not listener._arrived.empty())
    listener.close()
    go_on.set()
    with contextlib.closing(connecting.result()) as channel, pytest.raises(wire.ChannelClosedError):
        receive(channel, TIMEOUT_S)
