"""The file of a segment is fully allocated, and is always removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import running

from tpengine.distributed.shared_memory import SegmentFile, find_segment_file
from tpengine.errors import SharedMemoryError
from tpengine.host import sweep_segments
from tpengine.ops.shared_memory_ops import segment_bytes


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    return process.pid


def test_all_of_it_is_allocated(tmp_path: Path) -> None:
    file = SegmentFile("engine", 3, 4, 8192, tmp_path)
    stat = os.fstat(file.fd)
    assert stat.st_size == segment_bytes(4, 8192)
    assert stat.st_blocks * 512 >= stat.st_size
    file.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("num_ranks", "capacity"), [(65, 4096), (2, 4095)])
def test_impossible_shapes(num_ranks: int, capacity: int, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match="at most 64 ranks"):
        SegmentFile("engine", 0, num_ranks, capacity, tmp_path)
    assert not list(tmp_path.iterdir())


def test_found_by_its_token(tmp_path: Path) -> None:
    file = SegmentFile("engine", 0, 2, 4096, tmp_path)
    fd = find_segment_file(file.path, file.token)
    assert fd is not None
    os.close(fd)
    assert find_segment_file(file.path, b"\0" * 64) is None
    assert find_segment_file(tmp_path / "absent", file.token) is None
    os.close(file.fd)


def test_sweep_removes_what_the_dead_left(dead_pid: int, tmp_path: Path) -> None:
    left = tmp_path / f"tpengine-engine-0-{dead_pid}-12345"
    reused = tmp_path / f"tpengine-a-b-0-{os.getpid()}-1"  # this process id, but another start time
    other = tmp_path / "tpengine-notes"
    for path in (left, reused, other):
        path.write_bytes(b"x")
    mine = SegmentFile("engine", 0, 2, 4096, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([other, mine.path])
    assert sweep_segments(tmp_path) == []
    os.close(mine.fd)


def test_sweep_does_not_wait_for_parents(tmp_path: Path) -> None:
    """A killed rank stays a zombie until its parent has read its exit status."""
    program = Path(__file__).with_name("lost_segment.py")
    with running(sys.executable, program, tmp_path) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        left = list(tmp_path.iterdir())
        assert len(left) == 1
        assert sweep_segments(tmp_path) == left


def test_sweep_spares_what_is_in_use_elsewhere(dead_pid: int, tmp_path: Path) -> None:
    """A creator in another process namespace looks dead here, but still holds its lock."""
    mine = SegmentFile("engine", 0, 2, 4096, tmp_path)
    foreign = tmp_path / f"tpengine-engine-0-{dead_pid}-12345"
    mine.path.rename(foreign)
    assert sweep_segments(tmp_path) == []
    os.close(mine.fd)
    assert sweep_segments(tmp_path) == [foreign]
