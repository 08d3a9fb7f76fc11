"""The program of one rank that the driver's machine runs: `python -m` with this module's name.

Arguments: the driver's process, and the descriptors of three sockets that it inherits, for calls,
steps and heartbeats. The driver's end of the first is `processes.RankProcess`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from tpengine import envs, host
from tpengine.executor.diagnosis import DRIVER_GONE, RankPlace
from tpengine.executor.rank import Rank


class ProcessRank(Rank):
    """A rank that is called over a socket.

    Args:
        sockets: for steps and for heartbeats.
    """

    def __init__(self, *sockets: socket.socket) -> None:
        super().__init__()
        self.inherited = sockets

    def describe(self, devices: tuple[str, ...] = ()) -> RankPlace:
        """Where this process is.

        Args:
            devices: GPUs that it shall use; empty: as the driver.
        """
        if devices:
            envs.set_visible_gpus(devices)
        # The driver reads the log from a pipe, and finds it by the process.
        return self.locate("", host.LOOPBACK, devices, str(os.getpid()))

    def answer(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the driver's."""
        if method in ("describe", "import_all"):
            return getattr(self, method)(*args)
        return self.call(method, *args, **kwargs)


def main(rank_class: type[ProcessRank] = ProcessRank) -> None:
    """Serves the driver's calls until it ends."""
    driver, *files = map(int, sys.argv[1:])
    host.end_with_parent(driver, "tpengine-rank")
    calls = Connection(files[0])
    rank = rank_class(*(socket.socket(fileno=file) for file in files[1:]))
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, method, args, kwargs = calls.recv()
            calls.send((number, rank.answer(method, args, kwargs)))
    os._exit(DRIVER_GONE)


if __name__ == "__main__":
    main()
