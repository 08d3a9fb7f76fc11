"""Which executor runs the ranks, by the names of its options here and in vLLM 0.5.4."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from tpengine.errors import ConfigError

EXECUTORS = ("auto", "local", "processes", "ray")
_NEEDED = {"local": [], "processes": ["msgpack"], "ray": ["ray", "msgpack"]}
"""Packages of each executor."""


@dataclass(frozen=True)
class ExecutorChoice:
    """What the arguments of an engine ask for; the fields have their names."""

    executor: str
    worker_use_ray: bool
    distributed_executor_backend: str | None
    tensor_parallel_size: int

    @property
    def _asked(self) -> str | None:
        """What the arguments of vLLM 0.5.4 ask for."""
        if self.distributed_executor_backend == "mp":
            return "processes"
        return "ray" if self.worker_use_ray or self.distributed_executor_backend else None

    @property
    def is_open(self) -> bool:
        """Whether the arguments ask for no executor."""
        return self.executor == "auto" and self._asked is None

    @property
    def is_open_and_local(self) -> bool:
        """Whether one rank would run in this process, and no argument asks for that."""
        return self.is_open and self.name == "local"

    @property
    def name(self) -> str:
        """Where the ranks run: local, processes or ray."""
        if not self.is_open:
            return self._asked or "" if self.executor == "auto" else self.executor
        if self.tensor_parallel_size == 1:
            return "local"
        return "ray" if _is_installed("ray") else "processes"

    def check(self) -> None:
        """Raises ConfigError if the arguments contradict each other."""
        wrong_size = self.name == "local" and self.tensor_parallel_size != 1
        if wrong_size or self._asked not in (None, self.name):
            what = "one rank in this process" if self.name == "local" else f"ranks by {self.name}"
            raise ConfigError(
                f"executor = {self.name!r} runs {what}, got tensor_parallel_size = "
                f"{self.tensor_parallel_size}, worker_use_ray = {self.worker_use_ray}, "
                f"distributed_executor_backend = {self.distributed_executor_backend}; use executor "
                f"= {self._asked or 'processes'!r}, or leave these out"
            )
        if self.worker_use_ray and self._asked != "ray":
            raise ConfigError(
                "worker_use_ray = True and distributed_executor_backend = 'mp' contradict each "
                "other; leave one of them out"
            )

    def check_installed(self) -> None:
        """Raises ConfigError if a package is missing."""
        if missing := [package for package in _NEEDED[self.name] if not _is_installed(package)]:
            raise ConfigError(
                f"tensor_parallel_size = {self.tensor_parallel_size} with executor = "
                f"{self.executor!r} needs {' and '.join(missing)}: pip install 'tpengine[ray]'"
            )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
