"""Which nodes the ranks go to: arithmetic over resources first, Ray's placement groups after it.

The functions above `Placement` are pure: they know dictionaries, no cluster.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpengine.config import RayConfig
from tpengine.errors import PlacementError, counted
from tpengine.logger import init_logger

logger = init_logger(__name__)

Resources = Mapping[str, float]
_NODE_LABEL = "ray.io/node-id"
_PATIENCE_S = 3.0
"""How long a placement may take before the user is told what it waits for."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster and all that it has, taken or not."""

    node_id: str
    address: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where an actor came to stand.

    Attributes:
        address: of its node, as Ray knows it.
        devices: ids of the accelerators that Ray gave it.
        start_ticks: start time of the process in clock ticks, which tells it from a later one
            with the same number.
        log_path: the process's error log on its node, empty if unknown.
    """

    node_id: str
    address: str
    host_name: str
    devices: tuple[str, ...]
    pid: int
    start_ticks: int
    log_path: str = ""

    @property
    def process(self) -> tuple[int, int]:
        """What tells it from all other processes of its node."""
        return self.pid, self.start_ticks

    def __str__(self) -> str:
        devices = f", device {','.join(self.devices)}" if self.devices else ""
        return f"node {self.address} ({self.host_name}), pid {self.pid}{devices}"


def rank_bundle(device: str, wanted: Resources | None) -> dict[str, float]:
    """Resources of one rank: what the user says, else one GPU or one CPU."""
    if wanted is not None:
        return dict(wanted)
    return {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}


def actor_options(bundle: Resources) -> dict[str, Any]:
    """What an actor that fills such a bundle asks Ray for."""
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": custom or None,
    }


def usable_bundles(bundles: Mapping[int, Resources], wanted: Resources) -> list[int]:
    """Indices of those bundles of a group that hold what a rank needs, in ascending order."""
    return sorted(index for index, bundle in bundles.items() if _times(bundle, wanted) >= 1)


def explain_infeasible(
    nodes: Sequence[Node], bundle: Resources, size: int, strategy: str
) -> str | None:
    """Why the cluster could not hold the ranks even if it were idle; None if it could."""
    rooms = [_times(node.resources, bundle) for node in nodes]
    if strategy == "STRICT_PACK":
        if max(rooms, default=0) >= size:
            return None
        reason = f"no single node has room for {size}"
    elif strategy == "STRICT_SPREAD":
        if sum(room > 0 for room in rooms) >= size:
            return None
        reason = f"there is room for one on only {counted(sum(map(bool, rooms)), 'node')}"
    elif sum(rooms) >= size:
        return None
    else:
        reason = f"there is room for {sum(rooms)}"
    has = "; ".join(f"{node.address}: {describe(node.resources)}" for node in nodes)
    return (
        f"wanted {size} x {describe(bundle)} ({strategy}), but {reason} even when the cluster is "
        f"idle; its nodes have {has or 'nothing: there is none'}"
    )


def _times(resources: Resources, bundle: Resources) -> int:
    """How many bundles fit; amounts are compared as Ray does, to 1/10000."""
    rooms = (
        math.floor(resources.get(name, 0.0) / amount + 1e-4)
        for name, amount in bundle.items()
        if amount > 0.0
    )
    return min(rooms, default=0)


def order_places(places: Sequence[RankPlace], driver_node_id: str) -> list[int]:
    """Indices of `places` in rank order: the driver's node first, then by address, so that
    neighbours share a node, then by device."""

    def key(index: int) -> tuple[Any, ...]:
        place = places[index]
        devices = [(0, int(d), "") if d.isdecimal() else (1, 0, d) for d in place.devices]
        address = ipaddress.ip_address(place.address)
        return (
            place.node_id != driver_node_id,
            address.version,
            int(address),
            place.node_id,
            devices,
            index,
        )

    return sorted(range(len(places)), key=key)


def describe(resources: Resources) -> str:
    """For people: `{CPU: 2, GPU: 1}`, without memory and Ray's own markers."""
    hidden = ("memory", "object_store_memory", "node:", "bundle_group", "accelerator_type:")
    shown = [
        f"{name}: {amount:g}"
        for name, amount in sorted(resources.items())
        if not name.startswith(hidden) and "_group_" not in name
    ]
    return "{" + ", ".join(shown) + "}"


def cluster_nodes() -> list[Node]:
    """The machines that are alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def address_of(node_id: str) -> str:
    """The address of a machine that is alive.

    Raises:
        PlacementError: Ray knows no such machine.
    """
    nodes = cluster_nodes()
    for node in nodes:
        if node.node_id == node_id:
            return node.address
    alive = ", ".join(node.address for node in nodes) or "none"
    raise PlacementError(
        f"Ray holds the driver's own node {node_id} for dead (alive: {alive}); its raylet has gone "
        "or could not be heard for long: start Ray there again, and a new engine"
    )


class Placement:
    """A bundle per rank, in a group of its own or in the one that the driver runs in.

    Args:
        excluded: ids of nodes that get none, as they do not answer.
        check: called again and again while room is waited for; what it raises ends the wait.

    Raises:
        PlacementError: the ranks cannot be placed, or could not in time.
    """

    def __init__(
        self,
        bundle: Resources,
        size: int,
        config: RayConfig,
        excluded: Iterable[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._own: PlacementGroup | None = None
        strategy, excluded = config.placement_strategy, sorted(excluded)
        current = get_current_placement_group()
        if current is not None:
            self._group = current
            self._indices = _indices_in(current, bundle, size)
            self._node_ids = self._find_nodes()
            return
        nodes = [node for node in cluster_nodes() if node.node_id not in excluded]
        reason = explain_infeasible(nodes, bundle, size, strategy)
        if reason is not None:
            without = f" without {len(excluded)} that do not answer" if excluded else ""
            raise PlacementError(
                f"the ranks cannot be placed on the Ray at {_address()}{without}: {reason}"
            )
        selector = {_NODE_LABEL: f"!in({', '.join(excluded)})"} if excluded else {}
        self._group = self._own = placement_group(
            [dict(bundle)] * size,
            strategy=strategy,
            bundle_label_selector=[selector] * size if selector else None,
        )
        self._indices = list(range(size))
        try:
            self._wait(bundle, size, config, check)
            self._node_ids = self._find_nodes()
        except BaseException:
            self.remove()
            raise

    @property
    def is_borrowed(self) -> bool:
        """Whether the group was there before."""
        return self._own is None

    @property
    def node_ids(self) -> list[str]:
        """The node of each bundle, by index of the actor."""
        return list(self._node_ids)

    def _find_nodes(self) -> list[str]:
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [str(found[index]) for index in self._indices]

    def _wait(
        self, bundle: Resources, size: int, config: RayConfig, check: Callable[[], None]
    ) -> None:
        timeout_s = config.placement_timeout_s
        start = time.monotonic()
        wanted = f"{size} x {describe(bundle)} ({config.placement_strategy})"
        if self._wait_until(start + min(_PATIENCE_S, timeout_s), check):
            return
        logger.warning(
            "waiting up to %.0f s for room on the Ray cluster at %s: wanted %s, available now %s "
            "of %s",
            timeout_s,
            _address(),
            wanted,
            _available(bundle),
            _total(bundle),
        )
        if self._wait_until(start + timeout_s, check):
            return
        raise PlacementError(
            f"no room on the Ray cluster at {_address()} within {timeout_s:.0f} s: wanted "
            f"{wanted}, available {_available(bundle)} of {_total(bundle)}; wait for others to "
            "finish, raise placement_timeout_s, or have a Ray of its own started: "
            'ray_address="local"'
        )

    def _wait_until(self, deadline: float, check: Callable[[], None]) -> bool:
        """Whether the group has its room before the deadline."""
        while True:
            check()
            # Ray counts in whole seconds, and would take a part of one as nothing.
            if self._group.wait(1):
                return True
            if time.monotonic() >= deadline:
                return False

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """What ties the actor of a bundle to it."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._indices[rank]
        )

    def remove(self) -> None:
        """Gives the bundles back; a group that was there before stays."""
        group, self._own = self._own, None
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster may have gone
                remove_placement_group(group)


def _indices_in(group: PlacementGroup, bundle: Resources, size: int) -> list[int]:
    bundles: Mapping[int, Resources] = placement_group_table(group)["bundles"]
    indices = usable_bundles({int(i): b for i, b in bundles.items()}, bundle)
    if len(indices) < size:
        listed = ", ".join(describe(b) for b in bundles.values())
        raise PlacementError(
            f"the ranks cannot be placed: wanted {size} x {describe(bundle)}, but the placement "
            f"group that the driver runs in has {len(indices)} such bundles ({listed})"
        )
    return indices[:size]


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _available(bundle: Resources) -> str:
    return _of(ray.available_resources(), bundle)


def _total(bundle: Resources) -> str:
    return _of(ray.cluster_resources(), bundle)


def _of(resources: Resources, names: Iterable[str]) -> str:
    return describe({name: resources.get(name, 0.0) for name in names})  # absent when 0
