"""Which silence is a loss, whose failure explains a step's, and which answers count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

import tpengine
from executor.test_autopsy import ScriptedAgents
from tpengine.executor.alarm import Alarm
from tpengine.executor.channel import Channel, ChannelClosedError, FrameKind
from tpengine.executor.diagnosis import Coroner
from tpengine.executor.exchange import StepExchange, StepStoppedError
from tpengine.executor.failures import RankFailure, first_cause
from tpengine.executor.handshake import Listener, connect
from tpengine.executor.launch import node_agent
from tpengine.executor.launch.node_agent import Agents
from tpengine.executor.launch.placement import RankPlace
from tpengine.executor.watch import FROZEN_S, HOLD_S

SECRET = b"s" * 32
EPOCH = 3
TIMEOUT_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[list[Channel], list[Channel]]]:
    """(the driver's ends, the ranks' ends) of the channels of two ranks."""
    listener = Listener("127.0.0.1", SECRET, EPOCH)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 2, TIMEOUT_S)
        ranks = [connect(listener.address, SECRET, rank, EPOCH, TIMEOUT_S) for rank in range(2)]
        driver = accepted.result(TIMEOUT_S)
    listener.close()
    yield driver, ranks
    for channel in driver + ranks:
        channel.close()


def answer(channel: Channel, step: int, payload: bytes) -> None:
    channel.send(FrameKind.OUTPUT, step, payload, TIMEOUT_S)


def test_answers_of_another_epoch_do_not_count(
    ends: tuple[list[Channel], list[Channel]],
) -> None:
    driver, ranks = ends
    for rank in ranks:
        rank._epoch = EPOCH - 1
        answer(rank, 1, b"of the group before")
        rank._epoch = EPOCH
        answer(rank, 1, b"of this one")
    assert StepExchange(driver, EPOCH).run(1, b"p", TIMEOUT_S) == [b"of this one"] * 2


def test_alarm_ends_a_step_whose_channels_are_open(
    ends: tuple[list[Channel], list[Channel]],
) -> None:
    """As when the watch finds a rank frozen: nothing else would tell the step before its end."""
    driver, ranks = ends
    alarm = Alarm()
    exchange = StepExchange(driver, EPOCH, alarm)
    answer(ranks[0], 1, b"one of two")
    ringing = threading.Timer(0.2, alarm.ring)
    ringing.start()
    start = time.monotonic()
    with pytest.raises(StepStoppedError):
        exchange.run(1, b"p", TIMEOUT_S)
    assert time.monotonic() - start < 2.0
    ringing.join(TIMEOUT_S)
    # A step that all have answered counts, whatever became of them since.
    for rank in ranks:
        answer(rank, 2, b"done")
    assert exchange.run(2, b"p", TIMEOUT_S) == [b"done"] * 2
    alarm.close()


def coroner(**answers: object) -> Coroner:
    places = [RankPlace("n", "10.0.0.1", "host", (), 1, 1)]
    return Coroner(ScriptedAgents(**answers), 1, places)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["T", "t", ""])
def test_stopped_or_gone_is_lost_at_once(state: str) -> None:
    found = coroner(state=state)
    assert found.is_frozen(0, FROZEN_S, may_hold=True)
    assert found.is_stopped(0)


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_silent_process_that_runs_has_its_time(state: str) -> None:
    """Native code may keep Python's lock; only imports may do so for as long as they want."""
    found = coroner(state=state)
    assert not found.is_frozen(0, HOLD_S - 0.1, may_hold=False)
    assert found.is_frozen(0, HOLD_S, may_hold=False)
    assert not found.is_frozen(0, 10 * HOLD_S, may_hold=True)
    assert not found.is_stopped(0)


def test_silent_node() -> None:
    """With a silent rank on it, it is gone; while ranks connect, its agent may only be starting."""
    assert coroner().is_frozen(0, FROZEN_S, may_hold=True)
    assert not coroner().is_stopped(0)
    found = coroner()
    found._agents.num_starting = 1  # type: ignore[attr-defined]
    assert not found.is_frozen(0, HOLD_S, may_hold=False)


def test_an_agent_that_starts_has_its_time(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has answered once, or for as long as its process may take."""
    own = ray.get_runtime_context().get_node_id()
    agents = Agents("not this node")
    agents.open([own])
    assert agents.is_starting(own)
    assert agents.ask(own, "ping", timeout_s=60.0)
    assert not agents.is_starting(own)
    agents.close()
    monkeypatch.setattr(node_agent, "_START_S", 0.0)
    late = Agents("not this node")
    late.open([own])
    assert not late.is_starting(own)
    late.close()


def raised(rank: int, type_name: str) -> RankFailure:
    return RankFailure(rank, "here", "step 1", type_name, "text", "", [])


def test_whose_failure_explains_the_others() -> None:
    """A rank's own error, then a connection that broke, then a word that another is missing; the
    first of equals."""
    closed = ChannelClosedError("the peer closed the connection")
    own, lonely = raised(2, "ValueError"), raised(0, "CollectiveError")
    assert first_cause({0: lonely, 1: closed, 2: own}) == 2
    assert first_cause({0: lonely, 1: closed}) == 1
    assert first_cause({1: raised(1, "RendezvousError"), 0: lonely}) == 1
    assert first_cause({1: closed, 0: closed}) == 1


STUCK = """
import ctypes, sys, time
from tpengine.executor import heartbeat as beats
from tpengine.executor.handshake import connect
beats._STUCK_S = 1.0
port, secret = int(sys.argv[1]), b"s" * 32
steps, control = (connect(("127.0.0.1", port), secret, rank, 3, 5.0) for rank in range(2))
progress = beats.Progress()
progress.begin("create")
progress.end()
beats.BeatThread(0, control, steps, progress).start()
def hold_the_lock():
    ctypes.PyDLL(None).sleep(60)
time.sleep(0.2)  # for the first beat
print("ready", flush=True)
hold_the_lock()
"""


def test_rank_whose_python_is_held_ends_itself_in_the_end() -> None:
    """No thread of it can hear that its driver is gone; the stack stays in its log."""
    listener = Listener("127.0.0.1", SECRET, EPOCH)
    env = {**os.environ, "PYTHONPATH": str(Path(tpengine.__file__).parent.parent)}
    rank = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(listener.address[1])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    channels = listener.accept(2, 30.0)
    listener.close()
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        time.sleep(0.1)
        for channel in channels:
            channel.close()
        _, errors = rank.communicate(timeout=15.0)
        assert rank.returncode == 1
        assert "in hold_the_lock" in errors
    finally:
        rank.kill()
        rank.wait(TIMEOUT_S)
