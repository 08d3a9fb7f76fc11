"""Which Ray an engine uses; one that is started for it and does not come up; and calls of Ray's
that do not return."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from server.processes import session
from support.programs import python, running
from support.waiting import PATIENCE_S, wait_until

from tpengine import envs
from tpengine.errors import EngineError, is_temporary
from tpengine.host import is_stopped

pytest.importorskip("ray")
from tpengine.executor.launch import ray_calls, ray_connection
from tpengine.executor.launch.ray_calls import RaySilentError, bounded
from tpengine.executor.launch.ray_connection import RayConnection

CODE = """
import os
import ray
from tpengine.executor.launch.ray_connection import RayConnection

init = ray.init

def impatient_at_first(**options):
    ray.init = init
    os.environ["RAY_gcs_server_port_wait_time_s"] = "0"
    try:
        init(**options)
    finally:
        os.environ["RAY_gcs_server_port_wait_time_s"] = "60"

ray.init = impatient_at_first
connection = RayConnection("local")
print("connected:", ray.is_initialized(), connection.is_alive)
connection.close()
"""


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Ray's sockets lie in it, and their paths must be short."""
    folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_second_try_goes_well(ray_folder: str) -> None:
    """In a program that does not wait for the first one, of which nothing is left."""
    names = {"RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipe |= {"env": {**os.environ, **names}, "start_new_session": True}
    with running(sys.executable, "-c", CODE, **pipe) as process:
        said, _ = process.communicate(timeout=120.0)
    assert "Ray did not start: Timed out waiting for file" in said
    assert "starting it again" in said
    assert "connected: True True" in said
    wait_until(lambda: not session(process.pid), more=lambda: str(session(process.pid)))


class FakeRay:
    """Keeps what it was asked; a cluster is at every address where something listens.

    Attributes:
        on_init: called in each start.
        folder: of its session.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.on_init: Callable[[], None] = lambda: None
        self.folder = folder
        self.is_running = False

    def is_initialized(self) -> bool:
        return self.is_running

    def init(self, address: str, **_: Any) -> Any:
        self.asked.append(address)
        self.on_init()
        self.is_running = True
        return SimpleNamespace(address_info={"session_dir": str(self.folder)})

    def shutdown(self) -> None:
        self.is_running = False

    def chosen(self) -> str:
        """What is asked for where no address is given."""
        RayConnection(None).close()
        self.shutdown()
        return self.asked[-1]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="h:1", get_node_id=lambda: "n", get_job_id=lambda: "j")


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    """A Ray that is not there, on a machine where none has left a note."""
    fake = FakeRay(tmp_path / "session")
    fake.folder.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(envs, "ray_folders", lambda: [tmp_path])
    monkeypatch.setattr(ray_connection, "ray", fake)
    monkeypatch.setattr(ray_connection, "_RAY_FOLDER", str(tmp_path))
    monkeypatch.setattr(ray_connection, "check_new", lambda address: None)
    monkeypatch.setattr(ray_connection, "check_answers", lambda: None)
    return fake


def test_address_without_ray_fails_fast(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself, which would try for most of a minute, is not asked."""
    with pytest.raises(EngineError, match=r"ray_address = '127.0.0.1:1'"):
        RayConnection("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineError, match=r"RAY_ADDRESS = '127.0.0.1:1'"):
        RayConnection(None)
    assert fake_ray.asked == []


def test_only_a_ray_that_was_started_for_all_is_found(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that `ray start` wrote down, while it answers: any other that runs here belongs to
    the program that started it."""
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    monkeypatch.setattr(envs, "ray_folders", lambda: [tmp_path / "absent", note.parent])

    assert fake_ray.chosen() == "local"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address + "\n")
        assert fake_ray.chosen() == address
    assert fake_ray.chosen() == "local", "the note outlived its cluster"


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
    option: str, variable: str, why: str, fake_ray: FakeRay, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(envs, "ray_address", lambda: variable)
    with caplog.at_level("INFO"):
        RayConnection(option).close()
    assert caplog.messages[0] == f"starting a Ray for this engine: {why}"


def test_a_note_of_another_user_is_not_followed(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its Ray could run anything as the user of this one."""
    note, elsewhere = tmp_path / "ray_current_cluster", tmp_path / "elsewhere"

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        elsewhere.write_text(address)
        note.symlink_to(elsewhere)
        assert fake_ray.chosen() == "local", "a link"
        note.unlink()
        os.mkfifo(note)
        assert fake_ray.chosen() == "local", "a pipe"
        note.unlink()
        note.write_text(address)
        note.chmod(0o664)
        assert fake_ray.chosen() == "local", "others may write it"
        note.chmod(0o644)
        assert fake_ray.chosen() == address
        if os.geteuid() == 0:
            os.chown(note, 4711, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert fake_ray.chosen() == "local", "another user's"


def test_what_ray_leaves_is_for_this_user_alone(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    monkeypatch.setattr(envs, "ray_token_file", lambda: token)

    def on_init() -> None:  # with the permissions that Ray gives
        token.write_text("0123")
        token.chmod(0o644)
        fake_ray.folder.chmod(0o777)

    fake_ray.on_init = on_init
    for mode, warns in (("token", False), ("disabled", True)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        caplog.clear()
        RayConnection("local").close()
        assert token.stat().st_mode & 0o777 == 0o600
        assert fake_ray.folder.stat().st_mode & 0o777 == 0o700
        assert ("Ray's authentication is off" in caplog.text) == warns


def test_engines_of_two_threads_share_one(fake_ray: FakeRay) -> None:
    """A second start at the same time would end the processes of the first."""
    fake_ray.on_init = partial(time.sleep, 0.5)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(RayConnection, ("local", "local"), timeout=60.0)
    assert fake_ray.asked == ["local"]
    first.close()
    assert other.is_alive, "it ends with the last of its engines"
    other.close()
    assert not fake_ray.is_running


def test_no_thread_waits_for_ever(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "CONNECTING_S", 0.1)
    begun, done = threading.Event(), threading.Event()

    def on_init() -> None:
        begun.set()
        assert done.wait(60.0)

    fake_ray.on_init = on_init
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(RayConnection, "local")
        assert begun.wait(60.0)
        with pytest.raises(EngineError, match="another thread"):
            RayConnection("local")
        done.set()
        first.result(60.0).close()


def test_a_store_that_is_frozen() -> None:
    """It accepts a connection, and Ray would wait for its answer. In a process of its own, as the
    thread that waits is never done."""
    code = (
        "import sys; from tpengine.executor.launch import ray_calls, ray_connection\n"
        "ray_calls.RAY_CALL_S = 1.0\n"
        "ray_connection.RayConnection(sys.argv[1])"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = python("-c", code, f"127.0.0.1:{server.getsockname()[1]}", code=1)
    assert "Ray did not answer within 1 s, when asked for its address" in done.stderr


def test_a_ray_that_does_not_end(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for its control store, which is frozen: its processes are killed."""
    monkeypatch.setattr(ray_calls, "RAY_CALL_S", 0.2)
    has_ended = threading.Event()
    monkeypatch.setattr(fake_ray, "shutdown", lambda: has_ended.wait(60.0))
    kill = Mock(side_effect=lambda but: has_ended.set())
    monkeypatch.setattr(ray_connection, "_end_ray_children", kill)
    RayConnection("local").close()
    kill.assert_called_once_with(but=set())


@pytest.mark.parametrize("is_own", [False, True])
def test_the_end_of_a_ray_that_does_not_answer(
    is_own: bool, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If it is another program's, only the driver's part ends. If a process of the engine's own Ray
    is stopped, Ray is not asked, and its processes are killed before it ends."""
    calls: list[str] = []
    at_exit: list[Callable[[], None]] = []

    def silent() -> None:
        calls.append("question")
        raise RaySilentError("frozen")

    monkeypatch.setattr(ray_connection, "check_answers", silent)
    monkeypatch.setattr(ray_connection, "_end_driver", lambda: calls.append("end of the driver"))
    monkeypatch.setattr(fake_ray, "shutdown", lambda: calls.append("end of Ray"))
    monkeypatch.setattr(ray_connection.atexit, "register", at_exit.append)
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([*program, str(tmp_path) if is_own else "no Ray"]) as child,
        ExitStack() as stack,
    ):
        stack.callback(child.kill)
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(child.pid))
        if is_own:
            RayConnection("local").close()
            assert child.wait(PATIENCE_S) == -signal.SIGKILL
            assert calls == ["end of Ray"]
        else:
            RayConnection(f"127.0.0.1:{server.getsockname()[1]}")
            at_exit.pop()()
            assert calls == ["question", "end of the driver"]


def test_last_words(fake_ray: FakeRay, tmp_path: Path) -> None:
    """Of this start, not of another program's Ray that stands in the same folder."""
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    log = logs / "gcs_server.out"

    def fail(age_s: float | None) -> str:
        def on_init() -> None:
            if age_s is not None:
                (logs / "gcs_server.err").write_text("")
                log.write_text("begun\nno room\n")
                os.utime(log, (time.time() - age_s,) * 2)
            raise RuntimeError("late")

        fake_ray.on_init = on_init
        with pytest.raises(EngineError, match="2 times: late; ") as caught:
            RayConnection("local")
        return str(caught.value).partition("late; ")[2]

    assert fail(None) == "it left no log"
    assert fail(-60.0) == f"its log {log} ends with: no room"
    assert fail(60.0) == "it left no log"


def test_a_call_that_does_not_return_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is made until it returns, so that no threads pile up; what it brings is undone."""
    monkeypatch.setattr(ray_calls, "RAY_CALL_S", 0.2)
    monkeypatch.setattr(ray_calls, "_RETURN_S", 0.1)
    answers, made = threading.Event(), []

    def make() -> str:
        assert answers.wait(PATIENCE_S)
        return "a placement group"

    with pytest.raises(
        RaySilentError, match=r"within 0\.2 s, when asked for room.*gcs_server"
    ) as e:
        bounded(make, "room", made.append)
    assert is_temporary(e.value)
    for _ in range(3):
        with pytest.raises(RaySilentError, match="not asked for its nodes: it still"):
            bounded(lambda: made.append("never"), "its nodes")
    assert [t.name for t in threading.enumerate()].count("tpengine-ray-call") == 1
    answers.set()
    wait_until(lambda: made == ["a placement group"])
    assert bounded(lambda: 7, "a number") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, "a quotient")
