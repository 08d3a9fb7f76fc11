"""The only reader of `os.environ`.

Every variable that tpengine obeys is listed here with its unit and default.
"""

from __future__ import annotations

import os

from tpengine.errors import ConfigError


def log_level() -> str:
    """`TPENGINE_LOG_LEVEL`: a name of the `logging` module's levels; default `INFO`."""
    return os.environ.get("TPENGINE_LOG_LEVEL", "INFO").upper()


def cpu_isa() -> str | None:
    """`TPENGINE_CPU_ISA`: generic, avx2, avx512 or avx512bf16; default: the best this CPU has."""
    return os.environ.get("TPENGINE_CPU_ISA") or None


def num_threads() -> int | None:
    """`TPENGINE_NUM_THREADS`: CPU threads of one worker; default: `OMP_NUM_THREADS`, or else
    its share of the cores.

    Raises:
        ConfigError: it is no positive integer.
    """
    value = os.environ.get("TPENGINE_NUM_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"TPENGINE_NUM_THREADS must be a positive integer, got {value!r}")
    return int(value)


def omp_num_threads() -> int | None:
    """`OMP_NUM_THREADS`, OpenMP's own: a number, or a list by depth of nesting of which the first
    counts; None: not set, or nothing that OpenMP would understand either."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def tune_openmp_spinning() -> None:
    """Bounds how long OpenMP threads spin; must run before torch is imported.

    libgomp spins for a very long time by default, and then one other busy process on a core can
    slow a two-thread engine by two orders of magnitude. Not spinning at all costs a third of the
    quiet throughput; about 1000 turns keeps both losses small. A value that the user set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
