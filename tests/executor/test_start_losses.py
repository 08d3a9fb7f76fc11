"""Ranks that fail before they have told where they are, or before they are connected."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.models import ModelShop
from support.ray_cluster import shared_memory_files
from support.zoo import PLAIN

from executor import ray_engines
from executor.bare_ranks import bare_ranks
from executor.ray_engines import ray_engine, replace_ranks, sabotaged_rank
from tpengine.errors import GroupLostError, PlacementError, RendezvousError, WorkerDiedError
from tpengine.executor.launch import placement, ray_executor
from tpengine.executor.launch.actors import RayWorker
from tpengine.executor.launch.placement import address_of
from tpengine.executor.launch.ray_executor import PROCESSES, StartTimes

Wait = Callable[[Callable[[], bool], float], None]
LEAST_S = 8.0
RAY_ENDS_S = 6.0
"""Ray ends a process that does not end itself when asked to; this is how long it waits."""


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """Actors cannot import the tests, so what the tests define is sent to them."""
    from ray import cloudpickle

    modules = ray_engines, sys.modules[__name__]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def folder(ray_address: str, models: ModelShop) -> Path:
    return models.folder(PLAIN)


def frozen_at_birth(note: str) -> type[RayWorker]:
    """The first of these to be asked stops, and leaves its number; the others live."""

    class Frozen(RayWorker):
        def describe(self, devices: tuple[str, ...] | None = None) -> Any:
            try:
                file = os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return super().describe(devices)
            os.write(file, str(os.getpid()).encode())
            os.close(file)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60.0)
            return None

    return Frozen


def state_of(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0].replace("Z", "")


def test_rank_that_freezes_before_it_says_where_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    """Its process is not known yet: the rebuild fails soon, and the next one succeeds."""
    monkeypatch.setattr(ray_executor, "_LEAST_APPEAR_S", LEAST_S)
    monkeypatch.setattr(ray_executor, "_APPEAR_PATIENCE", 3.0)
    note = tmp_path / "pid"
    with bare_ranks(folder, 2) as ranks:
        expected = ranks.generate()
        assert ranks.executor._times.appear_s < 90.0
        ranks.signal(0, signal.SIGKILL)
        wait_until(lambda: ranks.executor.loss is not None, 5.0)
        with monkeypatch.context() as patch:
            replace_ranks(patch, frozen_at_birth(str(note)))
            start = time.monotonic()
            with pytest.raises(GroupLostError) as caught:
                ranks.rebuild()
        took_s = time.monotonic() - start
        assert took_s < ranks.executor._times.appear_s + 5.0
        assert caught.value.loss.phase == "start"
        assert "has not told where it is" in caught.value.loss.place
        assert "no answer within" in caught.value.loss.cause
        ranks.executor._times.appear_s = 60.0  # Ray has to end the frozen one first
        ranks.rebuild()
        assert ranks.generate() == expected
        wait_until(lambda: not state_of(int(note.read_text())), RAY_ENDS_S)


def test_patience_with_new_processes() -> None:
    """At first as long as the user allows; later by what the first took, but enough for a busy
    machine."""
    times = StartTimes(600.0)
    assert times.appear_s == 600.0
    times.seconds[PROCESSES] = 1.0
    times.note_first()
    assert times.appear_s == ray_executor._LEAST_APPEAR_S
    slow, bounded = StartTimes(600.0), StartTimes(10.0)
    for one in (slow, bounded):
        one.seconds[PROCESSES] = 30.0
        one.note_first()
    assert (slow.appear_s, bounded.appear_s) == (150.0, 10.0)


def missing_rank(module: Any) -> None:
    """A rank's report that another one is missing, without its number."""

    def connect(*_: Any) -> None:
        from tpengine.errors import RendezvousError
        from tpengine.logger import init_logger

        init_logger("tpengine.worker.worker").warning("only this rank is here")
        raise RendezvousError("a rank did not come")

    module.Worker.connect = connect


def test_word_of_a_rank_at_the_start_keeps_its_traceback(folder: Path) -> None:
    with sabotaged_rank(1, missing_rank), pytest.raises(RendezvousError) as caught:
        ray_engine(folder, 2)
    assert "a rank did not come [rank 1 on node" in str(caught.value)
    report = str(caught.value.__cause__)
    assert "traceback of rank 1" in report
    assert "Traceback (most recent call last)" in report
    assert "only this rank is here" in report


def killed_with_its_file(module: Any) -> None:
    """Rank 0's end between making the file in shared memory and removing its name."""

    def connect(_: Any, rendezvous: Any) -> None:
        from tpengine.distributed.shared_memory import SegmentFile

        SegmentFile(rendezvous.engine_id, rendezvous.epoch)
        os.kill(os.getpid(), signal.SIGKILL)

    module.Worker.connect = connect


def test_file_of_a_rank_that_was_killed_at_the_start_is_removed(folder: Path) -> None:
    with sabotaged_rank(0, killed_with_its_file), pytest.raises(WorkerDiedError, match="SIGKILL"):
        ray_engine(folder, 2)
    assert not shared_memory_files(os.getpid())


def test_driver_whose_node_ray_holds_for_dead(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id = ray.get_runtime_context().get_node_id()
    assert address_of(node_id) == ray.util.get_node_ip_address()
    monkeypatch.setattr(placement, "cluster_nodes", list)
    with pytest.raises(PlacementError, match=rf"own node {node_id} for dead \(alive: none\)"):
        address_of(node_id)


def test_no_spares_in_the_drivers_own_placement_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    """Ray would give a rank's bundle, which looks free when a spare has taken over, to others."""
    others = ray.util.placement_group([{"CPU": 1}] * 2)
    assert others.wait(10.0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(placement, "get_current_placement_group", lambda: others)
            with bare_ranks(folder, 2, spare_workers=1) as ranks:
                expected = ranks.generate()
                ranks.signal(1, signal.SIGKILL)
                wait_until(lambda: ranks.executor.loss is not None, 5.0)
                ranks.rebuild()
                assert ranks.generate() == expected
                time.sleep(0.5)
                assert not ranks.has_spares
    finally:
        ray.util.remove_placement_group(others)
