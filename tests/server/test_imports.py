"""The files that doors for other protocols can share do not import gRPC."""

from __future__ import annotations

from support.programs import imported

NAMES = {f"tpengine.server.{name}" for name in ("auth", "limits", "server_args", "state")}


def test_shared_files_import_no_grpc() -> None:
    modules = imported(f"import {', '.join(NAMES)}")
    assert modules >= NAMES
    assert not [name for name in modules if name.partition(".")[0] in ("grpc", "google")]
