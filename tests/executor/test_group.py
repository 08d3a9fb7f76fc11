"""A group of ranks whose home is not Ray's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.waiting import wait_until

from executor.channels import TIMEOUT_S, answer, receive
from executor.test_diagnosis import ScriptedAgents
from tpengine import EngineArgs
from tpengine.config import EMBEDDED_MODEL, RanksConfig
from tpengine.errors import EngineError, GroupLostError
from tpengine.executor.channel import Channel, ChannelClosedError
from tpengine.executor.codec import encode_call
from tpengine.executor.diagnosis import Failure, RankFailure, RankPlace, RanksFailedError
from tpengine.executor.group import Group
from tpengine.executor.home import Home, Start, Started


class Silent(ScriptedAgents):
    """Agents that also take orders."""

    def open(self, node_ids: Any) -> None:
        pass

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        pass


class FakeHome(Home):
    """Ranks that join, and then do nothing.

    Args:
        failure: of the second process, when it starts.
    """

    keeps_memory = False

    def __init__(self, failure: Failure | None = None) -> None:
        self.agents = Silent(look=("exit code 7", ""), tail="last words", wait_for_end=[])
        self.channels: list[Channel] = []
        self.num_kills = 0
        self._failure = failure

    def start(self, *_: Any) -> list[Started]:
        if self._failure is not None:
            raise RanksFailedError({1: self._failure})
        pairs = [socket.socketpair() for _ in range(4)]
        self.channels = [Channel(theirs) for _, theirs in pairs]
        threading.Thread(target=self._join, daemon=True).start()
        own = [Channel(own) for own, _ in pairs]
        places = [RankPlace("n", "127.0.0.1", "host", (), 10 + rank, 1) for rank in range(2)]
        return [(places[0], own[:2]), (places[1], own[2:])]

    def _join(self) -> None:
        for steps in self.channels[0::2]:
            answer(steps, receive(steps, TIMEOUT_S).number, encode_call(None))

    def kill(self) -> None:
        self.num_kills += 1
        for channel in self.channels:
            channel.close()


def make_group(home: FakeHome) -> Group:
    args = EngineArgs(EMBEDDED_MODEL, tensor_parallel_size=2, executor="ray", device="cpu")
    config = args.create_engine_config("cpu")
    parallel = replace(config.parallel, ranks=RanksConfig(TIMEOUT_S, TIMEOUT_S))
    start = Start(TIMEOUT_S, lambda: None)
    return Group(3, replace(config, parallel=parallel), "engine", home, start)


@pytest.fixture
def home() -> Iterator[FakeHome]:
    home = FakeHome()
    yield home
    home.kill()


def open_group(home: FakeHome) -> Group:
    group = make_group(home)
    group.start()
    group.join()
    return group


def test_group_needs_no_launcher() -> None:
    """Nothing of the room that starts processes."""
    files = list((Path(__file__).parent.parent.parent / "tpengine" / "executor").glob("*.py"))
    assert len(files) > 5
    for file in files:
        assert "executor.launch" not in file.read_text(), file


def test_loss_that_leaves_no_thread_to_kill_ranks(
    home: FakeHome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is known all the same, and the end of the group kills them."""
    group = open_group(home)

    kill = Mock(side_effect=RuntimeError("can't start new thread"))

    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(home, "kill", kill)
        home.channels[3].close()
        wait_until(lambda: group.loss is not None, TIMEOUT_S)
    assert (group.loss.rank, group.loss.cause) == (1, "exit code 7")
    assert "were not killed at once: RuntimeError" in caplog.text
    group.end(orderly=False)
    assert home.num_kills == 1


@pytest.mark.parametrize("work", ["step", "call"])
def test_group_that_is_ended_in_a_step_or_call(home: FakeHome, work: str) -> None:
    """Its caller learns that no rank was lost."""
    group = open_group(home)
    ending = threading.Timer(0.2, group.end)
    ending.start()
    if work == "step":
        group.send_step(1, [b"p"] * 2, TIMEOUT_S)
    with pytest.raises(EngineError, match="the engine was shut down"):
        group.take_answers(TIMEOUT_S) if work == "step" else group.call("load_model")
    ending.join(TIMEOUT_S)
    assert group.loss is None


@pytest.mark.parametrize(
    "failure",
    [
        ChannelClosedError("it is gone"),
        RankFailure(1, "here", "join", "ChannelError", "it is gone", "", []),
    ],
    ids=["gone", "cannot connect"],
)
def test_process_that_does_not_start(failure: Failure) -> None:
    group = make_group(FakeHome(failure))
    with pytest.raises(GroupLostError, match="it is gone") as caught:
        group.start()
    assert (caught.value.loss.rank, caught.value.loss.phase) == (1, "start")
    assert "process 1 that has not told where it is" in caught.value.loss.place
    group.end(orderly=False)
