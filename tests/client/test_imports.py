"""The client imports root files and the proto only: neither the engine nor torch."""

from __future__ import annotations

from pathlib import Path

from support.imports import imported

import tpengine
from tpengine import client

MODULES = sorted(path.stem for path in Path(client.__file__).parent.glob("[a-z]*.py"))


def test_only_root_files_and_the_proto() -> None:
    assert "generation_client" in MODULES
    imports = [f"import tpengine.client.{name}" for name in MODULES]
    modules = imported(*imports, "from tpengine.client import ClientTLS, GenerationClient")
    assert "tpengine.client.generation_client" in modules
    foreign = {name.partition(".")[0] for name in modules}
    assert not foreign & {"torch", "transformers", "ray", "numpy"}
    root_files = {path.stem for path in Path(tpengine.__file__).parent.glob("*.py")}
    for name in modules:
        parts = name.split(".")
        if parts[0] == "tpengine" and len(parts) > 1 and parts[1] not in root_files:
            assert parts[1] in ("client", "proto", "compat"), name  # the package has aliases


def test_the_package_is_cheap() -> None:
    assert "grpc" not in imported("import tpengine.client")
    assert not hasattr(client, "no_such_name")
    assert client.GenerationClient.__name__ == "GenerationClient"
