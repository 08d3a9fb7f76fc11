"""The files that doors for other protocols can share do not import gRPC."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT_S = 120.0
NAMES = {f"tpengine.server.{name}" for name in ("auth", "limits", "server_args", "state")}


def test_shared_files_import_no_grpc() -> None:
    program = f"import sys, {', '.join(NAMES)}; print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = set(done.stdout.split())
    assert found >= NAMES
    assert not [one for one in found if one.partition(".")[0] in ("grpc", "google")]
