"""A Ray that is started for an engine and does not come up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tpengine import envs
from tpengine.errors import EngineError

pytest.importorskip("ray")
from tpengine.executor.launch import ray_connection

END_S = 5.0
CODE = """
import os, sys
import ray
from ray._private import services
from tpengine.errors import EngineError
from tpengine.executor.launch.ray_connection import RayConnection

init = ray.init

def impatient_at_first(**options):
    start, ray.init = ray.init, init
    os.environ["RAY_gcs_server_port_wait_time_s"] = "0"
    try:
        init(**options)
    finally:
        os.environ["RAY_gcs_server_port_wait_time_s"] = sys.argv[1]

def late_at_first(**options):
    ray.init = init
    found = services.get_node
    def late(*_):  # what Ray raises 30 s after its processes were started
        raise Exception("The current node timed out during startup.")
    services.get_node = late
    try:
        init(**options)
    finally:
        services.get_node = found

ray.init = {"gcs": impatient_at_first, "raylet": late_at_first}[sys.argv[2]]
try:
    connection = RayConnection("local")
except EngineError as error:
    print("error:", error)
else:
    print("connected:", ray.is_initialized(), connection.is_alive)
    connection.close()
"""


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Ray's sockets lie in it, and their paths must be short."""
    folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_ray(ray_folder: str, later_wait_s: int, at_first: str = "gcs") -> tuple[str, list[str]]:
    """What a program prints that starts one, where the first is not waited for, or its raylet is
    late; and what is still there of it afterwards."""
    names = {"RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(later_wait_s), at_first],
        env={**os.environ, **names},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=120.0)
    finally:
        process.kill()
    deadline = time.monotonic() + END_S  # what was killed may still be on its way out
    while (left := _left_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return said, left


def _left_of(session: int) -> list[str]:
    found = subprocess.run(
        ["ps", "-o", "stat=,args=", "--sid", str(session)], capture_output=True, text=True
    )
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


def test_a_second_try_goes_well(ray_folder: str) -> None:
    said, left = start_ray(ray_folder, 60)
    assert "Ray did not start: Timed out waiting for file" in said
    assert "starting it again" in said
    assert "connected: True True" in said
    assert left == []


def test_a_second_try_after_a_late_raylet(ray_folder: str) -> None:
    said, left = start_ray(ray_folder, 60, "raylet")
    assert "Ray did not start: The current node timed out during startup." in said
    assert "connected: True True" in said
    assert left == []


def test_twice_is_an_error_that_tells_where_to_look(ray_folder: str) -> None:
    said, left = start_ray(ray_folder, 0)
    assert "error: Ray did not start on this machine, 2 times: Timed out waiting for file" in said
    assert f"{ray_folder}/ray/session_latest/logs/gcs_server" in said or "it left no log" in said
    assert left == []


@pytest.mark.parametrize(
    ("option", "variable", "why"),
    [
        ("local", None, "ray_address = 'local' asks for one"),
        ("local", "192.0.2.1:6379", "ray_address = 'local' asks for one"),
        (None, "local", "RAY_ADDRESS = 'local' asks for one"),
        (None, None, "no address is given, and none that `ray start` began runs here"),
    ],
)
def test_the_log_says_why_one_is_started(
    option: str | None,
    variable: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(envs, "ray_address", lambda: variable)
    monkeypatch.setattr(envs, "ray_folders", lambda: [tmp_path])
    monkeypatch.setattr(ray_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_connection.ray, "init", lambda **_: None)
    monkeypatch.setattr(ray_connection.RayConnection, "_identify", staticmethod(lambda: ("", "")))
    with caplog.at_level("INFO"):
        ray_connection.RayConnection(option).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"starting a Ray for this engine: {why}"
    ]


def test_engines_of_two_threads_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start at the same time would end the processes of the first."""
    began, running = [], threading.Event()

    def init(**_: Any) -> None:
        began.append(threading.current_thread())
        time.sleep(0.5)
        running.set()

    monkeypatch.setattr(envs, "ray_address", lambda: "local")
    monkeypatch.setattr(ray_connection.ray, "is_initialized", running.is_set)
    monkeypatch.setattr(ray_connection.ray, "init", init)
    monkeypatch.setattr(ray_connection.ray, "shutdown", running.clear)
    monkeypatch.setattr(ray_connection.RayConnection, "_identify", staticmethod(lambda: ("", "")))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(ray_connection.RayConnection, (None, None), timeout=10.0)
    assert len(began) == 1
    one.close()
    assert other.is_alive, "it ends with the last of its engines"
    other.close()
    assert not running.is_set()


def test_a_thread_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "_CONNECTING_S", 0.1)
    with ray_connection._connecting, pytest.raises(EngineError, match="another thread"):
        ray_connection.RayConnection(None)


def test_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this start, not of another program's Ray that stands in the same folder."""
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    monkeypatch.setattr(envs, "ray_folders", lambda: [tmp_path])
    assert ray_connection._last_words_of_ray(time.time()) == "it left no log"
    (logs / "gcs_server.err").write_text("")
    (logs / "gcs_server.out").write_text("begun\nno room\n")
    assert ray_connection._last_words_of_ray(time.time() - 60.0) == (
        f"its log {logs / 'gcs_server.out'} ends with: no room"
    )
    assert ray_connection._last_words_of_ray(time.time() + 60.0) == "it left no log"
