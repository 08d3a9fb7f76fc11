"""The memory of a segment is fully allocated, and found by its token."""

from __future__ import annotations

import os

import pytest

from tpengine.distributed.shared_memory import find_segment, make_segment
from tpengine.errors import SharedMemoryError
from tpengine.ops.shared_memory_ops import segment_bytes


def test_all_of_it_is_allocated() -> None:
    _, fd, _ = make_segment(4, 8192)
    stat = os.fstat(fd)
    assert stat.st_size == segment_bytes(4, 8192)
    assert stat.st_blocks * 512 >= stat.st_size
    os.close(fd)


@pytest.mark.parametrize(("num_ranks", "capacity"), [(65, 4096), (2, 4095)])
def test_impossible_shapes(num_ranks: int, capacity: int) -> None:
    with pytest.raises(SharedMemoryError, match="at most 64 ranks"):
        make_segment(num_ranks, capacity)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open."""

    def refuse(fd: int, *_: int) -> None:
        opened.append(fd)
        raise OSError(28, "No space left on device")

    opened: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryError, match=r"2 ranks need .* MiB .*No space left"):
        make_segment(2, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_found_by_its_token() -> None:
    """A process of another namespace may have the same number, and other files."""
    pid, fd, token = make_segment(2, 4096)
    own_fd = find_segment(pid, fd, token)
    assert os.path.sameopenfile(own_fd, fd)
    pipe = os.pipe()
    for other in ((pid, fd, "00" * 64), (pid, pipe[1], token), (pid, 1 << 20, token)):
        assert find_segment(*other) is None
    for file in (fd, own_fd, *pipe):
        os.close(file)
