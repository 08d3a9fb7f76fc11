"""A rank dies, freezes, raises or hangs, while idle, in a step or during a load: it is named with
its cause, the group is rebuilt, and the same tokens come out of the next one."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from support.gguf_files import write_gguf
from support.matrix import only
from support.patches import on_call
from support.waiting import PATIENCE_S, wait_until

from executor import sabotage
from executor.bare_ranks import BareRanks, bare_ranks
from executor.ray_engines import free_cpus, is_alive, sabotaged_rank
from executor.sabotage import in_load, in_step
from tpengine.checkpoint.gguf_file import open_gguf
from tpengine.errors import EngineError, GroupLostError, ModelLoadError, RankLoss
from tpengine.executor.group import Group
from tpengine.executor.launch.actors import Agents
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.messages import StepInput

STEP_TIMEOUT_S = 600.0
"""More than a test may take, as `start_timeout_s` is: no loss here is found by a deadline."""
IN_FEW_BITS = {"quantization": "int4", "kv_cache_dtype": "int8"}
KILLED = "killed by signal 9 (SIGKILL)"
FROZEN = "frozen: its process is stopped"
RAISED = "raised ZeroDivisionError: no remainder"


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[BareRanks]:
    """Two ranks with weights of 4 bits and a cache of 8; a test may leave them lost."""
    with bare_ranks(folder, 2, step_timeout_s=STEP_TIMEOUT_S, **IN_FEW_BITS) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected(ranks: BareRanks) -> list[int]:
    return ranks.generate()


def lose(ranks: BareRanks) -> None:
    """Kills a rank unless the group is lost already."""
    if ranks.executor.loss is None:
        with contextlib.suppress(ProcessLookupError):  # it is lost, and that is not known yet
            ranks.signal(0, signal.SIGKILL)
        ranks.wait_for_loss()


def check_loss(loss: RankLoss, rank: int, phase: str, cause: str, places: list) -> None:
    assert loss.rank == rank
    assert loss.phase == phase
    assert cause in loss.cause
    assert f"pid {places[rank].pid}" in loss.place
    assert not NodeAgent().wait_for_end([places[rank].process], PATIENCE_S), "it is still there"


@pytest.mark.parametrize(
    ("rank", "number", "cause"),
    [(0, signal.SIGKILL, KILLED), (1, signal.SIGSTOP, FROZEN)],
    ids=["0 killed", "1 stopped"],
)
def test_idle(ranks: BareRanks, expected: list[int], rank: int, number: int, cause: str) -> None:
    if ranks.executor.loss is not None:
        ranks.rebuild()
    epoch, places = ranks.executor.epoch, ranks.executor.places
    ranks.signal(rank, number)
    loss = ranks.wait_for_loss()
    check_loss(loss, rank, "idle", cause, places)
    assert loss.step is None
    assert loss.epoch == epoch
    if number == signal.SIGSTOP:
        assert "serve (" in loss.stack
    with pytest.raises(GroupLostError) as caught:
        ranks.executor.execute_model(StepInput(1000, [], []))
    assert caught.value.loss == loss
    ranks.rebuild()
    assert ranks.executor.epoch == epoch + 1
    assert ranks.executor.loss is None
    assert {place.pid for place in ranks.executor.places}.isdisjoint(p.pid for p in places)
    assert ranks.generate() == expected


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, KILLED), pytest.param(signal.SIGSTOP, FROZEN, marks=pytest.mark.soak)],
)
def test_both_at_once(ranks: BareRanks, expected: list[int], number: int, cause: str) -> None:
    """While they compute: one of the two is named, and the same ids come out of the next group."""
    if ranks.executor.loss is not None:
        ranks.rebuild()
    lost = ranks.executor.places

    def lose_both(_: StepInput) -> None:
        for rank in range(2):
            ranks.signal(rank, number)

    with pytest.MonkeyPatch.context() as patch:
        on_call(patch, ranks.executor, "execute_model", lose_both)
        with pytest.raises(GroupLostError) as caught:
            ranks.generate()
    loss = caught.value.loss  # it may be found before the step begins
    check_loss(loss, loss.rank, loss.phase, cause, lost)
    ranks.rebuild()
    assert ranks.generate() == expected


@dataclass(frozen=True)
class Case:
    """What a rank does to itself, and what is found."""

    rank: int
    action: Callable[[], None]
    cause: str
    said: str = ""
    """In its last lines or its stack."""


IN_STEP = {
    "kill": Case(1, sabotage.kill_self, KILLED),
    "stop": Case(0, sabotage.stop_self, FROZEN, "stop_self"),
    "exit": Case(0, sabotage.exit_with_7, "exit code 7", "this is the end"),
    "raise": Case(1, sabotage.raise_something, RAISED, "in raise_something"),
}


@pytest.mark.parametrize("name", only(("stop", "exit", "raise"), IN_STEP))
def test_in_a_step(ranks: BareRanks, expected: list[int], name: str) -> None:
    """A rank of the next group does this to itself in its twentieth step."""
    case = IN_STEP[name]
    lose(ranks)
    with sabotaged_rank(case.rank, in_step(ranks.next_step + 19, case.action)):
        ranks.rebuild()
    check_twentieth_step(ranks, expected, case)


def test_a_step_that_hangs(folder: Path, expected: list[int]) -> None:
    """Its deadline alone ends it."""
    case = Case(1, sabotage.sleep_long, "rank 0 waited for it", "sleep_long")
    with (
        sabotaged_rank(case.rank, in_step(20, case.action)),
        bare_ranks(folder, 2, step_timeout_s=6.0, **IN_FEW_BITS) as ranks,
    ):
        check_twentieth_step(ranks, expected, case)


def check_twentieth_step(ranks: BareRanks, expected: list[int], case: Case) -> None:
    assert ranks.generate() == expected
    places = ranks.executor.places
    with pytest.raises(GroupLostError) as caught:
        ranks.generate()
    loss = caught.value.loss
    check_loss(loss, case.rank, "execute_model", case.cause, places)
    assert loss.step == ranks.next_step - 1
    assert case.said in loss.report()
    assert ranks.executor.loss == loss


IN_LOAD = [Case(0, sabotage.kill_self, KILLED), Case(1, sabotage.stop_self, FROZEN, "stop_self")]


def test_in_a_load(ranks: BareRanks, expected: list[int]) -> None:
    """A loss during a rebuild is found, and so is one during the next; the third goes well."""
    lose(ranks)
    epoch = ranks.executor.epoch
    for case in IN_LOAD:
        with (
            sabotaged_rank(case.rank, in_load(case.action)) as places,
            pytest.raises(GroupLostError) as caught,
        ):
            ranks.rebuild()
        # int4: what `load_model` has loaded is measured, then loaded anew.
        check_loss(caught.value.loss, case.rank, "calibrate", case.cause, places)
        assert case.said in caught.value.loss.report()
    ranks.rebuild()
    assert ranks.executor.epoch == epoch + 3
    assert ranks.generate() == expected


def test_join(ranks: BareRanks, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is lost before it becomes a rank, and sends heartbeats."""
    lose(ranks)

    ways = {KILLED: signal.SIGKILL, FROZEN: signal.SIGSTOP}

    def signal_one(group: Group) -> None:
        os.kill(group.places[1].pid, ways[cause])

    for cause in ways:
        on_call(monkeypatch, Group, "join", signal_one)
        with pytest.raises(GroupLostError) as caught:
            ranks.rebuild()
        monkeypatch.undo()
        check_loss(caught.value.loss, 1, "join", cause, ranks.executor.places)
    ranks.rebuild()
    assert ranks.generate() == expected


def test_node_that_pauses_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is no room, and then its agent answers after all."""
    answers: list[set[str]] = []

    def silent(_: Agents, node_ids: Iterable[str], check: Callable[[], None]) -> set[str]:
        answers.append(set(node_ids) if len(answers) < 2 else set())
        return set(answers[-1])

    with bare_ranks(folder, 1, executor="ray") as ranks:
        expected = ranks.generate()
        assert ray.util.get_node_ip_address() in ranks.lose(0).place
        monkeypatch.setattr(Agents, "silent", silent)
        ranks.rebuild()
        assert [len(answer) for answer in answers] == [1, 1, 0]
        assert ranks.generate() == expected


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_another_number_of_ranks(folder: Path, executor: str) -> None:
    """It needs no loss. On Ray the places of the others are given back, and room is looked for
    without keeping it."""

    def num_held() -> float:
        return float(ray.cluster_resources()["CPU"]) - free_cpus()

    with bare_ranks(folder, 2, executor=executor, min_ranks=1) as ranks:
        expected = ranks.generate()
        before = num_held()
        for size in (1, 2, 1):
            ranks.rebuild(size)
            assert ranks.generate() == expected
            assert len(ranks.executor.places) == size
            if executor == "ray":
                wait_until(lambda num=size: num_held() == before - 2 + num, what="other places")
        assert ranks.executor.has_room(1)
        assert not ranks.executor.has_room(1000)
        if executor == "ray":
            wait_until(lambda: num_held() == before - 1, what="places are left")


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


def test_a_gguf_file_that_is_replaced(folder: Path, tmp_path: Path) -> None:
    """A new rank on transformers' code, which its template has imported, reads it again, as it is
    stored, and refuses another one of the same sizes: streams would go on with other weights. A
    byte copy of the file is accepted."""
    path, metadata = tmp_path / "model.gguf", {"tokenizer.ggml.eos_token_id": 2}
    write = partial(write_gguf, folder, path, "Q4_0", metadata)
    write()
    old, args = path.read_bytes(), {"model_impl": "transformers", "dtype": "auto"}
    with bare_ranks(path, 1, **args) as ranks:
        expected = ranks.generate()
        assert ranks.have_transformers() == [True] * 2
        path.unlink()
        path.write_bytes(old)
        ranks.lose(0)
        ranks.rebuild()
        assert ranks.generate() == expected
        norm = "blk.1.attn_norm.weight"
        ones = np.ones(open_gguf(path).tensors[norm].shape, np.float32)
        write(only=partial(str.__ne__, norm), further={norm: ones})
        assert len(path.read_bytes()) == len(old)
        ranks.lose(0)
        with pytest.raises(ModelLoadError, match=r"model\.gguf are no longer those"):
            ranks.rebuild()
        assert not any(is_alive(ranks.executor.places))


def test_what_fails_at_the_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt replaces ranks that are ready or half started. A shutdown
    that does not wait for it takes its descriptors, too."""

    with bare_ranks(folder, 1) as ranks:
        executor = ranks.executor
        expected = ranks.generate()
        first = executor.places
        with monkeypatch.context() as patch:
            full = Mock(side_effect=OSError(errno.EMFILE, "full"))
            patch.setattr("tpengine.executor.group.WakeUp", full)
            with pytest.raises(OSError, match="full"):
                executor.rebuild()
            [half_started] = executor.home.agents.children.values()
            wait_until(lambda: half_started.exit_status() == signal.SIGKILL)
        with monkeypatch.context() as patch:
            no_thread = RuntimeError("can't start new thread")
            patch.setattr("threading.Timer.start", Mock(side_effect=no_thread))
            ranks.rebuild()
        assert executor.epoch == 2
        assert not any(is_alive(first))
        assert ranks.generate() == expected

        def shut_down(*_: object) -> None:
            executor.shutdown()
            executor._check()

        monkeypatch.setattr("tpengine.executor.group_executor._TURN_S", 0.1)
        monkeypatch.setattr(executor.home, "replace", shut_down)
        with pytest.raises(EngineError, match="being shut down"):
            executor.rebuild()
        assert not executor._reserve._held
        with pytest.raises(EngineError, match="being shut down"):
            executor.rebuild()


def test_spares_become_ranks(folder: Path) -> None:
    """And are replaced."""
    with bare_ranks(folder, 2, spare_workers=2, executor="ray") as ranks:
        expected = ranks.generate()
        wait_until(lambda: len(ranks.spare_processes()) == 2)
        assert ranks.have_transformers() == [False] * 4
        # Spares ask for nothing. Ray tells what is held a bit later.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2)
        spares = ranks.spare_processes()
        ranks.lose(1)
        ranks.rebuild()
        # The next spares would take the cores from waiting requests.
        assert not ranks.executor.home.spares._spares
        assert sorted(place.process for place in ranks.executor.places) == sorted(spares)
        # Reserved again.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2)
        assert ranks.generate() == expected

        wait_until(lambda: len(ranks.spare_processes()) == 2)
        assert not set(ranks.spare_processes()) & set(spares)
        left = [*ranks.spare_processes(), *spares]
        ranks.executor.shutdown()
        wait_until(lambda: not any(map(NodeAgent.state, left)))
