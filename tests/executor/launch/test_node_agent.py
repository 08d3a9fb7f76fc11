"""Which processes live, how one ended, what it does, and its stack, by the agent of its node."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from support.programs import running
from support.waiting import PATIENCE_S, wait_until

from tpengine.executor.launch import actors, node_agent
from tpengine.executor.launch.actors import Agents
from tpengine.executor.launch.node_agent import NodeAgent, python_stack
from tpengine.host import living_fields, start_ticks


@pytest.mark.parametrize(
    ("how", "expected"), [("kill -9 $$", "killed by signal 9 (SIGKILL)"), ("exit 7", "exit code 7")]
)
def test_end_of_a_process_that_is_reaped(how: str, expected: str) -> None:
    """By another process, as Ray reaps ranks."""
    process = subprocess.Popen(["sh", "-c", f"read line; {how}"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    agent, name = NodeAgent(), (process.pid, ticks)
    agent.watch([name])
    ended, now = agent.look(name, 0.0)
    assert not ended
    assert now in tuple("SRD"), "it lives: asleep, at work, or waiting for its program's pages"
    process.communicate(b"\n")
    ended, now = agent.look(name, 1.0)
    agent.close()
    assert now == ""
    if [int(part) for part in os.uname().release.split(".")[:2]] >= [6, 15]:
        assert ended == expected
    else:
        assert ended in ("", expected)


def test_lack_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel's count has grown since the process was watched, and it was killed."""
    counts = iter([3, 3, 3, 4])
    monkeypatch.setattr(node_agent, "_count_oom_kills", lambda: next(counts))
    monkeypatch.setattr(NodeAgent, "_status", lambda *_: signal.SIGKILL.value)
    name = (os.getpid(), start_ticks(os.getpid()) or 0)
    for words in ("", "; meanwhile the kernel has ended a process here for lack of memory"):
        agent = NodeAgent()
        agent.watch([name])
        assert agent.look(name, 0.0)[0] == f"killed by signal 9 (SIGKILL){words}"
        agent.close()


def test_old_kernel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot tell how a process ended."""

    ioctl = Mock(side_effect=OSError(errno.ENOTTY, "Inappropriate ioctl for device"))

    agent = NodeAgent()
    with running("sleep", 60) as process:
        name = (process.pid, start_ticks(process.pid) or 0)
        agent.watch([name])
    monkeypatch.setattr(node_agent.fcntl, "ioctl", ioctl)
    assert agent.look(name, 600.0) == ("", "")
    agent.close()


def test_stack_of_a_stopped_process() -> None:
    code = "import time\ndef in_the_weeds():\n    print('x', flush=True)\n    time.sleep(60)\n"
    words = "-c", code + "in_the_weeds()"
    with running(sys.executable, *words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert "in_the_weeds" in python_stack(process.pid)
        ticks = start_ticks(process.pid)
        assert NodeAgent.state((process.pid, ticks)) == "T"
        assert NodeAgent.state((process.pid, ticks + 1)) == "", "another process of the same number"


def test_missing_stack_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "py-spy is not installed" in python_stack(os.getpid())
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho 'Permission denied' >&2\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    assert python_stack(os.getpid()) == "(no stack: py-spy says: Permission denied)"


def test_agent_that_starts_has_its_time(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has answered once, or for as long as its process may take."""
    own = ray.get_runtime_context().get_node_id()
    agents = Agents("not this node")
    agents.open([own])
    assert agents.is_starting(own)
    assert agents.ask(own, "ping", timeout_s=60.0)
    assert not agents.is_starting(own)
    agents.close()
    late = Agents("not this node")
    late.open([own])
    monkeypatch.setattr(actors, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
    assert not late.is_starting(own)
    late.close()


def test_agents_of_other_nodes(ray_address: str) -> None:
    """As actors, as on any node but the driver's: they act on processes, and when one does not
    answer its node counts as silent."""
    node_id = ray.get_runtime_context().get_node_id()
    agents = Agents("another node")
    ask = partial(agents.ask, node_id, timeout_s=2 * PATIENCE_S)
    with closing(agents), running("sleep", 60) as process:
        agents.open([node_id])
        assert ask("ping")
        assert agents.silent([node_id], lambda: None) == set()
        name = (process.pid, start_ticks(process.pid))
        agents.tell(node_id, "watch", [name])
        wait_until(lambda: ask("look", name, 0.0) == ("", "S"))
        assert "no stack" in ask("stack", name), "sleep is no Python"
        agents.tell(node_id, "signal", name, signal.SIGKILL)
        process.wait(PATIENCE_S)
        assert ask("wait_for_end", [name], 1.0) == []
        ended, now = ask("look", name, 1.0)
        assert now == ""
        assert "signal 9" in ended or not ended

        pid = ask("ping")
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        assert agents.silent([node_id], lambda: None) == {node_id}
        assert time.monotonic() - start > 1.5
        os.kill(pid, signal.SIGKILL)
        assert agents.silent([node_id], lambda: None) == set(), "a dead agent is no dead node"


LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60.0,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone
"""


def test_process_that_is_not_reaped() -> None:
    with running(sys.executable, "-c", "input()", stdin=subprocess.PIPE) as process:
        assert start_ticks(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert living_fields(process.pid) is None
        assert start_ticks(process.pid) is None
    assert start_ticks(process.pid) is None


def test_one_whose_threads_have_not_all_ended() -> None:
    """Its first thread looks like a dead process; the others hold its memory and files."""
    with running(sys.executable, "-c", LEADERLESS, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        while (fields := living_fields(process.pid)) is not None and fields[0] != "Z":
            assert process.poll() is None
        assert start_ticks(process.pid) == int(fields[19])
    assert start_ticks(process.pid) is None
