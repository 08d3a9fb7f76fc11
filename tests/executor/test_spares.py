"""Spares become ranks and are replaced; nothing outlives its driver, whatever it was doing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import ray
from support.ray_cluster import shared_memory_files

from executor.bare_ranks import PATIENCE_S, bare_ranks
from executor.driver_process import driver_process
from executor.ray_engines import Wait, free_cpus
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.watch import FENCE_S, HEARTBEAT_S


def test_spares_become_ranks(folder: Path, wait_until: Wait) -> None:
    """The first time both, the second time one: the other is frozen, and is ended."""
    with bare_ranks(folder, 2, spare_workers=2, executor="ray") as ranks:
        expected = ranks.generate()
        wait_until(lambda: len(ranks.spare_processes()) == 2, PATIENCE_S)
        assert ranks.heavy_modules() == [set()] * 4
        # Spares ask for nothing. Ray tells what is held a bit later.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2, PATIENCE_S)
        spares = ranks.spare_processes()
        ranks.lose(1)
        ranks.rebuild()
        # The next spares would take the cores from waiting requests.
        assert not ranks.executor.home.spares.num_started
        assert sorted(place.process for place in ranks.executor.places) == sorted(spares)
        # Reserved again.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2, PATIENCE_S)
        assert ranks.generate() == expected

        wait_until(lambda: len(ranks.spare_processes()) == 2, PATIENCE_S)
        assert not set(ranks.spare_processes()) & set(spares)
        now = ranks.replace_beside_frozen_spare(wait_until)
        assert ranks.generate() == expected
        wait_until(lambda: len(ranks.spare_processes()) == 2, PATIENCE_S)
        left = [*ranks.spare_processes(), *now]
        ranks.executor.shutdown()
        wait_until(lambda: not any(map(NodeAgent.state, left)), PATIENCE_S)


@pytest.mark.soak
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
        driver.process.send_signal(signal.SIGCONT)
        cause, spares = driver.hear()
        assert "heard nothing from the driver" in cause
        rebuilt = [tuple(rank) for rank in driver.hear()]
        assert not set(rebuilt) & set(ranks)
        assert driver.process.poll() is None
    everyone = [*ranks, *rebuilt, *map(tuple, spares)]
    wait_until(lambda: not any(map(NodeAgent.state, everyone)), PATIENCE_S)
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"], PATIENCE_S)
    assert not shared_memory_files(driver.process.pid)
