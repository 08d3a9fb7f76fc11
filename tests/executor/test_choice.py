"""What fails between the choice of an executor and a ready engine leaves nothing behind."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.patches import on_call

from tpengine import EngineArgs, LLMEngine, envs
from tpengine.cli import serve
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine import llm_engine
from tpengine.errors import ConfigError, ModelLoadError, is_shortage, is_temporary
from tpengine.executor.local_executor import LocalExecutor


def test_connection_is_closed_when_no_executor_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")
    from tpengine.executor.launch import ray_home

    def fail(*_: Any) -> None:
        connect.assert_called_once()
        connect.return_value.close.assert_not_called()
        raise ZeroDivisionError

    connect = Mock()
    monkeypatch.setattr(ray_connection, "RayConnection", connect)
    monkeypatch.setattr(ray_home, "detect_device", lambda wanted: "cpu")
    monkeypatch.setattr(ray_home, "RayHome", fail)
    with pytest.raises(ZeroDivisionError):
        LLMEngine.from_engine_args(EngineArgs(EMBEDDED_MODEL, executor="ray"))
    connect.return_value.close.assert_called_once_with()


@pytest.mark.parametrize("part", ["Recovery", "OutputProcessor"])
def test_ranks_are_ended_when_no_engine_is_made(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Although the error, and with it the unfinished engine, is kept."""
    ended = on_call(monkeypatch, LocalExecutor, "shutdown")
    monkeypatch.setattr(llm_engine, part, Mock(side_effect=ZeroDivisionError))
    args = EngineArgs(EMBEDDED_MODEL, device="cpu", num_device_blocks_override=256)
    with pytest.raises(ZeroDivisionError) as caught:
        LLMEngine.from_engine_args(args)
    assert len(ended) == 1, caught.tb


def test_a_shortage_may_pass() -> None:
    """At a first start and in a rebuild, also under another error's name."""
    shortages: list[Exception] = [MemoryError(), RuntimeError("can't start new thread")]
    for shortage in (*shortages, OSError(errno.EMFILE, "no file")):
        error = ModelLoadError("cannot be read")
        assert not is_shortage(error)
        assert not is_temporary(error)
        error.__cause__ = shortage
        assert is_shortage(error)
        assert is_temporary(error)
    assert not is_shortage(RuntimeError("another one"))


def test_isolated_and_not() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"--isolate runs .* and --executor local"):
        serve.run(parser.parse_args(["--isolate", "--executor", "local"]))


def test_heads_that_do_not_divide_are_refused_before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_connection = pytest.importorskip("tpengine.executor.launch.ray_connection")

    never = Mock(side_effect=AssertionError("Ray was asked"))
    monkeypatch.setattr(ray_connection, "RayConnection", never)
    with pytest.raises(ConfigError, match=r"heads.*tensor_parallel_size = 7; sizes that can: 1, 2"):
        LLMEngine.from_engine_args(EngineArgs(EMBEDDED_MODEL, tensor_parallel_size=7))


def test_folders_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert envs.ray_folders() == [Path("/tmp/ray")]
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert envs.ray_folders() == [Path("/elsewhere/ray"), Path("/tmp/ray")]
