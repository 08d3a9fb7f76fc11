"""The program of one rank that the driver's machine runs: `python -m` with this module's name.

Arguments: the driver's process, and the descriptors of two sockets that it inherits, for steps and
for heartbeats. The driver's end is `processes.RankProcess`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

from tpengine import envs, host
from tpengine.executor.channel import Channel
from tpengine.executor.rank import Rank


class ProcessRank(Rank):
    """A rank that is a child of the driver."""

    def join(self, rank: int, place: Sequence[Any]) -> None:
        """See `Rank`; takes the GPUs that its place names. None: the same as the driver."""
        super().join(rank, place)
        if self.place is not None and self.place.devices:
            envs.set_visible_gpus(self.place.devices)


def main(rank: ProcessRank) -> None:
    """Serves the driver until it ends."""
    driver, *files = map(int, sys.argv[1:])
    host.end_with_parent(driver, "tpengine-rank")
    steps, control = (Channel(socket.socket(fileno=file)) for file in files)
    rank.serve(steps, control)


if __name__ == "__main__":
    main(ProcessRank())
