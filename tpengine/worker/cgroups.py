"""What the control groups above this process allow it: memory and CPU time, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = "/sys/fs/cgroup"


def memory_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup above this process that sets a limit.

    The kernel's figure counts cached file pages as used, which it gives back whenever somebody
    wants the memory; a model that was just read from disk would otherwise fill its container.
    """
    found = []
    for folder, is_v2 in _folders("memory"):
        if is_v2:
            names, prefix = ("memory.max", "memory.current"), ""
        else:
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        limit, used = (_read_int(folder / name) for name in names)
        if limit is not None and used is not None:
            cached = _file_pages(folder / "memory.stat", prefix)
            found.append((limit, max(0, used - cached)))
    return found


def cpu_limit() -> float | None:
    """CPUs whose time this process may use, by the tightest quota above it; None: no quota."""
    limits = []
    for folder, is_v2 in _folders("cpu"):
        if is_v2:
            quota, period = ([*_read_words(folder / "cpu.max"), "", ""])[:2]
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ("".join(_read_words(folder / name)) for name in names)
        if quota.isdecimal() and period.isdecimal() and int(period):  # else absent, "max" or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the cgroups above this process, from its own to the root; and whether of v2."""
    for line in _read_lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path(_ROOT)
        elif controller in controllers.split(","):
            root = Path(f"{_ROOT}/{controller}")
        else:
            continue
        folder = root / path.lstrip("/")
        for parent in (folder, *folder.parents):
            yield parent, controllers == ""
            if parent == root:
                break


def _file_pages(path: Path, prefix: str) -> int:
    """Bytes of pages that only cache files. Shared memory is not among them."""
    counts = dict(line.partition(" ")[::2] for line in _read_lines(path))
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    return sum(int(counts.get(name, "0")) for name in names)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_int(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None  # absent, or "max"
