"""The files that doors for other protocols can share do not import gRPC."""

from __future__ import annotations

from support.imports import imported

NAMES = {f"tpengine.server.{name}" for name in ("auth", "limits", "server_args", "state")}


def test_shared_files_import_no_grpc() -> None:
    found = imported(f"import {', '.join(NAMES)}")
    assert found >= NAMES
    assert not [one for one in found if one.partition(".")[0] in ("grpc", "google")]
