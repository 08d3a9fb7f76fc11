"""Spares become ranks and are replaced; nothing outlives its driver, whatever it was doing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from support.models import ModelShop
from support.processors import Stopwatch
from support.ray_cluster import shared_memory_files
from support.zoo import PLAIN

from executor.bare_ranks import BareRanks, bare_ranks
from executor.driver_process import driver_process
from executor.ray_engines import free_cpus
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.watch import FENCE_S, HEARTBEAT_S

Wait = Callable[[Callable[[], bool], float], None]
PATIENCE_S = 30.0
"""For an event that only has to come, when other programs use the cores."""


@pytest.fixture
def folder(ray_address: str, models: ModelShop) -> Path:
    return models.folder(PLAIN)


def lose(ranks: BareRanks, wait_until: Wait) -> None:
    ranks.signal(1, signal.SIGKILL)
    wait_until(lambda: ranks.executor.loss is not None, PATIENCE_S)


def test_spares_become_ranks(folder: Path, wait_until: Wait) -> None:
    """The first time both, the second time one: the other is frozen, and is ended."""
    with bare_ranks(folder, 2, spare_workers=2) as ranks:
        expected = ranks.generate()
        wait_until(lambda: len(ranks.spare_processes()) == 2, 60.0)
        # Spares ask for nothing. Ray tells what is held a bit later.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2, PATIENCE_S)
        spares = ranks.spare_processes()
        lose(ranks, wait_until)
        ranks.rebuild()
        assert not ranks.has_spares, "the next spares would take the cores from waiting requests"
        assert sorted(place.process for place in ranks.executor.places) == sorted(spares)
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2, 5.0)  # still reserved
        times = ranks.executor.start_times_s
        print(
            f"\nwith spares: processes {times['processes']:.2f} s, imports {times['imports']:.2f}"
        )
        assert ranks.generate() == expected

        wait_until(lambda: len(ranks.spare_processes()) == 2, 60.0)
        frozen, good = ranks.spare_processes()
        assert not {frozen, good} & set(spares)
        os.kill(frozen[0], signal.SIGSTOP)
        lose(ranks, wait_until)
        ranks.rebuild()
        now = [place.process for place in ranks.executor.places]
        assert good in now
        assert frozen not in now
        wait_until(lambda: NodeAgent.state(frozen) == "", PATIENCE_S)
        assert ranks.generate() == expected
        wait_until(lambda: len(ranks.spare_processes()) == 2, 60.0)
        left = [*ranks.spare_processes(), *now]
        ranks.executor.shutdown()
        wait_until(lambda: not any(map(NodeAgent.state, left)), PATIENCE_S)


def test_driver_that_is_stopped_and_killed(
    folder: Path, ray_address: str, wait_until: Wait
) -> None:
    """Its ranks end while it is stopped; it goes on, says so, and is killed while it rebuilds."""
    with driver_process("lost_driver.py", folder, ray_address) as driver:
        ranks = [tuple(rank) for rank in driver.hear()]
        assert all(map(NodeAgent.state, ranks))
        driver.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        time.sleep(FENCE_S - 2.0)
        are_there = all(map(NodeAgent.state, ranks))
        if time.monotonic() - start < FENCE_S - HEARTBEAT_S:  # or this process had a pause itself
            assert are_there, "ranks must outlive a short pause of their driver"
        wait_until(lambda: not any(map(NodeAgent.state, ranks)), FENCE_S + PATIENCE_S)
        print(f"\nranks gone {time.monotonic() - start:.2f} s after their driver was stopped")
        driver.process.send_signal(signal.SIGCONT)
        cause, spares = driver.hear()
        assert "heard nothing from the driver" in cause
        rebuilt = [tuple(rank) for rank in driver.hear()]
        assert not set(rebuilt) & set(ranks)
        assert driver.process.poll() is None
    everyone = [*ranks, *rebuilt, *map(tuple, spares)]
    watch = Stopwatch()
    wait_until(lambda: not any(map(NodeAgent.state, everyone)), PATIENCE_S)
    assert watch.own_s < 5.0
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"], PATIENCE_S)
    assert not shared_memory_files(driver.process.pid)
