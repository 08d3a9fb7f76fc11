"""A start that fails says why, quickly, with the rank's own words, and leaves nothing behind."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.models import ModelShop
from support.processors import Stopwatch
from support.zoo import PLAIN

from executor import ray_engines
from executor.ray_engines import (
    free_cpus,
    is_alive,
    ray_engine,
    sabotaged_rank,
)
from tpengine.config import RayConfig
from tpengine.errors import (
    CacheSizeError,
    ConfigError,
    PlacementError,
    WorkerDiedError,
    WorkerError,
)
from tpengine.executor import group
from tpengine.executor.channel import Listener
from tpengine.executor.launch import placement
from tpengine.executor.launch.placement import Placer

Wait = Callable[[Callable[[], bool], float], None]
PATIENCE_S = 30.0
"""For an event that only has to come, when other programs use the cores."""


@pytest.fixture(autouse=True)
def _by_value() -> Iterator[None]:
    """Actors cannot import the tests, so what the tests define is sent to them."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(ray_engines)
    yield
    cloudpickle.unregister_pickle_by_value(ray_engines)


@pytest.fixture
def folder(ray_address: str, models: ModelShop) -> Path:
    return models.folder(PLAIN)


@pytest.fixture(autouse=True)
def _all_is_given_back(ray_address: str, wait_until: Wait) -> Iterator[None]:
    yield
    wait_until(lambda: free_cpus() == ray.cluster_resources()["CPU"], PATIENCE_S)


def test_impossible_placement(folder: Path) -> None:
    watch = Stopwatch()
    words = r"Ray at \S+:\d+: wanted 8 x \{CPU: 2\} \(PACK\).*room for 4 even"
    with pytest.raises(PlacementError, match=words):
        ray_engine(folder, 8, ray_bundle="CPU=2")
    with pytest.raises(PlacementError, match=r"wanted 2 x \{npu: 1\}.*have .*\{CPU: 8\}"):
        ray_engine(folder, 2, ray_bundle="npu=1")
    assert watch.own_s < 5.0


def test_possible_but_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(placement, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(placement.logger, "warning", lambda text, *a: warnings.append(text % a))
    others = ray.util.placement_group([{"CPU": 7}])
    assert others.wait(10.0)
    try:
        watch = Stopwatch()
        with pytest.raises(PlacementError, match=r"within 2 s: wanted 2 x \{CPU: 1\}.*CPU: 1.*of"):
            ray_engine(folder, 2, placement_timeout_s=2.0)
        assert watch.elapsed_s >= 1.9
        assert watch.own_s < 5.0
    finally:
        ray.util.remove_placement_group(others)
    assert len(warnings) == 1
    assert re.search(r"waiting up to 2 s .* at \S+:\d+: wanted 2 x {CPU: 1}", warnings[0])


def test_nodes_that_are_excluded(ray_address: str) -> None:
    """Nodes that do not answer get no rank, although Ray may hold them for alive."""
    node_id = ray.get_runtime_context().get_node_id()
    other = "f" * len(node_id)
    placer = Placer({"CPU": 1.0}, 2, RayConfig(), lambda _: set(), lambda: None)
    placement = placer.place({other, other[:-1] + "e"})
    try:
        assert placement.node_ids == [node_id] * 2
        assert not placement.is_borrowed
    finally:
        placement.remove()
    with pytest.raises(PlacementError, match="without 1 that do not answer: wanted 2"):
        placer.place({node_id})


def test_exception_in_one_ranks_load(folder: Path, wait_until: Wait) -> None:
    watch = Stopwatch()
    with (
        sabotaged_rank(1, ray_engines.fail_load) as places,
        pytest.raises(WorkerError) as caught,
    ):
        ray_engine(folder, 2)
    assert watch.own_s < 15.0
    text = str(caught.value)
    for part in (
        "ZeroDivisionError: cannot read block 17",
        f"rank 1 on {places[1]}",
        "in load_model",
        "Traceback (most recent call last)",
        "the disk makes a noise",
    ):
        assert part in text
    assert len(places) == 2
    wait_until(lambda: not any(is_alive(places)), PATIENCE_S)


def test_death_in_one_ranks_load(folder: Path, wait_until: Wait) -> None:
    with (
        sabotaged_rank(1, ray_engines.die_in_load) as places,
        pytest.raises(WorkerDiedError) as caught,
    ):
        ray_engine(folder, 2)
    text = str(caught.value)
    for part in (f"rank 1 on {places[1]}", "load_model", "these are my last words"):
        assert part in text
    wait_until(lambda: not any(is_alive(places)), PATIENCE_S)


def test_driver_that_ranks_cannot_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They report it at once, with the address."""
    unused = socket.create_server(("127.0.0.1", 0))
    address = unused.getsockname()[:2]
    unused.close()

    class Elsewhere(Listener):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.address = address

    monkeypatch.setattr(group, "Listener", Elsewhere)
    watch = Stopwatch()
    with pytest.raises(WorkerError, match=rf"cannot reach the driver at 127.0.0.1:{address[1]}"):
        ray_engine(folder, 2)
    assert watch.own_s < 15.0


def test_a_ranks_typed_error_keeps_its_type(folder: Path) -> None:
    """One rank has less memory than a block takes; the others have enough."""
    with pytest.raises(CacheSizeError, match=r"no block .* on rank 1.*\[rank 1 on node"):
        ray_engine(folder, 2, cpu_kv_cache_space=[0.1, 1e-9], num_device_blocks_override=None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ray_address": "ray://10.0.0.1:10001"}, "Ray Client"),
        ({"executor": "local"}, "executor = 'local' runs one rank"),
        ({"cpu_kv_cache_space": [1.0, 1.0, 1.0]}, "one number or one per rank"),
        ({"ray_bundle": "GPU"}, "ray_bundle must be of the form"),
        ({"step_timeout_s": 0.0}, "step_timeout_s must be more than 0"),
        ({"device": "cuda"}, "no node of the Ray cluster has a GPU"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_refusals(folder: Path, args: dict[str, Any], message: str) -> None:
    from tpengine import EngineArgs, LLMEngine

    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_engine_args(
            EngineArgs(str(folder), **{"tensor_parallel_size": 2, "device": "cpu", **args})
        )
