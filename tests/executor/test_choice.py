"""What fails between the choice of an executor and a ready engine leaves nothing behind."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpengine import EngineArgs, LLMEngine, envs
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine import llm_engine
from tpengine.errors import ConfigError, EngineError
from tpengine.executor.local_executor import LocalExecutor


class FakeConnection:
    """Counts those that are open."""

    num_open = 0

    def __init__(self, address: str | None) -> None:
        FakeConnection.num_open += 1

    def close(self) -> None:
        FakeConnection.num_open -= 1


def test_connection_is_closed_when_no_executor_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")
    from tpengine.executor.launch import ray_executor

    class Unlucky:
        @staticmethod
        def detect_device(wanted: str) -> str:
            return "cpu"

        def __init__(self, *args: Any) -> None:
            assert FakeConnection.num_open == 1
            raise ZeroDivisionError

    monkeypatch.setattr(ray_connection, "RayConnection", FakeConnection)
    monkeypatch.setattr(ray_executor, "RayExecutor", Unlucky)
    with pytest.raises(ZeroDivisionError):
        LLMEngine.from_engine_args(EngineArgs(EMBEDDED_MODEL, executor="ray"))
    assert FakeConnection.num_open == 0


@pytest.mark.parametrize("part", ["Recovery", "OutputProcessor"])
def test_ranks_are_ended_when_no_engine_can_be_made(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Although the error, and with it the unfinished engine, is kept."""
    ended: list[LocalExecutor] = []
    shutdown = LocalExecutor.shutdown

    def noted(self: LocalExecutor) -> None:
        ended.append(self)
        shutdown(self)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LocalExecutor, "shutdown", noted)
    monkeypatch.setattr(llm_engine, part, fail)
    args = EngineArgs(EMBEDDED_MODEL, device="cpu", num_device_blocks_override=256)
    with pytest.raises(ZeroDivisionError) as caught:
        LLMEngine.from_engine_args(args)
    assert len(ended) == 1, caught.tb


def test_heads_that_cannot_be_divided_are_refused_before_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")

    def never(address: str | None) -> None:
        raise AssertionError("Ray was asked")

    monkeypatch.setattr(ray_connection, "RayConnection", never)
    with pytest.raises(ConfigError, match=r"heads.*tensor_parallel_size = 7; sizes that can: 1, 2"):
        LLMEngine.from_engine_args(EngineArgs(EMBEDDED_MODEL, tensor_parallel_size=7))


def test_an_address_without_a_ray_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")
    monkeypatch.setattr(ray_connection, "ray", FakeRay())
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"ray_address = '127.0.0.1:1'"):
        ray_connection.RayConnection("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineError, match=r"RAY_ADDRESS = '127.0.0.1:1'"):
        ray_connection.RayConnection(None)
    assert time.monotonic() - begin < 5.0


class FakeRay:
    """Keeps what it was asked; a cluster is at every address where something listens."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **_: Any) -> None:
        self.asked.append(address)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="h:1", get_node_id=lambda: "n", get_job_id=lambda: "j")


def test_only_a_ray_that_was_started_for_all_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that `ray start` wrote down, while it answers: any other that runs here belongs to
    the program that started it."""
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_connection, "_users_of_started_ray", set())
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    monkeypatch.setattr(envs, "ray_folders", lambda: [tmp_path / "absent", note.parent])

    def asked() -> list[str]:
        monkeypatch.setattr(ray_connection, "ray", fake := FakeRay())
        connection = ray_connection.RayConnection(None)
        ray_connection._users_of_started_ray.discard(id(connection))
        return fake.asked

    assert asked() == ["local"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address + "\n")
        assert asked() == [address]
    assert asked() == ["local"], "the note outlived its cluster"


def test_folders_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert envs.ray_folders() == [Path("/tmp/ray")]
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert envs.ray_folders() == [Path("/elsewhere/ray"), Path("/tmp/ray")]
