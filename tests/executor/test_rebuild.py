"""A rank dies, freezes, raises or hangs, while idle, in a step or during a load: it is named with
its cause, the group is rebuilt, and the same tokens come out of the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
from support.models import ModelShop
from support.processors import Stopwatch
from support.zoo import PLAIN

from executor import ray_engines
from executor.bare_ranks import BareRanks, bare_ranks
from executor.ray_engines import in_load, in_step, is_alive, sabotaged_rank
from tpengine.errors import EngineError, GroupLostError, ModelLoadError, PlacementError, RankLoss
from tpengine.executor.group import Group
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.messages import StepInput

Wait = Callable[[Callable[[], bool], float], None]
FOUND_S = 1.5
"""A death is seen at once, long before a silence would tell. This and the next are limits for a
machine of one's own: see `Stopwatch`."""
FROZEN_S = 4.0
STEP_TIMEOUT_S = 6.0
PATIENCE_S = 60.0
"""For what has to come at some time."""
KILLED = "killed by signal 9 (SIGKILL)"
FROZEN = "frozen: its process is stopped"
RAISED = "raised ZeroDivisionError: no remainder"


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Actors cannot import the tests, so what the tests define is sent to them."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(ray_engines)
    yield
    cloudpickle.unregister_pickle_by_value(ray_engines)


@pytest.fixture(scope="module")
def folder(ray_address: str, models: ModelShop) -> Path:
    return models.folder(PLAIN)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[BareRanks]:
    """Two ranks; a test may leave them lost."""
    with bare_ranks(folder, 2, step_timeout_s=STEP_TIMEOUT_S) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected(ranks: BareRanks) -> list[int]:
    return ranks.generate()


def lose(ranks: BareRanks) -> None:
    """Kills a rank unless the group is lost already."""
    if ranks.executor.loss is None:
        with contextlib.suppress(ProcessLookupError):  # it is lost, and that is not known yet
            ranks.signal(0, signal.SIGKILL)
        wait_for_loss(ranks)


def wait_for_loss(ranks: BareRanks) -> RankLoss:
    deadline = time.monotonic() + PATIENCE_S
    while (loss := ranks.executor.loss) is None:
        assert time.monotonic() < deadline, f"no loss found within {PATIENCE_S} s"
        time.sleep(0.01)
    return loss


def check_loss(loss: RankLoss, rank: int, phase: str, cause: str, places: list) -> None:
    assert loss.rank == rank
    assert loss.phase == phase
    assert cause in loss.cause
    assert f"pid {places[rank].pid}" in loss.place
    assert ray.util.get_node_ip_address() in loss.place
    processes = [place.process for place in places]
    assert not NodeAgent().wait_for_end(processes, PATIENCE_S), "ranks are still there"


@pytest.mark.parametrize(
    ("rank", "number", "cause", "limit_s"),
    [
        (0, signal.SIGKILL, KILLED, FOUND_S),
        (1, signal.SIGSTOP, FROZEN, FROZEN_S),
        pytest.param(1, signal.SIGKILL, KILLED, FOUND_S, marks=pytest.mark.soak),
        pytest.param(0, signal.SIGSTOP, FROZEN, FROZEN_S, marks=pytest.mark.soak),
    ],
    ids=["0 killed", "1 stopped", "1 killed", "0 stopped"],
)
def test_idle(
    ranks: BareRanks, expected: list[int], rank: int, number: int, cause: str, limit_s: float
) -> None:
    if ranks.executor.loss is not None:
        ranks.rebuild()
    epoch, places = ranks.executor.epoch, ranks.executor.places
    watch = Stopwatch()
    ranks.signal(rank, number)
    loss = wait_for_loss(ranks)
    print(f"\nfound after {watch.elapsed_s:.2f} s; share of the processors {watch.share:.2f}")
    assert watch.own_s < limit_s
    check_loss(loss, rank, "idle", cause, places)
    assert loss.step is None
    assert loss.epoch == epoch
    if number == signal.SIGSTOP:
        assert "tpengine-worker" in loss.stack
        assert "_serve (" in loss.stack
    with pytest.raises(GroupLostError) as caught:
        ranks.executor.execute_model(StepInput(1000, [], []))
    assert caught.value.loss == loss
    ranks.rebuild()
    assert ranks.executor.epoch == epoch + 1
    assert ranks.executor.loss is None
    assert {place.pid for place in ranks.executor.places}.isdisjoint(p.pid for p in places)
    assert ranks.generate() == expected


@dataclass(frozen=True)
class Case:
    """What a rank does to itself, and what is found."""

    rank: int
    action: Callable[[], None]
    cause: str
    limit_s: float
    said: str = ""
    """In its last lines or its stack."""


IN_STEP = {
    "kill": Case(1, ray_engines.kill_self, KILLED, FOUND_S),
    "stop": Case(0, ray_engines.stop_self, FROZEN, FROZEN_S, "stop_self"),
    "exit": Case(0, ray_engines.exit_with_7, "exit code 7", FOUND_S, "this is the end"),
    "raise": Case(1, ray_engines.raise_something, RAISED, FOUND_S, "in raise_something"),
    "hang": Case(1, ray_engines.sleep_long, "rank 0 waited for it", STEP_TIMEOUT_S, "sleep_long"),
}


@pytest.mark.parametrize("name", IN_STEP)
def test_in_a_step(ranks: BareRanks, expected: list[int], name: str) -> None:
    case = IN_STEP[name]
    lose(ranks)
    with sabotaged_rank(case.rank, in_step(ranks.next_step + 19, case.action)):
        ranks.rebuild()
    assert ranks.generate() == expected
    places = ranks.executor.places
    watch = Stopwatch()
    with pytest.raises(GroupLostError) as caught:
        ranks.generate()
    assert watch.own_s < case.limit_s
    loss = caught.value.loss
    check_loss(loss, case.rank, "execute_model", case.cause, places)
    assert loss.step == ranks.next_step - 1
    assert case.said in loss.report()
    assert ranks.executor.loss == loss


IN_LOAD = [
    Case(0, ray_engines.kill_self, KILLED, FROZEN_S),
    Case(1, ray_engines.stop_self, FROZEN, FROZEN_S, "stop_self"),
]


def test_in_a_load(ranks: BareRanks, expected: list[int]) -> None:
    """A loss during a rebuild is found, and so is one during the next; the third goes well."""
    lose(ranks)
    epoch = ranks.executor.epoch
    for case in IN_LOAD:
        watch = Stopwatch()
        with (
            sabotaged_rank(case.rank, in_load(case.action)) as places,
            pytest.raises(GroupLostError) as caught,
        ):
            ranks.rebuild()
        share = watch.share
        check_loss(caught.value.loss, case.rank, "load_model", case.cause, places)
        assert ranks.executor.start_times_s["weights"] * share < case.limit_s
        assert case.said in caught.value.loss.report()
    ranks.rebuild()
    assert ranks.executor.epoch == epoch + 3
    assert ranks.generate() == expected


def test_before_it_connects(
    ranks: BareRanks, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has told where it is, and is lost before its channels: no other wait is ended by
    its death."""
    lose(ranks)
    open_channels = Group.open_channels
    for number, cause, limit_s in (
        (signal.SIGKILL, KILLED, 2 * FOUND_S),
        (signal.SIGSTOP, FROZEN, 2 * FROZEN_S),
    ):

        def losing(group: Group, address: str, number: int = number) -> None:
            os.kill(group.places[1].pid, number)
            open_channels(group, address)

        monkeypatch.setattr(Group, "open_channels", losing)
        watch = Stopwatch()
        with pytest.raises(GroupLostError) as caught:
            ranks.rebuild()
        share = watch.share
        monkeypatch.undo()
        check_loss(caught.value.loss, 1, "join", cause, ranks.executor.places)
        assert ranks.executor.start_times_s["channels"] * share < limit_s
    ranks.rebuild()
    assert ranks.generate() == expected


def test_rebuild_continues_where_tokens_were_sent(ranks: BareRanks, expected: list[int]) -> None:
    """What a recovery does: the tokens so far are computed again, and the rest follows."""
    if ranks.executor.loss is not None:
        ranks.rebuild()
    assert ranks.executor.epoch > 1
    assert ranks.generate(tokens=expected[:7]) == expected


def test_node_that_pauses_is_used_again(
    ranks: BareRanks, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it there is no room, and then its agent answers after all."""
    lose(ranks)
    agents, answers = ranks.executor._agents, []

    def silent(node_ids: Iterable[str], check: Callable[[], None]) -> set[str]:
        answers.append(set(node_ids) if len(answers) < 2 else set())
        return set(answers[-1])

    monkeypatch.setattr(agents, "silent", silent)
    ranks.rebuild()
    assert [len(answer) for answer in answers] == [1, 1, 0]
    assert ranks.generate() == expected


def test_node_that_stays_silent(ranks: BareRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the timeout; no room without it is final."""
    lose(ranks)
    finder = ranks.executor._placer
    monkeypatch.setattr(ranks.executor._agents, "silent", lambda node_ids, check: set(node_ids))
    monkeypatch.setattr(finder, "config", replace(finder.config, placement_timeout_s=1.0))
    watch = Stopwatch()
    with pytest.raises(PlacementError, match="without 1 that do not answer"):
        ranks.rebuild()
    assert watch.elapsed_s >= 1.0
    assert watch.own_s < 5.0


def test_final_error_ends_the_rebuild(
    ranks: BareRanks, folder: Path, tmp_path: Path, expected: list[int]
) -> None:
    """No use in trying again: the model's files are gone. The last to use these ranks."""
    lose(ranks)
    places = ranks.executor.places
    files = sorted(folder.glob("*.safetensors"))
    assert files
    try:
        for file in files:
            file.rename(tmp_path / file.name)
        with pytest.raises(ModelLoadError):
            ranks.rebuild()
        assert not any(is_alive(places + ranks.executor.places))
    finally:
        for file in files:
            (tmp_path / file.name).rename(file)


def test_healthy_ranks_are_not_rebuilt(folder: Path) -> None:
    """Nor ranks that were ended; and a cancelled rebuild fails at once."""
    with bare_ranks(folder, 1) as one:
        with pytest.raises(EngineError, match="nothing to rebuild"):
            one.executor.rebuild()
        one.signal(0, signal.SIGKILL)
        wait_for_loss(one)
        one.executor._is_cancelled.set()
        with pytest.raises(EngineError, match="being shut down"):
            one.executor.rebuild()
