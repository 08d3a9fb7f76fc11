"""Arithmetic of placement: no cluster."""

from __future__ import annotations

import random

import pytest

from tpengine.executor.launch import placement
from tpengine.executor.launch.placement import Node, RankPlace, explain_infeasible, smaller_bundle


def node(address: str, **resources: float) -> Node:
    return Node(f"id-{address}", address, {"memory": 1e9, f"node:{address}": 1.0, **resources})


def place(node_id: str, address: str, *devices: str) -> RankPlace:
    return RankPlace(node_id, address, "host", devices, 1, 1)


def test_bundles() -> None:
    assert placement.rank_bundle("cpu", None) == {"CPU": 1.0}
    assert placement.rank_bundle("cuda", None) == {"GPU": 1.0}
    assert placement.rank_bundle("cuda", {"GPU": 0.5, "npu": 2.0}) == {"GPU": 0.5, "npu": 2.0}
    with_gpu = {"num_cpus": 0, "num_gpus": 1.0, "resources": None}
    with_npu = {"num_cpus": 1.0, "num_gpus": 0, "resources": {"npu": 2.0}}
    assert placement.actor_options({"GPU": 1.0}) == with_gpu
    assert placement.actor_options({"npu": 2.0, "CPU": 1.0}) == with_npu


@pytest.mark.parametrize(
    ("strategy", "size", "feasible"),
    [
        ("PACK", 5, True),
        ("SPREAD", 5, True),
        ("PACK", 6, False),
        ("STRICT_PACK", 4, True),
        ("STRICT_PACK", 5, False),
        ("STRICT_SPREAD", 2, True),
        ("STRICT_SPREAD", 3, False),
    ],
)
def test_feasibility(strategy: str, size: int, feasible: bool) -> None:
    nodes = [node("10.0.0.1", GPU=4.0, CPU=8.0), node("10.0.0.2", GPU=1.0), node("10.0.0.3", CPU=4)]
    reason = explain_infeasible(nodes, {"GPU": 1.0}, size, strategy)
    assert (reason is None) == feasible
    if reason is not None:
        for part in (f"wanted {size} x {{GPU: 1}} ({strategy})", "10.0.0.1: {CPU: 8, GPU: 4}"):
            assert part in reason


def test_feasibility_of_odd_amounts() -> None:
    thirds = [node("10.0.0.1", GPU=1.0)]
    assert explain_infeasible(thirds, {"GPU": 0.3333}, 3, "PACK") is None
    assert explain_infeasible(thirds, {"GPU": 0.3334}, 3, "PACK") is not None
    assert explain_infeasible(thirds, {"GPU": 1.0, "npu": 1.0}, 1, "PACK") is not None
    assert "there is none" in str(explain_infeasible([], {"CPU": 1.0}, 1, "PACK"))


def test_less_for_each_rank() -> None:
    """What the error advises, if it helps."""
    two, five = Node("a", "10.0.0.1", {"CPU": 2.0}), Node("b", "10.0.0.2", {"CPU": 5.0})
    assert smaller_bundle([two], {"CPU": 1.0}, 4) == "CPU=0.5"
    assert smaller_bundle([two], {"CPU": 1.0}, 3) == "CPU=0.66"
    assert smaller_bundle([two, five], {"CPU": 2.0}, 4) == "CPU=1.66"
    assert smaller_bundle([two], {"CPU": 1.0, "npu": 1.0}, 4) is None
    assert smaller_bundle([], {"CPU": 1.0}, 4) is None


def test_bundles_of_a_group_that_is_there() -> None:
    bundles = {0: {"CPU": 4.0}, 1: {"GPU": 1.0, "CPU": 1.0}, 2: {"GPU": 2.0}, 3: {"GPU": 0.5}}
    assert placement.usable_bundles(bundles, {"GPU": 1.0}) == [1, 2]
    assert placement.usable_bundles(bundles, {"CPU": 1.0}) == [0, 1]
    assert placement.usable_bundles({}, {"CPU": 1.0}) == []


def test_rank_order() -> None:
    """The driver's node first; addresses as numbers; devices as numbers; whatever the input."""
    ordered = [
        place("driver", "10.0.0.30", "2"),
        place("driver", "10.0.0.30", "10"),
        place("b", "10.0.0.4", "0"),
        place("b", "10.0.0.4", "1"),
        place("a", "10.0.0.20", "0"),
        place("a", "10.0.0.20", "GPU-f00"),
        place("c", "fd00::1", "0"),
    ]
    rng = random.Random(1)
    for _ in range(50):
        shuffled = rng.sample(ordered, len(ordered))
        assert [shuffled[i] for i in placement.order_places(shuffled, "driver")] == ordered


def test_places_without_devices_keep_their_order() -> None:
    assert placement.order_places([place("n", "10.0.0.1") for _ in range(4)], "n") == [0, 1, 2, 3]


def test_description_hides_what_is_rays_own() -> None:
    own = {"memory": 5e9, "node:10.0.0.1": 1.0, "CPU_group_0_abc": 1.0, "bundle_group_abc": 1000.0}
    assert placement.describe({"CPU": 2.0, **own}) == "{CPU: 2}"
