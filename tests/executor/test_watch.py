"""Who counts as lost, how a process's end is learnt, and how long a step may take."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processors import Stopwatch

import tpengine
from tpengine import EngineArgs
from tpengine.config import RayConfig
from tpengine.executor import heartbeat as beats
from tpengine.executor import processes, watch
from tpengine.executor.channel import Channel, ChannelClosedError, ChannelError, FrameKind
from tpengine.executor.handshake import Listener, connect
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.processes import python_stack, state
from tpengine.executor.step_deadline import StepDeadline
from tpengine.executor.watch import RankSilentError, RankWatch
from tpengine.host import start_ticks

SECRET = b"s" * 32
TIMEOUT_S = 5.0
PATIENCE_S = 30.0
"""For what only has to come, where others want the cores."""
FROZEN_S = 1.5
"""Of a quick watch; longer than a thread here is without a processor."""
Wait = Callable[[Callable[[], bool], float], None]


@pytest.fixture
def pair() -> Iterator[tuple[list[Channel], list[Channel]]]:
    """(the driver's ends, the ranks' ends) of two control channels."""
    listener = Listener("127.0.0.1", SECRET, 1)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 2, TIMEOUT_S)
        ranks = [connect(listener.address, SECRET, rank, 1, TIMEOUT_S) for rank in range(2)]
        driver = accepted.result(TIMEOUT_S)
    listener.close()
    yield driver, ranks
    for channel in driver + ranks:
        channel.close()


class Found:
    """What a watch reported."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, ChannelError]] = []
        self.asked: list[int] = []
        self.frozen = True

    def is_frozen(self, rank: int, silent_s: float) -> bool:
        self.asked.append(rank)
        return self.frozen

    def on_loss(self, rank: int, error: ChannelError) -> None:
        self.losses.append((rank, error))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FROZEN_S", FROZEN_S)
    monkeypatch.setattr(watch, "BEAT_S", 0.1)


def beat(channel: Channel, step: int = 0) -> None:
    channel.send(FrameKind.BEAT, step, b"execute_model" if step else b"idle", TIMEOUT_S)


def drain(channel: Channel) -> None:
    """Until its end."""
    while True:
        channel.receive(TIMEOUT_S)


def test_silent_rank_is_lost_and_the_other_is_not(
    quick: None, pair: tuple[list[Channel], list[Channel]], wait_until: Wait
) -> None:
    driver, ranks = pair
    found = Found()
    watching = RankWatch(driver, found.is_frozen, found.on_loss)
    watching.start()
    beat(ranks[1], step=5)
    start = time.monotonic()
    while not found.losses:
        assert time.monotonic() - start < PATIENCE_S
        beat(ranks[0])
        time.sleep(0.05)
    assert time.monotonic() - start >= FROZEN_S - 0.1
    [(rank, error)] = found.losses
    assert rank == 1
    assert isinstance(error, RankSilentError)
    assert watching.last_said(1) == "execute_model, step 5"
    assert 0 not in found.asked
    watching.wait()
    with pytest.raises(ChannelClosedError):
        drain(ranks[0])


def test_silent_rank_that_runs_is_given_time(
    quick: None, pair: tuple[list[Channel], list[Channel]], wait_until: Wait
) -> None:
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


def test_closed_channel_is_a_loss_at_once(
    pair: tuple[list[Channel], list[Channel]], wait_until: Wait
) -> None:
    driver, ranks = pair
    found = Found()
    RankWatch(driver, found.is_frozen, found.on_loss).start()
    ranks[0].close()
    wait_until(lambda: bool(found.losses), PATIENCE_S)
    assert found.losses[0][0] == 0
    assert isinstance(found.losses[0][1], ChannelClosedError)


def test_watching_costs_almost_nothing(pair: tuple[list[Channel], list[Channel]]) -> None:
    """Both sides in this process: a driver's watch, and two ranks that beat."""
    driver, ranks = pair
    found = Found()
    watching = RankWatch(driver, found.is_frozen, found.on_loss)
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(beats.BEAT_S):
            for channel in ranks:
                beat(channel)
                while channel.take() is not None:
                    pass

    thread = threading.Thread(target=answer)
    watching.start()
    thread.start()
    threads = [str(one.native_id) for one in (watching, thread)]
    before = [cpu_s(one) for one in threads]
    time.sleep(2.0)
    spent = sum(cpu_s(one) - then for one, then in zip(threads, before, strict=True))
    stop.set()
    thread.join(TIMEOUT_S)
    watching.stop()
    watching.wait()
    print(f"\n{100 * spent / 2.0:.2f} % of a core")
    assert 0 < spent < 0.01 * 2.0
    assert not found.losses


def cpu_s(thread: str) -> float:
    """CPU seconds of a thread of this process, where other tests have left threads of their own."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


FENCED = """
import socket, sys, threading, time
from tpengine.executor import heartbeat as beats
from tpengine.executor.handshake import connect
beats.FENCE_S = 2.0
port, secret = int(sys.argv[1]), b"s" * 32
steps = connect(("127.0.0.1", port), secret, 0, 1, 5.0)
control = connect(("127.0.0.1", port), secret, 1, 1, 5.0)
beats.BeatThread(0, control, steps, beats.Progress()).start()
print("ready", flush=True)
threading.Event().wait(60.0)  # a worker that never comes back
"""


@pytest.mark.parametrize(
    ("what", "code", "word"),
    [("silent", beats.DRIVER_SILENT, "nothing heard"), ("closed", beats.DRIVER_GONE, "closed")],
)
def test_rank_ends_itself(what: str, code: int, word: str) -> None:
    """Its driver beats for longer than the fence, then is silent or closes; the worker hangs."""
    listener = Listener("127.0.0.1", SECRET, 1)
    env = {**os.environ, "PYTHONPATH": str(Path(tpengine.__file__).parent.parent)}
    rank = subprocess.Popen(
        [sys.executable, "-c", FENCED, str(listener.address[1])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    steps, control = listener.accept(2, 30.0)
    listener.close()
    try:
        for _ in range(12):
            time.sleep(0.2)
            control.send(FrameKind.BEAT, 0, b"", TIMEOUT_S)
        assert rank.poll() is None
        assert control.take() is not None, "the rank does not beat"
        watch = Stopwatch()
        if what == "closed":
            steps.close()
        _, errors = rank.communicate(timeout=PATIENCE_S)
        assert watch.own_s < (1.0 if what == "closed" else 4.0)
        assert rank.returncode == code
        assert "rank 0 ends itself" in errors
        assert word in errors
    finally:
        rank.kill()
        rank.wait(TIMEOUT_S)
        steps.close()
        control.close()


@pytest.mark.parametrize(
    ("how", "expected"),
    [("kill -9 $$", "killed by signal 9 (SIGKILL)"), ("exit 7", "exit code 7")],
)
def test_end_of_a_process_that_is_reaped(how: str, expected: str) -> None:
    """By somebody else, as Ray reaps ranks."""
    process = subprocess.Popen(["sh", "-c", f"read line; {how}"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    assert ticks is not None
    agent, name = NodeAgent(), (process.pid, ticks)
    agent.watch([name])
    ended, now = agent.look(name, 0.0)
    assert not ended
    assert now in tuple("SRD"), "it lives: asleep, at work, or waiting for its program's pages"
    process.communicate(b"\n")
    ended, now = agent.look(name, 1.0)
    agent.close()
    assert now == ""
    if [int(part) for part in os.uname().release.split(".")[:2]] >= [6, 15]:
        assert ended == expected
    else:
        assert ended in ("", expected)


def test_old_kernel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know how a process ended, and never will."""

    def ioctl(*_: object) -> int:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    process = subprocess.Popen(["sleep", "60"])
    name = (process.pid, start_ticks(process.pid) or 0)
    agent = NodeAgent()
    agent.watch([name])
    process.kill()
    process.wait(TIMEOUT_S)
    monkeypatch.setattr(processes.fcntl, "ioctl", ioctl)
    start = time.monotonic()
    assert agent.look(name, PATIENCE_S) == ("", "")
    assert time.monotonic() - start < PATIENCE_S / 2
    agent.close()


def test_stack_of_a_stopped_process() -> None:
    code = "import time\ndef in_the_weeds():\n    print('x', flush=True)\n    time.sleep(60)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "in_the_weeds()"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert "in_the_weeds" in python_stack(process.pid)
        ticks = start_ticks(process.pid)
        assert ticks is not None
        assert state((process.pid, ticks)) == "T"
        assert state((process.pid, ticks + 1)) == "", "another process of the same number"
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def test_missing_stack_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "py-spy is not installed" in python_stack(os.getpid())
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Permission denied' >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    assert python_stack(os.getpid()) == "(no stack: py-spy says: Permission denied)"


def test_least_deadline() -> None:
    assert EngineArgs("model").step_timeout_s == RayConfig().step_timeout_s == 30.0


def test_deadline_follows_what_steps_took() -> None:
    deadline = StepDeadline(30.0)
    assert deadline.of(100_000) == 30.0, "nothing is known yet"
    deadline.observe(500, 5.0)
    assert deadline.of(1) == 30.0
    assert deadline.of(2000) == pytest.approx(200.0)
    for _ in range(200):
        deadline.observe(500, 0.5)
    assert deadline.of(2000) == 30.0
    assert deadline.of(20_000) == pytest.approx(200.0, rel=0.01)
