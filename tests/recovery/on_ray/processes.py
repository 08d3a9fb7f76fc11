"""What runs below this process, as `/proc` tells it."""

from __future__ import annotations

import os

from support.namespaces import namespace, process_table

OURS = ("ray::RayWorker", "ray::SabotagedW", "ray::NodeAgent", "ray::GroupOwner", "tpengine-rank")
"""As Linux shows them, which is the first 15 letters."""


def actors(root: int | None = None) -> dict[int, str]:
    """Ranks, spares and agents below a process, this one unless told otherwise, and on its machine:
    Linux's letter for their state, by pid."""
    states = {}
    below = {root or os.getpid()}
    own = namespace(os.getpid(), "pid")
    table = process_table()
    while below:
        below = {pid for pid, (_, _, parent) in table.items() if parent in below}
        for pid in below:
            name, state, _ = table[pid]
            if name.startswith(OURS) and state != "Z" and namespace(pid, "pid") == own:
                states[pid] = state
    return states
