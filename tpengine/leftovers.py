"""Files in shared memory that processes left there when they were ended.

Rank 0 makes a file for its group's segment and removes its name once all ranks have mapped it.
Until then the name tells who made it: `tpengine-<engine>-<epoch>-<pid>-<start of the process>`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from pathlib import Path

from tpengine.logger import init_logger
from tpengine.process_stat import start_ticks

logger = init_logger(__name__)

SHM_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"tpengine-.*-(?P<pid>\d+)-(?P<start>\d+)")


def segment_name(engine_id: str, epoch: int) -> str:
    """What this process calls the segment of its group."""
    pid = os.getpid()
    engine = re.sub(r"\W", "_", engine_id)[:64]
    return f"tpengine-{engine}-{epoch}-{pid}-{start_ticks(pid)}"


def lock(fd: int, start: int, length: int) -> None:
    """Locks bytes of a file, 0: to its end, for as long as its descriptor is open.

    Ranks lock the byte of their number, the creator the one after.

    Raises:
        OSError: somebody else holds one of them.
    """
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)


def sweep(folder: Path = SHM_FOLDER) -> list[Path]:
    """Removes segment files whose creators died before they could; returns them."""
    removed = []
    for path in folder.glob("tpengine-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or start_ticks(int(match["pid"])) == int(match["start"]):
            continue
        # Its creator may live in another process namespace: then it holds a lock.
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                lock(fd, 0, 0)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    if removed:
        logger.info("removed what dead processes left: %s", ", ".join(map(str, removed)))
    return removed


def remove_own(folder: Path = SHM_FOLDER) -> None:
    """Removes what this process has made, for one that ends in the middle of its work."""
    pid = os.getpid()
    for path in folder.glob(f"tpengine-*-{pid}-{start_ticks(pid)}"):
        with contextlib.suppress(OSError):
            path.unlink()
