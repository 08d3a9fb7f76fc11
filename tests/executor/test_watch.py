"""Heartbeats: which rank the driver's watch reports as lost, and when a rank ends itself."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.programs import running
from support.waiting import wait_until

from executor.channels import EPOCH, SECRET, TIMEOUT_S, open_channels, receive
from tpengine import host
from tpengine.executor import channel as wire
from tpengine.executor import watch
from tpengine.executor.watch import Heartbeat, RankWatch

Pair = tuple[list[wire.Channel], list[wire.Channel]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """(the driver's ends, the ranks' ends) of the heartbeat channels of two ranks."""
    with open_channels(2) as ends:
        yield ends


class Clock:
    """In place of the clock and the waits of a watch: a wait for nothing is over at once, and the
    clock is then where it would be.

    Attributes:
        beating: ends of the other side that send a heartbeat every half second, till `silent_at`.
        num_waits: how often the watch has looked.
        on_wait: called before it looks.
    """

    POLLIN, POLLRDHUP = select.POLLIN, select.POLLRDHUP

    def __init__(self) -> None:
        self.now = 0.0
        self.beating: Sequence[wire.Channel] = ()
        self.silent_at = float("inf")
        self.num_waits = 0
        self.on_wait: Callable[[], None] = lambda: None
        self._next_beat = 0.0

    def monotonic(self) -> float:
        return self.now

    def poll(self) -> Any:
        real = select.poll()

        def wait(timeout_ms: float) -> list[tuple[int, int]]:
            self.on_wait()
            self.num_waits += 1
            assert self.num_waits < 10_000, "it looks again and again without a rest"
            if self.beating and self._next_beat <= self.now < self.silent_at:
                self._next_beat = self.now + watch.HEARTBEAT_S
                for channel in self.beating:
                    send_heartbeat(channel)
                wait_until(lambda: len(real.poll(0)) >= len(self.beating), TIMEOUT_S)
            if not (ready := real.poll(0)):
                self.now += timeout_ms / 1e3
            return ready

        return SimpleNamespace(register=real.register, unregister=real.unregister, poll=wait)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "select", clock)
    return clock


def send_heartbeat(channel: wire.Channel, step: int = 0) -> None:
    channel.send(wire.FrameKind.HEARTBEAT, step, b"execute_model" if step else b"idle", TIMEOUT_S)


class Found(RankWatch):
    """A watch, what it asked and what it reported.

    Args:
        is_frozen: its question, as a function of how long a rank is silent.
    """

    def __init__(self, driver: list[wire.Channel], is_frozen: Callable[[float], bool]) -> None:
        self.losses: list[tuple[int, wire.ChannelError]] = []
        self.asked: list[int] = []

        def ask(rank: int, silent_s: float) -> bool:
            self.asked.append(rank)
            return is_frozen(silent_s)

        super().__init__(driver, ask, lambda *loss: self.losses.append(loss))


def test_silent_rank_is_lost_and_the_other_is_not(pair: Pair, clock: Clock) -> None:
    driver, ranks = pair
    send_heartbeat(ranks[1], step=5)
    clock.beating = ranks[:1]
    watched = Found(driver, lambda silent_s: True)
    watched.run()
    assert watch.FROZEN_S <= clock.now < watch.FROZEN_S + watch.HEARTBEAT_S
    [(rank, error)] = watched.losses
    assert rank == 1
    assert isinstance(error, wire.ChannelTimeoutError)
    assert watched.phases == ["idle", "execute_model, step 5"]
    assert watched.asked == [1]


def test_survivors_get_heartbeats_until_the_watch_is_stopped(pair: Pair, clock: Clock) -> None:
    """Rank 1 is gone; the other is silent for longer than the driver's patience."""
    driver, ranks = pair
    ranks[1].close()
    on_loss = Mock(return_value=True)
    watched = RankWatch(driver, lambda rank, silent_s: True, on_loss)
    clock.on_wait = lambda: watched.stop() if clock.now > 2 * watch.FENCE_S else None
    watched.run()
    assert [call.args[0] for call in on_loss.call_args_list] == [1]
    heartbeats = list(iter(ranks[0].take, None))
    assert len(heartbeats) >= 2 * watch.FENCE_S / watch.HEARTBEAT_S


def test_silent_rank_that_runs_is_given_time(pair: Pair, clock: Clock) -> None:
    """It is asked for with every heartbeat, and not again and again without a rest."""
    watched = Found(pair[0], lambda silent_s: silent_s >= 30.0)
    watched.run()
    [(_, error)] = watched.losses
    assert str(error) == "silent for 30.0 s"
    assert 27.0 / watch.HEARTBEAT_S <= watched.asked.count(1) <= 30.0 / watch.HEARTBEAT_S
    assert abs(watched.asked.count(0) - watched.asked.count(1)) <= 1


def test_watching_costs_almost_nothing(pair: Pair, clock: Clock) -> None:
    """The watch wakes up for heartbeats, of this side and of the ranks, and for nothing else."""
    clock.beating, clock.silent_at = pair[1], 100.0
    Found(pair[0], lambda silent_s: True).run()
    assert clock.now >= clock.silent_at + watch.FROZEN_S - watch.HEARTBEAT_S
    assert clock.num_waits < 3 * clock.now / watch.HEARTBEAT_S


def test_time_that_an_agent_takes_is_silence_too(pair: Pair, clock: Clock) -> None:
    """The agent needs nearly two seconds to say that the process runs."""

    def is_frozen(silent_s: float) -> bool:
        clock.now += 1.7
        return silent_s >= 10.0

    watched = Found(pair[0], is_frozen)
    watched.run()
    assert isinstance(watched.losses[0][1], wire.ChannelTimeoutError)
    assert clock.now < 15.0


def test_rank_ends_itself_when_its_driver_is_silent(
    pair: Pair, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver sends heartbeats for longer than the fence, and then no more."""
    (driver, _), (control, steps) = pair
    clock.beating, clock.silent_at = [driver], 2 * watch.FENCE_S
    end_process = Mock(side_effect=SystemExit)
    monkeypatch.setattr(watch, "end_process", end_process)
    with pytest.raises(SystemExit):
        Heartbeat(control, steps).run()
    why = "nothing heard from the driver for 5 s"
    end_process.assert_called_once_with(0, watch.DRIVER_SILENT, why)
    assert clock.now > clock.silent_at + watch.FENCE_S - 2 * watch.HEARTBEAT_S
    assert driver.take() is not None, "the rank sends no heartbeat"


@contextmanager
def rank_process(code: str) -> Iterator[tuple[subprocess.Popen[str], wire.Channel, wire.Channel]]:
    """A process that connects two channels, `steps` and `control`, and then runs this code; and the
    driver's ends of them."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with closing(wire.Listener("127.0.0.1", SECRET, EPOCH)) as listener:
        words = "-c", CONNECTED + code, listener.address[1]
        with running(sys.executable, *words, text=True, **pipes) as rank:
            channels = listener.accept(2, TIMEOUT_S)
            yield rank, *channels
    for channel in channels:
        channel.close()


CONNECTED = """
import ctypes, sys, threading
from tpengine.executor import watch
from tpengine.executor.channel import connect
port, secret = int(sys.argv[1]), b"s" * 32
steps, control = (connect(("127.0.0.1", port), secret, rank, 3, 30.0) for rank in range(2))
"""
HANGS = """
watch.FENCE_S = 60.0
watch.Heartbeat(control, steps).start()
threading.Event().wait(60.0)  # a worker that hangs
"""


def test_rank_whose_worker_hangs_ends_itself() -> None:
    """Its driver closes the channel: a process of its own, and its real clock."""
    with rank_process(HANGS) as (rank, steps, control):
        receive(control, TIMEOUT_S)  # its first heartbeat
        steps.close()
        _, errors = rank.communicate(timeout=TIMEOUT_S)
        assert rank.returncode == watch.DRIVER_GONE
        assert "rank 0 ends itself: the driver closed the channel" in errors


STUCK = """
watch._STUCK_S = 1.0
heartbeat = watch.Heartbeat(control, steps)
with heartbeat.during(watch.Doing("create")):
    pass
heartbeat.start()
libc = ctypes.PyDLL(None)
def hold_the_lock():
    sys.setswitchinterval(1e3)  # between the two calls, too
    libc.write(1, b"held\\n", 5)
    libc.sleep(60)
sys.stdin.readline()
hold_the_lock()
"""


def test_rank_whose_python_lock_is_held_ends_itself() -> None:
    """None of its threads can notice that its driver is gone; its stack is in its log."""
    with rank_process(STUCK) as (rank, steps, control):
        receive(control, TIMEOUT_S)  # its first heartbeat
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "held\n"
        for channel in (steps, control):
            channel.close()
        _, errors = rank.communicate(timeout=TIMEOUT_S)
        assert rank.returncode == 1
        assert "in hold_the_lock" in errors


def test_a_thread_that_never_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that finds no memory for its first lines; CPython waits for it without a bound."""
    monkeypatch.setattr(host, "_BEGIN_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", lambda run, args: 0)
        for thread in (threading.Thread(target=print), threading.Timer(0, print)):
            with pytest.raises(RuntimeError, match=r"did not begin within .* memory is short"):
                host.start_thread(thread)
            del threading._limbo[thread]  # type: ignore[attr-defined]
    begun = threading.Event()
    host.start_thread(threading.Thread(target=begun.set))
    assert begun.wait(TIMEOUT_S)
