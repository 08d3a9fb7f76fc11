"""Damaged bytes, for readers of what others send."""

from __future__ import annotations

import random
import sys


def mutated(data: bytes, rng: random.Random, most: int = sys.maxsize) -> bytes:
    """The data with one to four damages: bytes that are others, new, missing or there twice, a
    value that may be a length, a cut.

    Args:
        most: only so many bytes of the beginning are damaged.
    """
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = min(len(changed), most) + 1
        place, start, size = rng.randrange(end), rng.randrange(end), rng.choice((1, 1, 2, 4, 8))
        match rng.randrange(8):
            case 0 | 1:
                changed[place : place + size] = rng.randbytes(size)
            case 2:
                changed[place:place] = rng.randbytes(size)
            case 3:
                del changed[place : place + size]
            case 4:
                changed[place:place] = changed[start : start + 16]
            case 5 | 6:
                changed[place : place + size] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) * size
            case 7:
                del changed[place:]
    return bytes(changed)
