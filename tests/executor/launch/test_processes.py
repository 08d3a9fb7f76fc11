"""Ranks as children of the driver: what they inherit, which devices they take, how they end."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.engines import greedy, ids, outputs_of, run
from support.namespaces import children_of, process_table
from support.patches import limited
from support.waiting import PATIENCE_S, wait_until

from executor import driver_process
from executor.driver_process import driver_process as running
from executor.ray_engines import executor_of, rank_engine
from tpengine import EngineArgs, LLMEngine, envs
from tpengine.errors import ConfigError, PlacementError
from tpengine.executor.launch import children
from tpengine.executor.launch.children import Starter
from tpengine.executor.launch.functions import pickle_function
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.launch.processes import OwnMachine, RankProcess, rank_devices
from tpengine.host import start_ticks
from tpengine.worker import device

SECRETS = ("TPENGINE_TOKENS", "TPENGINE_ADMIN_TOKEN", "TPENGINE_CLIENT_TOKEN")


def listening(pid: int) -> set[str]:
    """The sockets of a process at which others could connect."""
    sockets = set()
    for name, at in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            is_open = fields[3] in ("0A", "00010000")  # TCP_LISTEN, __SO_ACCEPTCON
            sockets |= {f"socket:[{fields[at]}]"} if is_open else set()
    return sockets & {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}


def test_a_driver_without_ray(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks become its children, and the log says so. Nothing listens, no rank has the
    tokens, and when the driver is killed both end, and their template, also those that are
    stopped."""
    for name in SECRETS:
        monkeypatch.setenv(name, "do-not-tell-anyone")
    log = tmp_path / "log"
    expected = list(ids(outputs_of(folder, [[5, 6, 7]], greedy(16)))[0])
    with log.open("wb") as out, running("child_ranks.py", folder, stderr=out) as driver:
        ranks = [tuple(rank) for rank in driver.hear()]
        assert driver.hear() == expected
        assert "Ray is not installed: 2 ranks run as processes of this machine" in log.read_text()
        for pid in (driver.process.pid, *(pid for pid, _ in ranks)):
            assert not listening(pid)
        for pid, _ in ranks:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"PYTHONPATH=" in environment
            assert b"do-not-tell-anyone" not in environment
        table = process_table()
        names = {table[pid][0]: pid for pid in children_of(driver.process.pid)}
        template = names["tpengine-templa"]
        ours = [*ranks, (template, start_ticks(template))]
        for pid, _ in ours[1:]:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: [NodeAgent.state(process) for process in ours[1:]] == ["T", "T"])
        driver.process.kill()
        wait_until(lambda: not any(map(NodeAgent.state, ours)))


def generate(engine: LLMEngine, after_five: Callable[[], None]) -> list[list[int]]:
    """The tokens of eight greedy requests; calls the function after five steps."""
    for number in range(8):
        engine.add_request(str(number), None, greedy(100), prompt_token_ids=[5 + number, 6, 7])
    assert not [output for _ in range(5) for output in engine.step() if output.finished]
    after_five()
    done = {output.request_id: output for output in run(engine) if output.finished}
    return [list(done[str(number)].outputs[0].token_ids) for number in range(8)]


def test_no_descriptor_is_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first start is repeated until there are some; a rebuild has a reserve."""
    held: list[int] = []

    def hold() -> None:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))

    def give_back(left: int) -> None:
        while len(held) > left:
            os.close(held.pop())

    class FailedStart(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if "the ranks were not started" in record.getMessage():
                give_back(0)
            return True

    def lose() -> None:
        hold()
        os.kill(executor_of(engine).places[1].pid, signal.SIGKILL)

    most = max(map(int, os.listdir("/proc/self/fd"))) + 150
    log = logging.getLogger("tpengine")
    log.addHandler(caplog.handler)
    with ExitStack() as stack:
        stack.callback(log.removeHandler, caplog.handler)
        stack.enter_context(limited(resource.RLIMIT_NOFILE, most))
        stack.callback(give_back, 0)
        hold()
        give_back(len(held) - 5)  # enough to read the model's configuration
        stack.enter_context(caplog.filtering(FailedStart()))
        engine = stack.enter_context(rank_engine(folder, 2))
        assert "errno 24 (Too many open files)" in caplog.text
        assert "within 600 s (start_timeout_s)" in caplog.text
        expected = generate(engine, lambda: None)
        assert generate(engine, lose) == expected
        [record] = engine.recoveries
        assert record.num_attempts == 1, caplog.text
        assert len(held) > 50


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, [("0",), ("1",)]), (["3", "GPU-7", "5"], [("3",), ("GPU-7",)])]
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, visible: list[str] | None, devices: list[tuple[str, ...]]
) -> None:
    """Rank i takes the i-th that the driver may use; fewer than ranks are refused."""
    monkeypatch.setattr(envs, "visible_gpus", lambda: visible)
    monkeypatch.setattr(device, "count_gpus", lambda: len(visible or "01"))
    assert rank_devices("cuda", 2) == devices
    assert rank_devices("cpu", 3) == [()] * 3
    with pytest.raises(ConfigError, match=r"4 ranks need a GPU each, .* shows [23] GPUs"):
        rank_devices("cuda", 4)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error. The thread must not end by it: all processes would end with the
    thread."""
    starter = Starter()
    start = partial(starter.start_process, "executor.nowhere")
    popen = children.subprocess.Popen
    waiting, late = threading.Event(), list[Any]()

    def slow(command: Any, *, pass_fds: list[int], **options: Any) -> Any:
        assert waiting.wait(PATIENCE_S)
        late.append([os.fstat(file).st_ino for file in pass_fds])
        late.append(popen(["sleep", "60"], pass_fds=pass_fds, **options))
        return late[-1]

    with monkeypatch.context() as patch:
        patch.setattr(children.sys, "executable", "/no/such/python")
        with pytest.raises(PlacementError, match=r"no process for a rank can.*No such file"):
            RankProcess("rank 0", start)
        patch.setattr(starter, "_start", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            RankProcess("rank 0", start)
    with monkeypatch.context() as patch:
        patch.setattr(children, "_START_S", 0.1)
        patch.setattr(children.subprocess, "Popen", slow)
        for _ in range(2):  # the first is being started, the second waits for its turn
            with pytest.raises(PlacementError, match=r"takes longer than 0\.1 s"):
                RankProcess("rank 0", start)
        pairs = [os.pipe() for _ in range(4)]  # they would get closed descriptors' numbers
        waiting.set()
        wait_until(lambda: len(late) == 2 and late[1].returncode is not None)
    assert not {os.fstat(file).st_ino for pair in pairs for file in pair} & set(late[0])
    for file in (file for pair in pairs for file in pair):
        os.close(file)
    assert RankProcess("rank 0", start).pid
    assert len(late) == 2
    starter.stop()


def test_a_program_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is soon found, and its end and its last words are known."""
    monkeypatch.syspath_prepend(Path(driver_process.__file__).parent.parent)
    starter = Starter()
    start = partial(starter.start_process, "executor.nowhere")
    process = RankProcess("rank 0", start)
    wait_until(lambda: process.answer() is None)
    machine = OwnMachine()
    machine.children = {process.pid: process}
    assert machine.ask("", "wait_for_end", [(process.pid, 0)], PATIENCE_S) == []
    assert process.exit_status() == 1 << 8
    assert "No module named executor.nowhere" in machine.ask("", "tail", str(process.pid))
    starter.stop()


def test_choice_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs("model", tensor_parallel_size=2)
    assert args.chosen_executor == "ray"
    monkeypatch.setattr("tpengine.engine_args._is_installed", lambda name: False)
    assert args.chosen_executor == "processes"
    assert EngineArgs("model").chosen_executor == "local"
    with pytest.raises(ConfigError, match="needs ray: install tpengine"):
        EngineArgs("model", executor="ray").check_installed()


def test_functions_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel by their names; a function without one is refused."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert pickle.loads(pickle_function(os.getpid)) is os.getpid
    with pytest.raises(Exception, match="lambda"):
        pickle_function(lambda *_: None)
