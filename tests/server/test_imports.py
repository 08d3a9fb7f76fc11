"""The files that doors for other protocols can share do not import gRPC."""

from __future__ import annotations

import subprocess
import sys

import pytest

TIMEOUT_S = 120.0


@pytest.mark.parametrize("name", ["auth", "limits", "server_args", "state"])
def test_shared_files_import_no_grpc(name: str) -> None:
    program = f"import sys, tpengine.server.{name}; print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = set(done.stdout.split())
    assert f"tpengine.server.{name}" in found
    assert not [one for one in found if one.partition(".")[0] in ("grpc", "google")]
