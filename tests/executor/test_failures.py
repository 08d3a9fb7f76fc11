"""A start that fails says why, quickly, with the rank's own words, and leaves nothing behind."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from support.messages import refused, said
from support.waiting import PATIENCE_S, wait_until

from executor import sabotage
from executor.ray_engines import free_cpus, is_alive, rank_engine, ray_engine, sabotaged_rank
from tpengine import EngineArgs, LLMEngine, errors
from tpengine.executor.channel import Listener
from tpengine.executor.launch import ray_home
from tpengine.executor.launch.placement import Placer

TRACEBACK = "Traceback (most recent call last)"


@pytest.fixture(autouse=True)
def _all_is_given_back(ray_address: str) -> Iterator[None]:
    yield
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"])


def test_impossible_placement(folder: Path) -> None:
    words = r"Ray at \S+:\d+: wanted 8 x \{CPU: 2\} \(PACK\).*room for 4 even.*--ray-bundle CPU=1\)"
    with pytest.raises(errors.PlacementError, match=words):
        ray_engine(folder, 8, ray_bundle="CPU=2")
    with pytest.raises(errors.PlacementError, match=r"wanted 2 x \{npu: 1\}.*have .*\{CPU: 8\}"):
        ray_engine(folder, 2, ray_bundle="npu=1")


class DriverInAGroup:
    """Holds a CPU of a placement group, in whose bundles it places ranks."""

    def place(self, size: int, timeout_s: float) -> tuple[list[int], str]:
        """(indices of the ranks' bundles, the error)."""
        room = {"CPU": 1.0}, size, "PACK", timeout_s
        placer = Placer(*room, lambda _: set(), lambda: None)
        try:
            return placer.place(set())._indices, ""
        except errors.PlacementError as error:
            return [], str(error)


def test_a_driver_that_holds_a_bundle() -> None:
    """Its ranks take the others; where there are too few, it is said soon what holds them."""
    group = ray.util.placement_group([{"CPU": 1}] * 3)
    assert group.wait(10.0)
    strategy = PlacementGroupSchedulingStrategy(group, 1, placement_group_capture_child_tasks=True)
    driver = ray.remote(DriverInAGroup).options(num_cpus=1, scheduling_strategy=strategy).remote()
    try:
        assert ray.get(driver.place.remote(2, 60.0), timeout=PATIENCE_S + 60.0) == ([0, 2], "")
        _, error = ray.get(driver.place.remote(3, 1.0), timeout=PATIENCE_S)
        assert "bundle 1 has {CPU: 0} left" in error
        assert "the driver's own actor holds {CPU: 1}" in error
    finally:
        ray.kill(driver)
        ray.util.remove_placement_group(group)


def test_possible_but_busy(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Groups of other engines that have the room are named, and whether their driver has ended."""
    ended = f"tpengine-{ray.util.get_node_ip_address()}-{1 << 30}-0123abcd"
    words = rf"{ended} \(2 bundles, of process \d+ on \S+, which has ended\)"
    others = [
        ray.util.placement_group([{"CPU": 3}, {"CPU": 1}], name=ended),
        ray.util.placement_group([{"CPU": 3}], name="tpengine-10.0.0.7-4711-0123abcd"),
    ]
    assert all(group.wait(10.0) for group in others)
    try:
        wanted = r"within 2 s: wanted 2 x \{CPU: 1\}.*CPU: 1.*of"
        with said(caplog) as lines, pytest.raises(errors.PlacementError, match=wanted) as caught:
            ray_engine(folder, 2, placement_timeout_s=2.0)
    finally:
        for group in others:
            ray.util.remove_placement_group(group)
    assert re.search(words, str(caught.value))
    [line] = [line for line in lines if "waiting up to 2 s" in line]
    assert "tpengine-10.0.0.7-4711-0123abcd (1 bundle, of process 4711 on 10.0.0.7)" in line
    assert re.search(r"waiting up to 2 s .* at \S+:\d+: wanted 2 x {CPU: 1}", line)


def test_nodes_that_are_excluded(ray_address: str) -> None:
    """Nodes that do not answer get no rank, although Ray may hold them for alive."""
    node_id = ray.get_runtime_context().get_node_id()
    other = "f" * len(node_id)
    placer = Placer({"CPU": 1.0}, 2, "PACK", 1.0, lambda _: set(), lambda: None)
    placement = placer.place({other, other[:-1] + "e"})
    try:
        assert placement.node_ids == [node_id] * 2
        assert not placement.is_borrowed
        assert placer.replace(placement, set()) is placement
    finally:
        placement.remove()
    wait_until(placement.is_removed)
    placer.replace(placement, set()).remove()  # another one
    with pytest.raises(errors.PlacementError, match="without 1 that do not answer: wanted 2"):
        placer.place({node_id})
    start = time.monotonic()
    with pytest.raises(errors.PlacementError, match="without 1 that do not answer: wanted 2"):
        replace(placer, find_silent=set).replace(placer.place(set()), {node_id})
    assert time.monotonic() - start >= 1.0, "a node may only have paused"


FAILURES = {  # a rank, what it does, and the error of the start
    "raises": (1, sabotage.in_load(sabotage.fail_with_a_line), errors.WorkerError),
    "dies": (1, sabotage.in_load(sabotage.die_with_a_word), errors.WorkerDiedError),
    "misses another": (1, sabotage.missing_rank, errors.RendezvousError),
    "dies with its segment": (0, sabotage.killed_with_its_segment, errors.WorkerDiedError),
}
SAID = {
    "raises": f"ZeroDivisionError: cannot read block 17 | in load_model | {TRACEBACK} | a noise",
    "dies": "load_model | my last words",
    "misses another": "a rank did not come [rank 1 on node",
    "dies with its segment": "SIGKILL",
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_one_rank(folder: Path, name: str) -> None:
    rank, harm, kind = FAILURES[name]
    with sabotaged_rank(rank, harm) as places, refused(kind, SAID[name]) as caught:
        rank_engine(folder, 2)
    assert len(places) == 2
    assert f"rank {rank} on {places[rank]}" in str(caught.value)
    if name == "misses another":
        for part in ("traceback of rank 1", TRACEBACK, "only this rank is here"):
            assert part in str(caught.value.__cause__)
    wait_until(lambda: not any(is_alive(places)))


def test_driver_that_ranks_cannot_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They report it at once, with the address."""
    unused = socket.create_server(("127.0.0.1", 0))
    address = unused.getsockname()[:2]
    unused.close()

    class Elsewhere(Listener):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.invitation = address, b""

    monkeypatch.setattr(ray_home, "Listener", Elsewhere)
    with pytest.raises(
        errors.WorkerError, match=rf"cannot reach the driver at 127.0.0.1:{address[1]}"
    ):
        ray_engine(folder, 1)


def test_a_ranks_typed_error_keeps_its_type(folder: Path) -> None:
    """One rank has less memory than a block takes; the others have enough."""
    with pytest.raises(errors.CacheSizeError, match=r"no block .* on rank 1.*\[rank 1 on node"):
        rank_engine(folder, 2, cpu_kv_cache_space=[0.1, 1e-9], num_device_blocks_override=None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ray_address": "ray://10.0.0.1:10001"}, "Ray Client"),
        ({"cpu_kv_cache_space": [1.0, 1.0, 1.0]}, "one number or one per rank"),
        ({"ray_bundle": "GPU"}, "ray_bundle must be of the form"),
        ({"step_timeout_s": 0.0}, "step_timeout_s must be more than 0"),
        ({"device": "cuda"}, "no node of the Ray cluster has a GPU"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_refusals(folder: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        LLMEngine.from_engine_args(
            EngineArgs(str(folder), **{"tensor_parallel_size": 2, "device": "cpu", **args})
        )
