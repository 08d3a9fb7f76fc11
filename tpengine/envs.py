"""All environment variables that tpengine reads or sets, each with its unit and default.

No other file uses `os.environ`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tpengine.errors import ConfigError


def log_level() -> str:
    """`TPENGINE_LOG_LEVEL`: a name of the `logging` module's levels; default `INFO`."""
    return os.environ.get("TPENGINE_LOG_LEVEL", "INFO").upper()


def cpu_isa() -> str | None:
    """`TPENGINE_CPU_ISA`: generic, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amx; default:
    the best that runs."""
    return os.environ.get("TPENGINE_CPU_ISA") or None


def num_threads() -> int | None:
    """`TPENGINE_NUM_THREADS`: CPU threads of one worker; default: `OMP_NUM_THREADS`, or its share
    of the cores if that is not set.

    Raises:
        ConfigError: it is not a positive integer.
    """
    value = os.environ.get("TPENGINE_NUM_THREADS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"TPENGINE_NUM_THREADS must be a positive integer, got {value!r}")
    return int(value)


def omp_num_threads() -> int | None:
    """`OMP_NUM_THREADS` of OpenMP: a number, or a list by depth of nesting, whose first number is
    used; None: not set, or in a form that OpenMP ignores too."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def client_token() -> str | None:
    """`TPENGINE_CLIENT_TOKEN`: bearer token of `tpengine client`; default: no token."""
    return _secret("TPENGINE_CLIENT_TOKEN")


def tune_openmp_spinning() -> None:
    """Sets `GOMP_SPINCOUNT` to 1000 unless the user set it; must run before torch is imported.

    OpenMP threads spin while they wait. libgomp's default is so long that one other busy process on
    a core can slow a two-thread engine by two orders of magnitude. Without spinning, throughput on
    an idle machine falls by a third; about 1000 turns keep both losses small.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def rank_tls() -> Path | None:
    """`TPENGINE_RANK_TLS`: a folder of certificates for TLS between the driver and ranks of a Ray
    cluster, the same path on every machine; default: no TLS."""
    folder = os.environ.get("TPENGINE_RANK_TLS")
    return Path(folder) if folder else None


def tokens() -> str | None:
    """`TPENGINE_TOKENS`: bearer tokens of clients, separated by commas; default: no token."""
    return _secret("TPENGINE_TOKENS")


def admin_token() -> str | None:
    """`TPENGINE_ADMIN_TOKEN`: bearer token of a server's administrator; default: no token."""
    return _secret("TPENGINE_ADMIN_TOKEN")


def hide_secrets() -> None:
    """Takes the tokens out of the environment, which every process inherits that is started from
    here on: ranks and Ray's own. The functions above still return them."""
    for name in _SECRETS:
        value = os.environ.pop(name, None)
        if value is not None:
            _hidden[name] = value


def _secret(name: str) -> str | None:
    return os.environ.get(name) or _hidden.get(name) or None


_hidden: dict[str, str] = {}
_RANK_PREFIXES = ("TPENGINE_", "NCCL_", "OMP_", "GOMP_", "KMP_", "MKL_")
_SECRETS = {"TPENGINE_CLIENT_TOKEN", "TPENGINE_TOKENS", "TPENGINE_ADMIN_TOKEN"}
_RANK_NAMES = ("CUDA_LAUNCH_BLOCKING", "TORCH_SHOW_CPP_STACKTRACES")


def for_ranks() -> dict[str, str]:
    """The variables that ranks on other machines get from the driver: those of tpengine and of the
    libraries that compute and communicate. Tokens are not among them, since the traffic to ranks is
    not encrypted.

    `TPENGINE_CARRY_ENV`: names of more variables, separated by commas; default: none.
    """
    names = set(os.environ.get("TPENGINE_CARRY_ENV", "").replace(" ", "").split(",")) - {""}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_RANK_PREFIXES) and name not in _SECRETS)
        or name in _RANK_NAMES
        or name in names
    }


def for_children() -> dict[str, str]:
    """The variables of a rank that this process starts: all of its own but the tokens, with
    `PYTHONPATH` set so that the rank imports what this process would."""
    variables = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return variables | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Of a process that is forked: numpy's library would start threads when it is imported."""


def replace(variables: dict[str, str]) -> None:
    """Makes these the variables of this process, in place of those that it has."""
    os.environ.clear()
    os.environ.update(variables)


def visible_gpus() -> list[str] | None:
    """`CUDA_VISIBLE_DEVICES` of CUDA: ids of the GPUs that this process may use; default: all."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name.strip() for name in value.split(",")]


def adopt(variables: dict[str, str]) -> list[str]:
    """Sets in a rank the variables that the driver sent; returns the names of those that changed.

    Ray sets `OMP_NUM_THREADS` to the number of CPUs that an actor asks for. This number has no
    meaning for ranks on GPUs, so only the driver's own value counts.
    """
    if "OMP_NUM_THREADS" not in variables:
        os.environ.pop("OMP_NUM_THREADS", None)
    changed = [name for name, value in variables.items() if os.environ.get(name) != value]
    os.environ.update(variables)
    return changed


def ray_address() -> str | None:
    """`RAY_ADDRESS` of Ray: the cluster to connect to; default: none."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_folders() -> list[Path]:
    """The folders in which Ray may keep its state of this machine: in `RAY_TMPDIR`, `TMPDIR` and
    `/tmp`. The process that started Ray may have had other values than this one."""
    parents = (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR"), "/tmp")
    return [Path(parent, "ray") for parent in dict.fromkeys(filter(None, parents))]


def outlive_control_store() -> None:
    """Sets `RAY_gcs_rpc_server_reconnect_timeout_s` to a week, unless the user set it; before Ray
    is initialised. By Ray's default its code ends this process when its control store has been
    gone for a minute, while ranks and requests could go on."""
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "604800")


def ray_wants_token() -> bool:
    """Whether `RAY_AUTH_MODE` of Ray is `token`. Ray sets it so in a process that starts a cluster,
    unless the user set it."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def ray_token_file() -> Path:
    """Where Ray keeps a token that it has made."""
    return Path.home() / ".ray" / "auth_token"


def prepare_local_ray() -> None:
    """Sets `RAY_worker_niceness` to 0 for a Ray that this process starts, unless the user set it.
    Ray's default of 15 would give the cores to any other process first."""
    os.environ.setdefault("RAY_worker_niceness", "0")


def set_nccl_interface(name: str) -> None:
    """Sets `NCCL_SOCKET_IFNAME`, the network interface of NCCL, unless the user set it. NCCL has no
    other interface for this."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_visible_gpus(ids: tuple[str, ...]) -> None:
    """Gives this process the GPUs with these ids; must run before the process uses CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
