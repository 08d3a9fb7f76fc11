"""Heartbeats: which rank the driver's watch reports as lost, and when a rank ends itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tpengine
from executor.channels import EPOCH, SECRET, TIMEOUT_S, open_channels, receive
from tpengine.executor import watch
from tpengine.executor.channel import (
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    FrameKind,
    Listener,
)
from tpengine.executor.watch import RankWatch

PATIENCE_S = 30.0
"""For an event that only has to come, when other programs use the cores."""
FROZEN_S = 3.0
"""Longer than a thread here is without a processor."""
Wait = Callable[[Callable[[], bool], float], None]
Pair = tuple[list[Channel], list[Channel]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """(the driver's ends, the ranks' ends) of the heartbeat channels of two ranks."""
    with open_channels(2) as ends:
        yield ends


class Found:
    """What a watch asked and reported."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, ChannelError]] = []
        self.asked: list[int] = []
        self.frozen = True

    def is_frozen(self, rank: int, silent_s: float) -> bool:
        self.asked.append(rank)
        return self.frozen

    def on_loss(self, rank: int, error: ChannelError) -> None:
        self.losses.append((rank, error))


def send_heartbeat(channel: Channel, step: int = 0) -> None:
    channel.send(FrameKind.HEARTBEAT, step, b"execute_model" if step else b"idle", TIMEOUT_S)


def drain(channel: Channel) -> None:
    """Until its end."""
    while True:
        receive(channel, TIMEOUT_S)


def test_silent_rank_is_lost_and_the_other_is_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FROZEN_S", FROZEN_S)
    driver, ranks = pair
    found = Found()
    watching = RankWatch(driver, found.is_frozen, found.on_loss)
    watching.start()
    send_heartbeat(ranks[1], step=5)
    start = time.monotonic()
    while not found.losses:
        assert time.monotonic() - start < PATIENCE_S
        send_heartbeat(ranks[0])
        time.sleep(0.05)
    assert time.monotonic() - start >= FROZEN_S - 0.1
    [(rank, error)] = found.losses
    assert rank == 1
    assert isinstance(error, ChannelTimeoutError)
    assert watching.phases[1] == "execute_model, step 5"
    assert 0 not in found.asked
    watching.wait()
    with pytest.raises(ChannelClosedError):
        drain(ranks[0])


def test_silent_rank_that_runs_is_given_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    monkeypatch.setattr(watch, "FROZEN_S", 0.5)
    monkeypatch.setattr(watch, "HEARTBEAT_S", 0.1)
    driver, _ = pair
    found = Found()
    found.frozen = False
    watching = RankWatch(driver, found.is_frozen, found.on_loss)
    watching.start()
    wait_until(lambda: set(found.asked) == {0, 1}, PATIENCE_S)
    assert not found.losses
    before, start = len(found.asked), time.monotonic()
    time.sleep(0.5)
    num_asked, seconds = len(found.asked) - before, time.monotonic() - start
    assert num_asked < 60 * seconds, "it asks again and again without a rest"
    watching.stop()
    watching.wait()
    assert not found.losses


def test_closed_channel_is_a_loss_at_once(pair: Pair, wait_until: Wait) -> None:
    driver, ranks = pair
    found = Found()
    RankWatch(driver, found.is_frozen, found.on_loss).start()
    ranks[0].close()
    wait_until(lambda: bool(found.losses), PATIENCE_S)
    assert found.losses[0][0] == 0
    assert isinstance(found.losses[0][1], ChannelClosedError)


@pytest.mark.soak
def test_watching_costs_almost_nothing(pair: Pair) -> None:
    """Both sides in this process: a driver's watch, and two ranks."""
    driver, ranks = pair
    found = Found()
    watching = RankWatch(driver, found.is_frozen, found.on_loss)
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(watch.HEARTBEAT_S):
            for channel in ranks:
                send_heartbeat(channel)
                while channel.take() is not None:
                    pass

    thread = threading.Thread(target=answer)
    watching.start()
    thread.start()
    threads = [str(each.native_id) for each in (watching, thread)]
    spent = []
    for _ in range(3):  # other programs on the cores only add to it: the least counts
        before = list(map(cpu_s, threads))
        time.sleep(2.0)
        spent.append(sum(map(cpu_s, threads)) - sum(before))
    stop.set()
    thread.join(TIMEOUT_S)
    watching.stop()
    watching.wait()
    assert 0 < min(spent) < 0.01 * 2.0, spent
    assert not found.losses


def cpu_s(thread: str) -> float:
    """CPU seconds of one thread, as other tests may have left threads in this process."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def rank_process(code: str) -> Iterator[tuple[subprocess.Popen[str], Channel, Channel]]:
    """A process that connects two channels, `steps` and `control`, and then runs this code; and the
    driver's ends of them."""
    listener = Listener("127.0.0.1", SECRET, EPOCH)
    env = {**os.environ, "PYTHONPATH": str(Path(tpengine.__file__).parent.parent)}
    rank = subprocess.Popen(
        [sys.executable, "-c", CONNECTED + code, str(listener.address[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    channels: list[Channel] = []
    try:
        channels = listener.accept(2, PATIENCE_S)
        yield rank, *channels
    finally:
        listener.close()
        rank.kill()
        rank.communicate(timeout=PATIENCE_S)
        for channel in channels:
            channel.close()


CONNECTED = """
import ctypes, sys, threading
from tpengine.executor import watch
from tpengine.executor.channel import connect
port, secret = int(sys.argv[1]), b"s" * 32
steps, control = (connect(("127.0.0.1", port), secret, rank, 3, 30.0) for rank in range(2))
"""
FENCED = """
watch.FENCE_S = 2.0
watch.Heartbeat(control, steps).start()
threading.Event().wait(60.0)  # a worker that hangs
"""


@pytest.mark.parametrize(
    ("what", "code", "word"),
    [("silent", watch.DRIVER_SILENT, "nothing heard"), ("closed", watch.DRIVER_GONE, "closed")],
)
def test_rank_ends_itself(what: str, code: int, word: str) -> None:
    """Its driver sends heartbeats for longer than the fence, then is silent or closes the channel;
    the worker hangs."""
    with rank_process(FENCED) as (rank, steps, control):
        for _ in range(12):
            time.sleep(0.2)
            control.send(FrameKind.HEARTBEAT, 0, b"", TIMEOUT_S)
        assert rank.poll() is None
        assert control.take() is not None, "the rank sends no heartbeat"
        if what == "closed":
            steps.close()
        _, errors = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode == code
        assert "rank 0 ends itself" in errors
        assert word in errors


def test_time_that_an_agent_takes_is_silence_too(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    """The agent needs nearly two seconds to say that the process runs."""
    answer_s, hold_s = 1.7, 2.2
    monkeypatch.setattr(watch, "FROZEN_S", 0.6)
    found = Found()

    def is_frozen(rank: int, silent_s: float) -> bool:
        time.sleep(answer_s)
        return silent_s >= hold_s

    watching = RankWatch(pair[0][:1], is_frozen, found.on_loss)
    watching.start()
    wait_until(lambda: bool(found.losses), PATIENCE_S)
    watching.stop()
    watching.wait()
    assert isinstance(found.losses[0][1], ChannelTimeoutError)


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
        receive(control, PATIENCE_S)  # its first heartbeat
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "held\n"
        for channel in (steps, control):
            channel.close()
        _, errors = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode == 1
        assert "in hold_the_lock" in errors
