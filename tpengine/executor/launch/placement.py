"""Which nodes the ranks run on: first, and when nodes have stopped to answer.

`Placement` is one bundle of resources per rank, in a placement group of Ray's (see
`placement_groups`). `Placer` finds one on nodes that answer. The functions above them only compute,
without a cluster.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpengine import host
from tpengine.errors import PlacementError, counted
from tpengine.executor.diagnosis import RankPlace
from tpengine.executor.launch.placement_groups import OwnGroup, describe_groups, make_group
from tpengine.executor.launch.ray_calls import bounded
from tpengine.logger import init_logger

logger = init_logger(__name__)

Resources = Mapping[str, float]
_NODE_LABEL = "ray.io/node-id"
_PATIENCE_S = 3.0
"""How long a placement may take before the user is told what it waits for."""
_PAUSE_S = 0.5
"""Between two questions to nodes that do not answer."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster and all its resources, in use or not."""

    node_id: str
    address: str
    resources: Resources


def rank_bundle(device: str, wanted: Resources | None) -> dict[str, float]:
    """Resources of one rank: what the user asks for, else one GPU or one CPU."""
    if wanted is not None:
        return dict(wanted)
    return {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}


def actor_options(bundle: Resources) -> dict[str, Any]:
    """The options of Ray for an actor that takes a whole bundle."""
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": custom or None,
    }


def usable_bundles(bundles: Mapping[int, Resources], wanted: Resources) -> list[int]:
    """Indices of the bundles of a group that are enough for a rank, in ascending order."""
    return sorted(index for index, bundle in bundles.items() if _times(bundle, wanted) >= 1)


def explain_infeasible(
    nodes: Sequence[Node], bundle: Resources, size: int, strategy: str
) -> str | None:
    """Why the ranks do not fit on the nodes even if these are idle; None if they fit."""
    rooms = [_times(node.resources, bundle) for node in nodes]
    num_nodes = sum(map(bool, rooms))
    strict = {
        "STRICT_PACK": (max(rooms, default=0), f"no single node has room for {size}"),
        "STRICT_SPREAD": (num_nodes, f"there is room for one on only {counted(num_nodes, 'node')}"),
    }
    room, reason = strict.get(strategy, (sum(rooms), f"there is room for {sum(rooms)}"))
    if room >= size:
        return None
    has = "; ".join(f"{node.address}: {describe(node.resources)}" for node in nodes)
    return (
        f"wanted {size} x {describe(bundle)} ({strategy}), but {reason} even when the cluster is "
        f"idle; its nodes have {has or 'nothing: there is none'}"
    )


def smaller_bundle(nodes: Sequence[Node], bundle: Resources, size: int) -> str | None:
    """The most CPUs for each rank with which all fit on the nodes; None: ranks want other things,
    too, or there is nearly nothing."""
    if bundle.keys() != {"CPU"}:
        return None
    rooms = [node.resources.get("CPU", 0.0) for node in nodes]
    for amount in sorted({room / count for room in rooms for count in range(1, size + 1)})[::-1]:
        rounded = math.floor(amount * 100.0) / 100.0
        if rounded > 0.0 and sum(_times({"CPU": room}, {"CPU": rounded}) for room in rooms) >= size:
            return f"CPU={rounded:g}"
    return None


def _times(resources: Resources, bundle: Resources) -> int:
    """How many bundles fit; amounts are compared as Ray does, to 1/10000."""
    rooms = (
        math.floor(resources.get(name, 0.0) / amount + 1e-4)
        for name, amount in bundle.items()
        if amount > 0.0
    )
    return min(rooms, default=0)


def order_places(places: Sequence[RankPlace], driver_node_id: str) -> list[int]:
    """Indices of `places` in rank order: the driver's node first; then by address, so that
    neighbours share a node; then by device."""

    def key(index: int) -> tuple[Any, ...]:
        place = places[index]
        devices = [(0, int(d), "") if d.isdecimal() else (1, 0, d) for d in place.devices]
        address = ipaddress.ip_address(place.address)
        is_other = place.node_id != driver_node_id
        return is_other, address.version, int(address), place.node_id, devices

    return sorted(range(len(places)), key=key)


def describe(resources: Resources) -> str:
    """A text such as `{CPU: 2, GPU: 1}`, without memory and Ray's own markers."""
    hidden = ("memory", "object_store_memory", "node:", "bundle_group", "accelerator_type:")
    shown = [
        f"{name}: {amount:g}"
        for name, amount in sorted(resources.items())
        if not name.startswith(hidden) and "_group_" not in name
    ]
    return "{" + ", ".join(shown) + "}"


def cluster_nodes() -> list[Node]:
    """The machines that Ray holds for alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in bounded(ray.nodes, "its nodes")
        if node["Alive"]
    ]


def address_of(node_id: str) -> str:
    """The address of the driver's machine.

    Raises:
        PlacementError: Ray does not hold it for alive.
    """
    nodes = cluster_nodes()
    for node in nodes:
        if node.node_id == node_id:
            return node.address
    alive = ", ".join(node.address for node in nodes) or "none"
    raise PlacementError(
        f"Ray holds the driver's own node {node_id} for dead (alive: {alive}), as its raylet has "
        "ended or did not answer; start Ray there again, and make a new engine"
    )


def channel_address(node_ids: Iterable[str], driver_node_id: str) -> str:
    """Where the driver listens for ranks: only within its machine if all of them run there."""
    if set(node_ids) == {driver_node_id}:
        return host.LOOPBACK
    return address_of(driver_node_id)


@dataclass(slots=True)
class Placement:
    """A bundle per rank, in a new placement group or in the one that the driver runs in.

    Attributes:
        node_ids: the node of each bundle.
        devices: of each bundle, for a spare that takes it; None: only Ray knows them yet.
    """

    node_ids: list[str]
    _group: PlacementGroup
    _indices: list[int]
    _own: OwnGroup | None
    devices: list[tuple[str, ...]] | None = None

    @classmethod
    def of(cls, group: PlacementGroup, indices: list[int], own: OwnGroup | None) -> Placement:
        """The placement of ranks in the bundles of these indices.

        Args:
            own: the group, if the driver has made it; None: the driver runs in it.
        """
        nodes = _table_of(group)["bundles_to_node_id"]
        return cls([str(nodes[index]) for index in indices], group, indices, own)

    @property
    def is_borrowed(self) -> bool:
        """Whether the group is the one that the driver runs in."""
        return self._own is None

    def is_removed(self) -> bool:
        """Whether Ray has removed the group, as it does when the group's owner is lost."""
        return bool(_table_of(self._group).get("state", "REMOVED") == "REMOVED")

    def strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        """The strategy that starts an actor in the bundle of this index."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._indices[index]
        )

    def remove(self) -> None:
        """Gives the bundles back, unless the group is the one that the driver runs in. A second
        call does nothing."""
        if self._own is not None:
            self._own.remove()


def _table_of(group: PlacementGroup) -> dict[str, Any]:
    table: dict[str, Any] = bounded(lambda: placement_group_table(group), "a placement group")
    return table


def _indices_in(
    group: PlacementGroup, bundle: Resources, size: int, excluded: set[str]
) -> list[int]:
    table = _table_of(group)
    bundles: Mapping[int, Resources] = table["bundles"]
    indices = usable_bundles({int(i): b for i, b in bundles.items()}, bundle)
    nodes = table["bundles_to_node_id"]
    indices = [index for index in indices if str(nodes[index]) not in excluded]
    if len(indices) < size:
        listed = ", ".join(describe(b) for b in bundles.values())
        raise PlacementError(
            f"the ranks cannot be placed: wanted {size} x {describe(bundle)}, but the placement "
            f"group that the driver runs in has {len(indices)} such bundles ({listed})"
        )
    return indices


def _left_in(group: PlacementGroup) -> dict[int, dict[str, float]]:
    """What nothing uses now of each bundle of a group, by the bundle's index."""
    left: dict[int, dict[str, float]] = {}
    marked = re.compile(rf"(.+)_group_(\d+)_{group.id.hex()}")
    for name, amount in bounded(ray.available_resources, "its free resources").items():
        if match := marked.fullmatch(name):
            left.setdefault(int(match[2]), {})[match[1]] = amount
    return left


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _amounts(resources: Resources, names: Iterable[str]) -> str:
    return describe({name: resources.get(name, 0.0) for name in names})  # Ray leaves out zeros


@dataclass(slots=True)
class Placer:
    """Finds bundles for the ranks of one engine on nodes that answer.

    Args:
        bundle: resources of one rank.
        strategy, timeout_s: see `RayConfig`.
        find_silent: returns those of some nodes that do not answer.
        check: called repeatedly during everything that may take long; an exception of it ends the
            wait.
    """

    bundle: Resources
    size: int
    strategy: str
    timeout_s: float
    find_silent: Callable[[Iterable[str]], set[str]]
    check: Callable[[], None]

    def place(self, silent: set[str]) -> Placement:
        """Makes a placement on nodes that answer.

        Args:
            silent: nodes that do not answer; those that are found here are added.

        Raises:
            PlacementError: the ranks cannot be placed, or not in time.
        """
        while True:
            placement = self._place_without(silent)
            if not silent:  # at the first start Ray's view of the cluster is taken
                return placement
            try:
                more = self.find_silent(placement.node_ids)
            except BaseException:
                placement.remove()
                raise
            if not more:
                return placement
            placement.remove()
            silent |= more

    def _place_without(self, excluded: set[str]) -> Placement:
        """Makes a placement with no bundle on the nodes of these ids."""
        current = get_current_placement_group()
        if current is not None:
            return Placement.of(current, self._free_bundles(current, excluded), None)
        nodes = [node for node in cluster_nodes() if node.node_id not in excluded]
        reason = explain_infeasible(nodes, self.bundle, self.size, self.strategy)
        if reason is not None:
            without = f" without {len(excluded)} that do not answer" if excluded else ""
            is_strict = self.strategy.startswith("STRICT")
            smaller = None if is_strict else smaller_bundle(nodes, self.bundle, self.size)
            advice = f"give each rank less (--ray-bundle {smaller}), " if smaller else ""
            raise PlacementError(
                f"the ranks cannot be placed on the Ray at {_address()}{without}: {reason}; "
                f"{advice}lower tensor_parallel_size or pipeline_parallel_size, or add machines"
            )
        selector = {_NODE_LABEL: f"!in({', '.join(sorted(excluded))})"}
        selectors = [selector] * self.size if excluded else None
        options = {
            "strategy": self.strategy,
            "bundle_label_selector": selectors,
            "bundles": [dict(self.bundle)] * self.size,
        }
        own = make_group(self.check, self.timeout_s, **options)
        try:
            self._wait(own.group)
            return Placement.of(own.group, list(range(self.size)), own)
        except BaseException:
            own.remove()
            raise

    def _free_bundles(self, group: PlacementGroup, excluded: set[str]) -> list[int]:
        """Waits for enough bundles of the driver's own group that nothing uses, on other nodes than
        these; returns their indices, the lowest first."""
        indices = _indices_in(group, self.bundle, self.size, excluded)
        start, has_warned = time.monotonic(), False
        while True:
            self.check()
            left = _left_in(group)
            free = [index for index in indices if _times(left.get(index, {}), self.bundle) >= 1]
            if len(free) >= self.size:
                return free[: self.size]
            waited_s = time.monotonic() - start
            if waited_s >= self.timeout_s:
                raise PlacementError(
                    f"the ranks cannot be placed within {waited_s:.0f} s: "
                    f"{self._describe_taken(indices, left)}; make the group with a bundle for each "
                    "rank and one for the driver, or wait for the others"
                )
            if waited_s >= _PATIENCE_S and not has_warned:
                has_warned = True
                logger.warning("waiting: %s", self._describe_taken(indices, left))
            time.sleep(_PAUSE_S)

    def _describe_taken(self, indices: list[int], left: Mapping[int, Resources]) -> str:
        """Says what holds bundles of the driver's own group.

        Args:
            left: of each bundle.
        """
        context = ray.get_runtime_context()
        own = context.get_assigned_resources() if context.get_actor_id() is not None else {}
        amounts = ", ".join(
            f"bundle {index} has {_amounts(left.get(index, {}), self.bundle)} left"
            for index in indices
        )
        return (
            f"wanted {self.size} x {describe(self.bundle)} in the placement group that the driver "
            f"runs in, where {amounts}; the driver's own actor holds {describe(own)}, other actors "
            "and tasks hold the rest"
        )

    def _wait(self, group: PlacementGroup) -> None:
        """Waits until the group has its room."""
        timeout_s, start = self.timeout_s, time.monotonic()
        if self._has_room(group, start + min(_PATIENCE_S, timeout_s)):
            return
        where = f"room on the Ray cluster at {_address()}"
        logger.warning("waiting up to %.0f s for %s: %s", timeout_s, where, self._describe_room())
        if not self._has_room(group, start + timeout_s):
            raise PlacementError(
                f"no {where} within {timeout_s:.0f} s: {self._describe_room()}; wait for other "
                "programs to finish, raise placement_timeout_s, or start a Ray for this engine: "
                'ray_address="local"'
            )

    def _has_room(self, group: PlacementGroup, deadline: float) -> bool:
        """Whether the group gets its room before the deadline."""
        while True:
            self.check()
            # Ray counts whole seconds: it takes 0.5 as 0.
            if bounded(lambda: group.wait(1), "room"):
                return True
            if time.monotonic() >= deadline:
                return False

    def _describe_room(self) -> str:
        what = "its resources"
        return (
            f"wanted {self.size} x {describe(self.bundle)} ({self.strategy}), "
            f"available now {_amounts(bounded(ray.available_resources, what), self.bundle)} of "
            f"{_amounts(bounded(ray.cluster_resources, what), self.bundle)}{describe_groups()}"
        )

    def replace(self, old: Placement | None, silent: set[str]) -> Placement:
        """Returns the old placement if its nodes answer, else another one. Without room for
        another one it waits for nodes to answer again, as they may only have paused.

        Args:
            silent: nodes that do not answer; changed to those that do not in the end.

        Raises:
            PlacementError: there was no room without the silent nodes until the timeout.
        """
        deadline = time.monotonic() + self.timeout_s
        if old is not None and old.is_removed():
            old = None
        is_first = True
        while old is None or silent & set(old.node_ids):
            try:
                if old is not None and old.is_borrowed:
                    raise PlacementError(
                        f"no answer from {counted(len(silent), 'node')} of the placement group "
                        f"that the driver runs in ({', '.join(sorted(silent))}), which tpengine "
                        "cannot enlarge; make a new group and run the driver in it"
                    )
                if old is not None:
                    old.remove()
                    old = None
                return self.place(silent)
            except PlacementError as error:
                if not silent or time.monotonic() >= deadline:
                    raise
                if is_first:
                    logger.warning("%s; they are asked again until the timeout", error)
                is_first = False
            self.check()
            time.sleep(_PAUSE_S)  # an agent that is known to be dead answers at once
            silent &= self.find_silent(silent)
        return old
