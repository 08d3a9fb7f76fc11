"""Placement groups that end with the driver, however it ends.

Ray removes a group with the job that made it. The job of a driver that is itself an actor or a task
goes on after it: then a `GroupOwner` makes the group, a detached actor. Ray removes the group with
this actor, and the actor ends with the driver's process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpengine import host
from tpengine.errors import PlacementError, counted
from tpengine.executor.launch.node_agent import Process
from tpengine.executor.launch.ray_calls import bounded, check_answers

_NAME = re.compile(r"tpengine-(?P<address>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
"""Of a group, and of its owner: it tells people which process is the driver."""
_END = "the end of a placement group"
_CHECK_S = 0.5
"""Between two looks at whether the wait for an owner still makes sense."""


class GroupOwner:
    """The actor that makes a group for a driver of the same machine, and ends with it.

    Raises:
        ProcessLookupError: the driver has ended.
    """

    def __init__(self, driver: Process) -> None:
        pidfd = os.pidfd_open(driver[0])
        if host.start_ticks(driver[0]) != driver[1]:
            raise ProcessLookupError(f"the driver, process {driver[0]}, has ended")
        watch = partial(_end_with, pidfd)
        threading.Thread(target=watch, name="tpengine-owner", daemon=True).start()

    def make(self, options: dict[str, Any]) -> PlacementGroup:
        return placement_group(**options)


def _end_with(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()  # the kernel ends the wait with the process
    ray.kill(ray.get_runtime_context().current_actor)  # of an exit Ray would tell as of a crash


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """A placement group that the driver has made.

    Attributes:
        owner: the actor with which the group ends; None: it ends with the driver's job.
    """

    group: PlacementGroup
    owner: Any | None = None

    def remove(self) -> None:
        """Gives the bundles back. A second call does nothing."""
        with contextlib.suppress(Exception):  # the cluster may have gone
            bounded(partial(remove_placement_group, self.group), _END)
            if self.owner is not None:
                bounded(partial(ray.kill, self.owner), _END)


def make_group(check: Callable[[], None], timeout_s: float, **options: Any) -> OwnGroup:
    """Makes a group, without waiting for its room.

    Args:
        check: called repeatedly while the group's owner starts; an exception of it ends the wait.
        timeout_s: for the owner to start: Ray may have to start a process for it.
        options: of Ray's `placement_group`.

    Raises:
        PlacementError: Ray does not start the group's owner.
    """
    code, what = secrets.token_hex(4), "a placement group"
    name = f"tpengine-{ray.util.get_node_ip_address()}-{os.getpid()}-{code}"
    options["name"] = name
    if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        make = partial(placement_group, **options)
        return OwnGroup(bounded(make, what, remove_placement_group))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    place = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    # Of an actor in an anonymous namespace Ray warns.
    place |= {"lifetime": "detached", "name": name, "namespace": "tpengine"}
    driver = os.getpid(), host.start_ticks(os.getpid())
    start = partial(ray.remote(GroupOwner).options(**place).remote, driver)
    owner = bounded(start, what, ray.kill)
    try:
        return OwnGroup(_answer_of(owner.make.remote(options), check, timeout_s), owner)
    except BaseException as error:
        with contextlib.suppress(Exception):  # its death is the error, or the cluster has gone
            bounded(partial(ray.kill, owner), _END)
        if not isinstance(error, RayError):
            raise
        text = f"Ray does not start the owner of a placement group within {timeout_s:g} s: {error}"
        raise PlacementError(text) from error


def _answer_of(call: Any, check: Callable[[], None], timeout_s: float) -> Any:
    """The answer of an actor; raises RayError if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not ray.wait([call], timeout=_CHECK_S)[0] and time.monotonic() < deadline:
        check()
        check_answers()
    return ray.get(call, timeout=_CHECK_S)


def describe_groups() -> str:
    """Which groups of tpengine's engines hold room, as the end of a sentence; empty: none does."""
    held = []
    table = bounded(placement_group_table, "its placement groups")
    for entry in table.values():
        match = _NAME.fullmatch(entry["name"])
        if match is None or entry["state"] != "CREATED":
            continue
        is_here = match["address"] == ray.util.get_node_ip_address()
        has_ended = is_here and host.start_ticks(int(match["pid"])) is None
        driver = f"process {match['pid']} on {match['address']}"
        driver += ", which has ended" if has_ended else ""
        held.append(f"{entry['name']} ({counted(len(entry['bundles']), 'bundle')}, of {driver})")
    return f"; engines hold the placement groups {', '.join(held)}" if held else ""
