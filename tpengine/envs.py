"""The only reader of `os.environ`.

Every variable that tpengine obeys is listed here with its unit and default.
"""

from __future__ import annotations

import os
from pathlib import Path

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


def client_token() -> str | None:
    """`TPENGINE_CLIENT_TOKEN`: bearer token of `tpengine client`; default: none. Ranks, whose
    traffic is not encrypted, do not get it."""
    return os.environ.get("TPENGINE_CLIENT_TOKEN") or None


def tune_openmp_spinning() -> None:
    """Bounds how long OpenMP threads spin; must run before torch is imported.

    libgomp spins for a very long time by default, and then one other busy process on a core can
    slow a two-thread engine by two orders of magnitude. Not spinning at all costs a third of the
    quiet throughput; about 1000 turns keeps both losses small. A value that the user set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def tokens() -> str | None:
    """`TPENGINE_TOKENS`: bearer tokens of a server's clients, between commas; default: none."""
    return os.environ.get("TPENGINE_TOKENS") or None


def admin_token() -> str | None:
    """`TPENGINE_ADMIN_TOKEN`: the token for a server's administration; default: none."""
    return os.environ.get("TPENGINE_ADMIN_TOKEN") or None


_RANK_PREFIXES = ("TPENGINE_", "NCCL_", "OMP_", "GOMP_", "KMP_", "MKL_")
_SECRETS = {"TPENGINE_CLIENT_TOKEN", "TPENGINE_TOKENS", "TPENGINE_ADMIN_TOKEN"}
_RANK_NAMES = ("CUDA_LAUNCH_BLOCKING", "TORCH_SHOW_CPP_STACKTRACES")


def for_ranks() -> dict[str, str]:
    """The variables that ranks on other machines get from the driver: tpengine's own and those of
    the libraries that compute and communicate.

    `TPENGINE_CARRY_ENV`: names of more of them, separated by commas; default: none.
    """
    names = set(os.environ.get("TPENGINE_CARRY_ENV", "").replace(" ", "").split(",")) - {""}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_RANK_PREFIXES) and name not in _SECRETS)
        or name in _RANK_NAMES
        or name in names
    }


def adopt(variables: dict[str, str]) -> list[str]:
    """Sets what the driver sent, in a rank; returns the names of those that were different.

    Ray sets `OMP_NUM_THREADS` by the CPUs that an actor asked for, which says nothing about ranks
    on GPUs: only the driver's own value counts.
    """
    if "OMP_NUM_THREADS" not in variables:
        os.environ.pop("OMP_NUM_THREADS", None)
    changed = [name for name, value in variables.items() if os.environ.get(name) != value]
    os.environ.update(variables)
    return changed


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the Ray cluster to connect to, by Ray's own convention; default: none."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_folders() -> list[Path]:
    """`RAY_TMPDIR`, `TMPDIR` and `/tmp`: where Ray keeps what it knows of this machine, by its own
    convention; the folder of whoever started it may be another than this process's."""
    parents = (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR"), "/tmp")
    return [Path(parent, "ray") for parent in dict.fromkeys(filter(None, parents))]


def prepare_local_ray() -> None:
    """Settings of a Ray that is started here: by default it would run its workers at the lowest
    priority but four, where any other process takes the cores from them. What is set stays."""
    os.environ.setdefault("RAY_worker_niceness", "0")


def set_nccl_interface(name: str) -> None:
    """Tells NCCL, which has no other way to be told, to use the network interface `name`.

    A value of `NCCL_SOCKET_IFNAME` that the user set stays.
    """
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_visible_gpus(ids: tuple[str, ...]) -> None:
    """Gives this process the GPUs with these ids, in a process that has not touched CUDA yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
