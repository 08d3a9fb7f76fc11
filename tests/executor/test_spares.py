"""Spares become ranks and are replaced."""

from __future__ import annotations

from pathlib import Path

import ray
from support.waiting import wait_until

from executor.bare_ranks import bare_ranks
from executor.ray_engines import free_cpus
from tpengine.executor.launch.node_agent import NodeAgent


def test_spares_become_ranks(folder: Path) -> None:
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
        assert not ranks.executor.home.spares.num_started
        assert sorted(place.process for place in ranks.executor.places) == sorted(spares)
        # Reserved again.
        wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"] - 2)
        assert ranks.generate() == expected

        wait_until(lambda: len(ranks.spare_processes()) == 2)
        assert not set(ranks.spare_processes()) & set(spares)
        left = [*ranks.spare_processes(), *spares]
        ranks.executor.shutdown()
        wait_until(lambda: not any(map(NodeAgent.state, left)))
