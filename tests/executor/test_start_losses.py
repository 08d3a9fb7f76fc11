"""Ranks that fail before they have told where they are, or before they are connected."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from support.waiting import wait_until

from executor.bare_ranks import bare_ranks
from executor.ray_engines import replace_ranks
from tpengine.errors import GroupLostError, PlacementError
from tpengine.executor.home import PROCESSES, Start
from tpengine.executor.launch import placement
from tpengine.executor.launch.actors import RayWorker
from tpengine.executor.launch.placement import address_of
from tpengine.host import start_ticks


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


@pytest.mark.soak
def test_rank_that_freezes_before_it_says_where_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is not known yet: the rebuild fails soon, and the next one succeeds."""
    noted: list[Start] = []
    monkeypatch.setattr(Start, "note_first", lambda times: noted.append(times))
    note = tmp_path / "pid"
    with bare_ranks(folder, 2, executor="ray") as ranks:
        expected = ranks.generate()
        [times] = noted
        times.appear_s = 8.0
        ranks.lose(0)
        with monkeypatch.context() as patch:
            replace_ranks(patch, frozen_at_birth(str(note)))
            with pytest.raises(GroupLostError) as caught:
                ranks.rebuild()
        assert caught.value.loss.phase == "start"
        assert "has not told where it is" in caught.value.loss.place
        assert "no answer within" in caught.value.loss.cause
        times.appear_s = 60.0  # Ray has to end the frozen one first
        ranks.rebuild()
        assert ranks.generate() == expected
        wait_until(lambda: start_ticks(int(note.read_text())) is None)


def test_patience_with_new_processes() -> None:
    """At first as long as the user allows; later by what the first took, but enough for a busy
    machine."""
    times = Start(600.0, lambda: None)
    assert times.appear_s == 600.0
    times.seconds[PROCESSES] = 1.0
    times.note_first()
    assert times.appear_s == 25.0
    slow, bounded = Start(600.0, lambda: None), Start(10.0, lambda: None)
    for later in (slow, bounded):
        later.seconds[PROCESSES] = 30.0
        later.note_first()
    assert (slow.appear_s, bounded.appear_s) == (150.0, 10.0)


def test_driver_on_a_node_held_for_dead(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node_id = ray.get_runtime_context().get_node_id()
    assert address_of(node_id) == ray.util.get_node_ip_address()
    monkeypatch.setattr(placement, "cluster_nodes", list)
    with pytest.raises(PlacementError, match=rf"own node {node_id} for dead \(alive: none\)"):
        address_of(node_id)
