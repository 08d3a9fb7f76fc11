"""The program that holds the packed weights of a rank until some seconds after its engine.

It is run by its path and needs the standard library alone, so that it takes little memory besides
the weights. It holds nothing but the descriptor of their file, and no process waits for it: it goes
on in a fork, without a parent.

Arguments, which each process of its user can read in /proc: the key of the weights, the descriptor
of their file, the process that uses them, the seconds that they stay when it has ended, the bytes
of activations that it has measured, and the checksum of the file; empty: it was checked before.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time
import zlib

_LOOK_S = 1.0


def checksum(file: int) -> str:
    """The CRC-32 of all bytes of a file."""
    with mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
        return str(zlib.crc32(content))


def is_memory_short() -> bool:
    """Whether less than a quarter of the machine's memory is available."""
    with open("/proc/meminfo") as lines:
        kib = {line.split()[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable:"] < kib["MemTotal:"] // 4


def main() -> None:
    """Checks a file that no process can write any more, and holds it for others."""
    file, engine = int(sys.argv[2]), os.pidfd_open(int(sys.argv[3]))
    if sys.argv[6] and checksum(file) != sys.argv[6]:
        sys.exit("the checksum of the weights is another one than that of their engine")
    if os.fork():
        return
    os.closerange(0, 3)
    while not select.select([engine], [], [], _LOOK_S)[0]:
        pass
    end = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < end and not is_memory_short():
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
