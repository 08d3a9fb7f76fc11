"""Steps and calls over the channels of a group: who answers, who fails, how long it may take."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest

from executor.channels import TIMEOUT_S, answer, open_channels, receive
from tpengine import EngineArgs
from tpengine.config import RanksConfig
from tpengine.executor import channel as wire
from tpengine.executor import watch
from tpengine.executor.codec import encode
from tpengine.executor.diagnosis import RankFailure, RanksFailedError
from tpengine.executor.watch import Exchange, StepDeadline, WakeUp

Respond = Callable[[int, wire.Channel, wire.Frame], None]


def serve(channels: list[wire.Channel], respond: Respond) -> None:
    """Runs ranks in threads that answer each step by `respond`, until their channels close."""

    def run(rank: int, channel: wire.Channel) -> None:
        try:
            while True:
                respond(rank, channel, receive(channel, TIMEOUT_S))
        except (wire.ChannelError, ValueError):  # either end may be closed
            channel.close()

    for rank, channel in enumerate(channels):
        threading.Thread(target=run, args=(rank, channel), daemon=True).start()


def step(exchange: Exchange, number: int, payload: bytes, timeout_s: float) -> list[bytes]:
    exchange.send_step(number, [payload] * len(exchange._channels), timeout_s)
    return exchange.take_answers(number, timeout_s)


def fail(channel: wire.Channel, step: int, rank: int, type_name: str) -> None:
    failure = RankFailure(rank, "here", "step 1", type_name, "text", "", [])
    channel.send(wire.FrameKind.FAILURE, step, encode(dataclasses.astuple(failure)), TIMEOUT_S)


def test_late_answers_are_dropped() -> None:
    """A step reaches all ranks, a call those that it names."""

    def respond(rank: int, channel: wire.Channel, frame: wire.Frame) -> None:
        answer(channel, frame.number - 1, b"late")
        answer(channel, frame.number, frame.payload + bytes([rank]))

    with open_channels(3) as (driver, ranks):
        serve(ranks, respond)
        exchange = Exchange(driver)
        for number in range(1, 50):
            assert step(exchange, number, b"p", TIMEOUT_S) == [b"p\0", b"p\1", b"p\2"]
            assert exchange.call({2: b"c", 1: b"d"}, TIMEOUT_S) == [b"c\2", b"d\1"]


def test_failing_rank_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports first, and only, that another one has gone; rank 2 sends nothing."""
    monkeypatch.setattr(watch, "GRACE_S", 2.0)
    has_reported = threading.Event()

    def respond(rank: int, channel: wire.Channel, frame: wire.Frame) -> None:
        if rank == 0:
            fail(channel, frame.number, 0, "CollectiveError")
            has_reported.set()
        elif rank == 1:
            has_reported.wait(TIMEOUT_S)
            fail(channel, frame.number, 1, "ValueError")

    with open_channels(3) as (driver, ranks):
        serve(ranks, respond)
        with pytest.raises(RanksFailedError) as caught:
            step(Exchange(driver), 1, b"p", TIMEOUT_S)
        assert list(caught.value.failures) == [0, 1]
        assert caught.value.cause == 1


def test_several_steps_in_flight() -> None:
    """Each answer is that of its step, also if a call comes between; what one step fails with is
    not the failure of another."""

    def respond(rank: int, channel: wire.Channel, frame: wire.Frame) -> None:
        if frame.number == 3:
            fail(channel, 3, rank, "ValueError")
        else:
            answer(channel, frame.number, frame.payload + bytes([rank]))

    with open_channels(2) as (driver, ranks):
        serve(ranks, respond)
        exchange = Exchange(driver)
        for number in (1, 2, 3, 4):
            exchange.send_step(number, [bytes([number])] * 2, TIMEOUT_S)
        assert exchange.call({1: b"c"}, TIMEOUT_S) == [b"c\1"]
        for number in (1, 2):
            assert exchange.take_answers(number, TIMEOUT_S) == [bytes([number, r]) for r in (0, 1)]
        with pytest.raises(RanksFailedError) as caught:
            exchange.take_answers(3, TIMEOUT_S)
        assert list(caught.value.failures) == [0, 1]
        assert exchange.take_answers(4, TIMEOUT_S) == [b"\4\0", b"\4\1"]
        exchange.send_step(5, [b"first", b"others"], TIMEOUT_S)
        assert exchange.take_answers(5, TIMEOUT_S) == [b"first\0", b"others\1"]


def test_a_rank_that_goes_with_steps_in_flight() -> None:
    """The step that it has answered counts; the next one fails."""
    with open_channels(2) as (driver, ranks):
        exchange = Exchange(driver)
        for number in (1, 2):
            exchange.send_step(number, [b"p"] * 2, TIMEOUT_S)
        for channel in ranks:
            answer(channel, 1, b"done")
        ranks[1].close()
        assert exchange.take_answers(1, TIMEOUT_S) == [b"done"] * 2
        with pytest.raises(RanksFailedError) as caught:
            exchange.take_answers(2, TIMEOUT_S)
        assert isinstance(caught.value.failures[1], wire.ChannelClosedError)


def test_wake_up_ends_a_step_whose_channels_are_open() -> None:
    """As when the watch finds a rank frozen: before the step's deadline nothing else would."""
    with open_channels(2) as (driver, ranks):
        wake_up = WakeUp()
        exchange = Exchange(driver, wake_up)
        answer(ranks[0], 1, b"one of two")
        waking = threading.Timer(0.2, wake_up.set)
        waking.start()
        with pytest.raises(RanksFailedError) as caught:
            step(exchange, 1, b"p", TIMEOUT_S)
        [(rank, error)] = caught.value.failures.items()
        assert rank == 1
        assert "step 1 was given up" in str(error)
        waking.join(TIMEOUT_S)
        # A step that all ranks have answered counts, whatever happened to them since.
        for rank in ranks:
            answer(rank, 2, b"done")
        assert step(exchange, 2, b"p", TIMEOUT_S) == [b"done"] * 2
        # One call is still made: that which lets the workers end.
        serve(ranks, lambda rank, channel, frame: answer(channel, frame.number, b"bye"))
        assert exchange.call({0: b"", 1: b""}, TIMEOUT_S, is_last=True) == [b"bye"] * 2
        wake_up.close()


def test_deadline_follows_what_steps_took() -> None:
    assert EngineArgs("model").step_timeout_s == RanksConfig().step_timeout_s == 30.0
    deadline = StepDeadline(30.0)
    assert deadline.of(100_000) == 30.0, "nothing is known yet"
    deadline.observe(500, 5.0)
    assert deadline.of(1) == 30.0
    assert deadline.of(2000) == pytest.approx(200.0)
    for _ in range(200):
        deadline.observe(500, 0.5)
    assert deadline.of(2000) == 30.0
    assert deadline.of(20_000) == pytest.approx(200.0, rel=0.01)
    for _ in range(20_000):
        deadline.observe(0, 0.0)
    assert deadline.of(20_000) == pytest.approx(200.0, rel=0.01)
    assert deadline.of(0, num_awaited_rows=1000) == 530.0
