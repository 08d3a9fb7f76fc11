"""What memory is really there, of a tensor and of this process."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch


def status_bytes(*names: str) -> int:
    """The sum of these fields of /proc/self/status."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in names) * 1024


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's own pages that have memory behind them."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
    pagemap = Path("/proc/self/pagemap")
    if not pagemap.exists():
        pytest.skip("this kernel does not tell which pages have memory")
    with pagemap.open("rb") as pages:
        pages.seek(first * 8)
        entries = np.frombuffer(pages.read((last - first + 1) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE
