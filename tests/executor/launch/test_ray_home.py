"""When the driver takes its ranks over from Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tpengine import EngineArgs
from tpengine.errors import GroupLostError, RankLoss
from tpengine.executor.diagnosis import RankPlace
from tpengine.executor.home import Start
from tpengine.executor.launch.ray_home import RayHome

BEGUN, LATER, WELL = "start", "load_model", ""
"""The phase in which an attempt at a new group fails; the last one does not."""


@pytest.mark.parametrize(
    ("is_here", "phases", "taken_over_by"),
    [
        (True, [BEGUN, BEGUN, BEGUN], 1),
        (True, [BEGUN, LATER, BEGUN, WELL, BEGUN], None),
        (True, [BEGUN, WELL, LATER, BEGUN, BEGUN], 4),
        (True, [LATER] * 5, None),
        (False, [BEGUN] * 5, None),
    ],
)
def test_a_ray_that_starts_no_rank(
    folder: Path, monkeypatch: Any, is_here: bool, phases: list[str], taken_over_by: int | None
) -> None:
    """Two times in a row, if all ranks ran on the driver's machine: with the second one the driver
    starts them itself. Ranks of several machines wait for Ray."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, executor="ray", device="cpu")
    connection: Any = SimpleNamespace(is_alive=True, close=lambda: None)
    home = RayHome(args.create_engine_config("cpu"), connection)
    placement = SimpleNamespace(node_ids=["", ""], is_borrowed=False)
    placer = SimpleNamespace(replace=lambda old, silent: placement)
    monkeypatch.setattr(home, "_placer", lambda *args: placer)
    monkeypatch.setattr(home.agents, "silent", lambda node_ids, check: set())
    node_id = ray.get_runtime_context().get_node_id() if is_here else "f" * 56
    lost = places = [RankPlace(node_id, "10.0.0.1", "host", (), rank, 1) for rank in range(2)]
    successors = []
    for phase in phases:
        group = SimpleNamespace(places=lost, end=lambda silent: None)
        home.replace(2, group, Start(60.0, lambda: None))
        lost = [] if phase == BEGUN else places
        loss = RankLoss(0, "somewhere", 2, None, phase, "Ray says: it died")
        successors.append(home.successor(GroupLostError(loss)) if phase else None)
        if successors[-1] is not None:
            successors[-1].close()
            break
    home.close()
    assert len(successors) == (len(phases) if taken_over_by is None else taken_over_by + 1)
    assert (successors[-1] is not None) == (taken_over_by is not None)
