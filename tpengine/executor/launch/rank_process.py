"""The program of one rank that the driver's machine runs: `python -m` with this module's name.

Arguments: the driver's process, and the descriptors that it inherits: of two sockets, for steps and
for heartbeats. The driver's end is `processes.RankProcess`.
"""

from __future__ import annotations

import socket
import sys

from tpengine import host
from tpengine.executor.channel import Channel
from tpengine.executor.rank import Rank


def main(rank: Rank) -> None:
    """Serves the driver until it ends."""
    driver, *files = map(int, sys.argv[1:])
    host.end_with_parent(driver, "tpengine-rank")
    steps, control = (Channel(socket.socket(fileno=file)) for file in files)
    rank.serve(steps, control)


if __name__ == "__main__":
    main(Rank())
