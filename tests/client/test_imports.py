"""The client imports root files and the proto only: neither the engine nor torch."""

from __future__ import annotations

from support.programs import imported

from tpengine import client


def test_the_package_is_cheap() -> None:
    assert "grpc" not in imported("import tpengine.client")
    modules = imported("from tpengine.client import ClientTLS, GenerationClient")
    assert not {name.partition(".")[0] for name in modules} & {"torch", "ray", "numpy"}
    assert not hasattr(client, "no_such_name")
    assert client.GenerationClient.__name__ == "GenerationClient"
