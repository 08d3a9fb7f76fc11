"""The channel between driver and rank: who may speak, how much, how long, and what its end does."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processors import Stopwatch

from tpengine.config import RayConfig
from tpengine.errors import EngineError
from tpengine.executor import channel as transport
from tpengine.executor import handshake
from tpengine.executor.channel import (
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    FrameKind,
)
from tpengine.executor.codec import encode
from tpengine.executor.exchange import StepExchange, StepFailedError
from tpengine.executor.failures import RankFailure
from tpengine.executor.handshake import Listener, connect
from tpengine.executor.launch.node_agent import Agents

SECRET = b"s" * 32
TIMEOUT_S = 5.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", SECRET, 3)
    yield listener
    listener.close()


def open_group(listener: Listener, size: int) -> tuple[list[Channel], list[Channel]]:
    """(driver's ends, ranks' ends), the last rank connecting first."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, size, TIMEOUT_S)
        ranks = {
            rank: connect(listener.address, SECRET, rank, 3, TIMEOUT_S)
            for rank in reversed(range(size))
        }
        return accepted.result(TIMEOUT_S), [ranks[rank] for rank in range(size)]


def close_all(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()


def test_frames_arrive_whole_and_in_order(listener: Listener) -> None:
    driver, ranks = open_group(listener, 2)
    payloads = [b"", b"x", bytes(range(256)) * 40_000]
    for rank in (0, 1):
        sender = threading.Thread(
            target=lambda r=rank: [
                driver[r].send(FrameKind.STEP, step, payload + bytes([r]), TIMEOUT_S)
                for step, payload in enumerate(payloads)
            ]
        )
        sender.start()
        for step, payload in enumerate(payloads):
            frame = ranks[rank].receive(TIMEOUT_S)
            assert (frame.kind, frame.epoch, frame.step) == (FrameKind.STEP, 3, step)
            assert frame.payload == payload + bytes([rank])
        sender.join(TIMEOUT_S)
    close_all(driver + ranks)


def test_strangers_are_turned_away(listener: Listener) -> None:
    """One is silent, one talks nonsense, one has the wrong secret, one the wrong epoch, one claims
    a rank that there is not; the right one still gets in at once."""
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, 1, TIMEOUT_S)
        silent = socket.create_connection(listener.address)
        babbler = socket.create_connection(listener.address)
        babbler.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200)
        for secret, epoch in ((b"t" * 32, 3), (SECRET, 2)):
            with pytest.raises(ChannelError):
                connect(listener.address, secret, 0, epoch, 0.3)
        with_wrong_rank = connect(listener.address, SECRET, 7, 3, TIMEOUT_S)
        watch = Stopwatch()
        right = connect(listener.address, SECRET, 0, 3, TIMEOUT_S)
        driver = accepted.result(TIMEOUT_S)
        assert watch.own_s < 1.0
    right.send(FrameKind.OUTPUT, 1, b"yes", TIMEOUT_S)
    assert driver[0].receive(TIMEOUT_S).payload == b"yes"
    with pytest.raises(ChannelClosedError):
        with_wrong_rank.receive(TIMEOUT_S)
    silent.settimeout(handshake.HANDSHAKE_TIMEOUT_S + 1.0)
    assert len(silent.recv(100)) == 32
    assert silent.recv(100) == b"", "a silent stranger is not kept for ever"
    silent.close()
    babbler.close()
    close_all([right, with_wrong_rank, *driver])


def test_late_rank_does_not_keep_the_first_from_its_second_channel(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come later than a handshake may take, as on a node that still starts its process."""
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
    second = Listener("127.0.0.1", SECRET, 3)

    def join(rank: int) -> list[Channel]:
        time.sleep(rank * 0.8)
        return [connect(one.address, SECRET, rank, 3, TIMEOUT_S) for one in (listener, second)]

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(join, rank) for rank in range(2)]
        accepted = handshake.accept_all([listener, second], 2, TIMEOUT_S)
        joined = [rank.result(TIMEOUT_S) for rank in ranks]
    second.close()
    for rank, mine in enumerate(joined):
        for kind, channel in enumerate(mine):
            channel.send(FrameKind.OUTPUT, 1, bytes([rank, kind]), TIMEOUT_S)
            assert accepted[kind][rank].receive(TIMEOUT_S).payload == bytes([rank, kind])
    close_all([channel for channels in (*accepted, *joined) for channel in channels])


def test_handshake_that_failed_is_tried_again(listener: Listener) -> None:
    """The driver took too long to greet, and then gave the connection up."""
    greet, given_up = listener.greet, []

    def busy() -> None:
        if not given_up:
            given_up.append(listener._sock.accept()[0])
            given_up[0].close()
        else:
            greet()

    listener.greet = busy  # type: ignore[method-assign]
    driver, ranks = open_group(listener, 1)
    assert given_up
    ranks[0].send(FrameKind.OUTPUT, 1, b"yes", TIMEOUT_S)
    assert driver[0].receive(TIMEOUT_S).payload == b"yes"
    close_all(driver + ranks)


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
    with pytest.raises(ChannelError, match="does not know the group's secret"):
        connect(server.getsockname()[:2], SECRET, 0, 3, TIMEOUT_S)
    thread.join(TIMEOUT_S)
    server.close()


def test_missing_ranks_are_named(listener: Listener) -> None:
    rank = threading.Thread(target=connect, args=(listener.address, SECRET, 1, 3, TIMEOUT_S))
    rank.start()
    with pytest.raises(ChannelTimeoutError, match=r"ranks \[0, 2\] did not connect"):
        listener.accept(3, 1.5)
    rank.join(TIMEOUT_S)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP" + b"\0" * 20,
        struct.pack("<4sIIIQ", b"tpe1", transport.MAX_FRAME_BYTES + 1, 1, 3, 1),
        struct.pack("<4sIIIQ", b"tpe1", 4, 99, 3, 1),
    ],
    ids=["foreign", "too long", "unknown kind"],
)
def test_what_is_no_frame_is_refused(listener: Listener, head: bytes) -> None:
    driver, ranks = open_group(listener, 1)
    ranks[0]._sock.sendall(head)
    with pytest.raises(ChannelError, match="not a frame"):
        driver[0].receive(TIMEOUT_S)
    close_all(driver + ranks)


def test_too_long_a_message_is_not_sent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, ranks = open_group(listener, 1)
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ChannelError, match="101 bytes"):
        driver[0].send(FrameKind.STEP, 1, b"x" * 101, TIMEOUT_S)
    close_all(driver + ranks)


def test_send_to_one_who_does_not_read_ends(listener: Listener) -> None:
    driver, ranks = open_group(listener, 1)
    watch = Stopwatch()
    with pytest.raises(ChannelError):
        driver[0].send(FrameKind.STEP, 1, b"x" * (64 << 20), 0.3)
    assert watch.own_s < 2.0
    close_all(driver + ranks)


class EchoRanks:
    """Ranks in threads that answer each step as `answer` says."""

    def __init__(self, channels: list[Channel], answer) -> None:
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, channel, answer), daemon=True)
            for rank, channel in enumerate(channels)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _serve(rank: int, channel: Channel, answer) -> None:
        try:
            while True:
                answer(rank, channel, channel.receive(TIMEOUT_S))
        except ChannelError:
            channel.close()


def failure(rank: int, type_name: str) -> bytes:
    return encode(RankFailure(rank, "here", "step 1", type_name, "text", "", []).to_fields())


def test_step_reaches_all_and_late_answers_are_dropped(listener: Listener) -> None:
    driver, ranks = open_group(listener, 3)

    def answer(rank: int, channel: Channel, frame) -> None:
        channel.send(FrameKind.OUTPUT, frame.step - 1, b"late", TIMEOUT_S)
        channel.send(FrameKind.OUTPUT, frame.step, frame.payload + bytes([rank]), TIMEOUT_S)

    EchoRanks(ranks, answer)
    exchange = StepExchange(driver, 3)
    for step in range(1, 50):
        assert exchange.run(step, b"p", TIMEOUT_S) == [b"p\0", b"p\1", b"p\2"]
    exchange.close()


def test_failing_rank_is_heard_at_once(listener: Listener) -> None:
    """Rank 0 only says, and first, that another one has gone; rank 2 says nothing."""
    driver, ranks = open_group(listener, 3)

    def answer(rank: int, channel: Channel, frame) -> None:
        if rank == 0:
            channel.send(FrameKind.FAILURE, frame.step, failure(0, "CollectiveError"), TIMEOUT_S)
        elif rank == 1:
            time.sleep(0.05)
            channel.send(FrameKind.FAILURE, frame.step, failure(1, "ValueError"), TIMEOUT_S)

    EchoRanks(ranks, answer)
    watch = Stopwatch()
    with pytest.raises(StepFailedError) as caught:
        StepExchange(driver, 3).run(1, b"p", TIMEOUT_S)
    assert watch.own_s < 1.0
    assert list(caught.value.failures) == [0, 1]
    close_all(driver)


def test_closed_channel_and_deadline(listener: Listener) -> None:
    driver, ranks = open_group(listener, 2)
    EchoRanks(ranks[:1], lambda rank, channel, frame: None)
    exchange = StepExchange(driver, 2)
    with pytest.raises(StepFailedError) as caught:
        exchange.run(1, b"p", 0.3)
    assert {r: type(e) for r, e in caught.value.failures.items()} == {
        0: ChannelTimeoutError,
        1: ChannelTimeoutError,
    }
    ranks[1].close()
    watch = Stopwatch()
    with pytest.raises(StepFailedError) as caught:
        exchange.run(2, b"p", TIMEOUT_S)
    assert watch.own_s < 1.0
    assert isinstance(caught.value.failures[1], ChannelClosedError)
    close_all(driver)


def test_step_that_is_ended_by_another_thread(listener: Listener) -> None:
    """Its ranks do not answer, and their channels close under it."""
    driver, ranks = open_group(listener, 2)
    exchange = StepExchange(driver, 3)
    closing = threading.Timer(0.2, exchange.close)
    closing.start()
    with pytest.raises(StepFailedError) as caught:
        exchange.run(1, b"p", TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert all(isinstance(e, ChannelClosedError) for e in caught.value.failures.values())
    close_all(ranks)


def test_group_that_is_ended_in_a_step(listener: Listener) -> None:
    """Whoever waits for the step learns that it was no loss."""
    pytest.importorskip("ray")
    from tpengine.executor.group import Group

    driver, ranks = open_group(listener, 1)
    group = Group(3, None, RayConfig(), Agents("here"), lambda: None)  # type: ignore[arg-type]
    group._exchange = StepExchange(driver, 3, group._alarm)
    ending = threading.Timer(0.2, group.end, [False])
    ending.start()
    watch = Stopwatch()
    with pytest.raises(EngineError, match="the engine was shut down"):
        group.step(1, b"p", TIMEOUT_S)
    assert watch.own_s < 2.0
    ending.join(TIMEOUT_S)
    assert group.loss is None
    close_all(ranks)


def test_waiting_costs_no_cpu(listener: Listener) -> None:
    driver, ranks = open_group(listener, 1)
    before = time.thread_time()
    with pytest.raises(ChannelTimeoutError):
        driver[0].receive(0.5)
    assert time.thread_time() - before < 0.02
    close_all(driver + ranks)
