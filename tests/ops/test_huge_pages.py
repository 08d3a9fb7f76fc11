"""Memory in large pages: not overlapping, aligned, and requested from the kernel."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from support.resident import resident_bytes

from tpengine.ops import huge_pages
from tpengine.ops.huge_pages import HugePageArena


def test_vectors_of_an_arena_are_aligned_and_apart() -> None:
    arena = HugePageArena()
    vectors = [arena.empty(count, torch.bfloat16) for count in (1, 33, 0, 4096, 7)]
    for number, vector in enumerate(vectors):
        assert vector.data_ptr() % 64 == 0 or not len(vector)
        vector.fill_(number)
    assert [vector.unique().tolist() for vector in vectors] == [[0.0], [1.0], [], [3.0], [4.0]]


def test_a_vector_larger_than_a_piece_gets_one_of_its_own() -> None:
    arena = HugePageArena()
    small, large = arena.empty(8, torch.int8), arena.empty(65 << 20, torch.int8)
    large[0] = large[-1] = 3
    small.fill_(1)
    assert large[-1] == 3
    assert len(large) == 65 << 20


def test_memory_outlives_its_arena() -> None:
    vector = HugePageArena().empty(1 << 20, torch.float32)
    vector.fill_(2.0)
    assert vector.sum().item() == 2.0 * (1 << 20)


def test_an_empty_tensor() -> None:
    assert huge_pages.empty((0, 4), torch.float32).shape == (0, 4)


def test_the_kernel_gives_large_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this kernel gives no large pages")
    tensor = huge_pages.empty((16 << 20,), torch.int8).fill_(1)
    num_bytes = bytes_in_memory(tensor, "AnonHugePages")
    if not num_bytes:
        pytest.skip("the memory is too fragmented for large pages now")
    assert num_bytes >= 8 << 20


def bytes_in_memory(tensor: torch.Tensor, kind: str) -> int:
    """Bytes of the tensor's mapping that the kernel counts as this kind. Neighbours in address
    space count too: the kernel joins their mappings."""
    text = Path("/proc/self/smaps").read_text()
    total = 0
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)[1:]:
        start, end = (int(part, 16) for part in area.split(" ", 1)[0].split("-"))
        if start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end:
            match = re.search(rf"{kind}:\s+(\d+) kB", area)
            total += (int(match[1]) << 10) if match else 0
    return total


def test_populated_memory_is_there_and_unchanged() -> None:
    long, short = huge_pages.empty((9 << 20,), torch.int8), huge_pages.empty((100,), torch.int8)
    long[5] = long[-1] = 7
    done = huge_pages.populate([long, short], 1 << 30, seconds=30.0)
    if not done:
        pytest.skip("this kernel populates no memory when asked")
    assert done == long.nbytes
    assert resident_bytes(long) >= long.nbytes
    assert long[5] == long[-1] == 7
    assert long.sum() == 14


def test_populating_ends_with_its_time() -> None:
    tensor = huge_pages.empty((4 << 30,), torch.int8)
    assert huge_pages.populate([tensor], 4 << 30, seconds=0.02) < tensor.nbytes
    assert huge_pages.populate([tensor], 4 << 30, seconds=0.0) == 0
    assert huge_pages.populate([], 4 << 30, seconds=1.0) == 0


def test_populating_ends_with_its_bytes() -> None:
    tensors = [huge_pages.empty((9 << 20,), torch.int8) for _ in range(2)]
    done = huge_pages.populate(tensors, 6 << 20, seconds=30.0)
    if not done:
        pytest.skip("this kernel populates no memory when asked")
    assert done == 3 << 20
    assert done <= min(resident_bytes(x) for x in tensors)
    assert sum(resident_bytes(x) for x in tensors) <= 12 << 20, "two large pages each, and a border"


def test_what_lies_in_a_file_is_mapped_at_once_and_nothing_else() -> None:
    if not huge_pages.populate([huge_pages.empty((100,), torch.int8)], 1 << 20, seconds=30.0):
        pytest.skip("this kernel populates no memory when asked")
    fd = os.memfd_create("memory")
    try:
        os.ftruncate(fd, 16 << 20)
        first = huge_pages.map_file(fd, 0, 16 << 20)
        first[1 << 20 : 3 << 20] = 7
        first[-1] = 5
        taken = os.fstat(fd).st_blocks
        second = huge_pages.map_file(fd, 0, 16 << 20)
        assert resident_bytes(second) >= (2 << 20) + mmap.PAGESIZE
        assert os.fstat(fd).st_blocks == taken, "memory for what was never written"
        assert torch.equal(first, second)
        behind = huge_pages.map_file(fd, 2 << 20, 4 << 20)
        assert resident_bytes(behind) >= 1 << 20
    finally:
        os.close(fd)
