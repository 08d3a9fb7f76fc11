"""A group of ranks whose launcher is not Ray's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from executor.channels import SOON_S, TIMEOUT_S, receive
from executor.test_diagnosis import ScriptedAgents
from tpengine import EngineArgs
from tpengine.config import EMBEDDED_MODEL, RanksConfig
from tpengine.errors import EngineError, GroupLostError
from tpengine.executor.channel import Channel, ChannelClosedError, Listener, connect
from tpengine.executor.diagnosis import RankFailure, RankPlace
from tpengine.executor.group import Group


class Answers:
    """Calls that have been answered."""

    def __init__(self, answers: Mapping[int, Any]) -> None:
        self._answers = dict(answers)

    def wait(self, timeout_s: float) -> Mapping[int, Any]:
        if not self._answers:
            time.sleep(timeout_s)
        answers, self._answers = self._answers, {}
        return answers


class Silent(ScriptedAgents):
    """Agents that also take orders."""

    def open(self, node_ids: Any) -> None:
        pass

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        pass


class FakeLauncher:
    """Ranks that connect and then do nothing.

    Args:
        answers: of each method that is called, by rank.
    """

    def __init__(self, **answers: Mapping[int, Any]) -> None:
        self.agents = Silent(look=("exit code 7", ""), tail="last words", wait_for_end=[])
        self.channels: list[Channel] = []
        self.num_kills = 0
        self._answers = answers

    def start(self) -> Answers:
        places = {i: RankPlace("n", "127.0.0.1", "host", (), 10 + i, 1) for i in range(2)}
        return Answers(self._answers.get("start", places))

    def order(self, places: Sequence[RankPlace]) -> list[RankPlace]:
        return list(reversed(places))

    def listen(self, epoch: int) -> Listener:
        return Listener("127.0.0.1", b"s" * 32, epoch)

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], kwargs: Mapping[str, Any]
    ) -> Answers:
        if method == "join" and "join" not in self._answers:
            threading.Thread(target=self._join, args=(args,), daemon=True).start()
        return Answers(self._answers.get(method, dict.fromkeys(args)))

    def _join(self, args: Mapping[int, tuple[Any, ...]]) -> None:
        for rank, epoch, invitation, wait_s in args.values():
            for index in range(2):
                channel = connect(*invitation, rank, epoch, wait_s, index)
                self.channels.append(channel)

    def kill(self) -> None:
        self.num_kills += 1
        for channel in self.channels:
            channel.close()


def make_group(launcher: FakeLauncher) -> Group:
    args = EngineArgs(EMBEDDED_MODEL, tensor_parallel_size=2, executor="ray", device="cpu")
    config = args.create_engine_config("cpu")
    return Group(3, config, launcher, RanksConfig(TIMEOUT_S, TIMEOUT_S), lambda: None)


@pytest.fixture
def launcher() -> Iterator[FakeLauncher]:
    launcher = FakeLauncher()
    yield launcher
    launcher.kill()


def open_group(launcher: FakeLauncher) -> Group:
    group = make_group(launcher)
    group.start(TIMEOUT_S)
    group.open_channels()
    return group


def test_group_needs_no_launcher() -> None:
    """Nothing of the room that starts processes."""
    room = Path(__file__).parent.parent.parent / "tpengine" / "executor"
    files = list(room.glob("*.py"))
    assert len(files) > 5
    for file in files:
        assert file.stem == "local_executor" or "executor.launch" not in file.read_text(), file


def test_loss_that_leaves_no_thread_to_kill_ranks(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is known all the same, and the end of the group kills them."""
    group = open_group(launcher)

    def kill() -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(launcher, "kill", kill)
        launcher.channels[3].close()
        wait_until(lambda: group.loss is not None, TIMEOUT_S)
    assert group.loss is not None
    assert (group.loss.rank, group.loss.cause) == (1, "exit code 7")
    assert "were not killed at once: RuntimeError" in caplog.text
    group.end(orderly=False)
    assert launcher.num_kills == 1


def test_group_that_is_ended_in_a_step(launcher: FakeLauncher) -> None:
    """The caller of the step learns that no rank was lost."""
    group = open_group(launcher)
    ending = threading.Timer(0.2, group.end, [False])
    ending.start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="the engine was shut down"):
        group.step(1, b"p", TIMEOUT_S)
    assert time.monotonic() - start < SOON_S
    ending.join(TIMEOUT_S)
    assert group.loss is None


def test_rank_whose_channel_closes_in_a_step(launcher: FakeLauncher) -> None:
    """It is named with its place, its step, its end and its last words, and all are killed."""
    group = open_group(launcher)
    steps = launcher.channels[2]

    def close() -> None:
        receive(steps, TIMEOUT_S)
        steps.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(GroupLostError) as caught:
        group.step(5, b"p", TIMEOUT_S)
    closing.join(TIMEOUT_S)
    loss = caught.value.loss
    assert (loss.rank, loss.epoch, loss.step, loss.phase) == (1, 3, 5, "execute_model")
    assert loss.cause == "exit code 7"
    assert loss.last_lines == "last words"
    assert "pid 10" in loss.place, "the launcher made the first process the last rank"
    assert launcher.num_kills == 1
    with pytest.raises(GroupLostError):
        group.call("anything")
    group.end(orderly=False)


def test_rank_that_cannot_connect() -> None:
    failure = RankFailure(1, "here", "join", "ChannelError", "no route", "", [])
    launcher = FakeLauncher(join={1: failure})
    group = make_group(launcher)
    group.start(TIMEOUT_S)
    with pytest.raises(GroupLostError, match="no route") as caught:
        group.open_channels()
    assert caught.value.loss.phase == "join"
    group.end(orderly=False)


def test_process_that_is_gone_before_its_place_is_known() -> None:
    launcher = FakeLauncher(start={1: ChannelClosedError("it is gone")})
    group = make_group(launcher)
    with pytest.raises(GroupLostError, match="it is gone") as caught:
        group.start(TIMEOUT_S)
    assert caught.value.loss.rank == 1
    assert "process 1 that has not told where it is" in caught.value.loss.place
    group.end(orderly=False)
