"""Programs that tests need and Python's registry does not have: installed where that is possible.

Where a program cannot be installed, as for a user who is not root, the tests that need it are
skipped with the reason; in CI a skip is a failure (`conftest.py`).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

_PATIENCE_S = 240
_LOCK = Path(tempfile.gettempdir()) / "tpengine-test-packages.lock"
"""Of processes of pytest that run at the same time; apt-get's own lock makes one of them fail."""


def require(command: str, package: str) -> str:
    """The path of a program; `package` is the Debian package that brings it."""
    path = _find(command)
    if path is None:
        problem = _install(command, package)
        path = _find(command)
        if path is None:
            pytest.skip(f"{command} is not here, package {package} cannot be installed: {problem}")
    return path


def _find(command: str) -> str | None:
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


def _install(command: str, package: str) -> str:
    if os.geteuid() != 0:
        return "installing needs root"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    try:
        with FileLock(_LOCK, timeout=_PATIENCE_S):
            if _find(command) is not None:  # by the other process meanwhile
                return ""
            _refresh()
            return _apt_get("install", "-y", "--no-install-recommends", package)
    except Timeout:
        return f"another process has been installing for {_PATIENCE_S} s"


@functools.cache
def _refresh() -> str:
    return _apt_get("update")


def _apt_get(*words: str) -> str:
    command = ("apt-get", "-o", "DPkg::Lock::Timeout=120", *words)
    # A test wants the program, not its service: with this systemd starts none.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "SYSTEMD_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    return (done.stdout + done.stderr)[-1000:]
