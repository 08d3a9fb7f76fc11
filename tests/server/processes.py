"""A server that dies, and the processes that a server leaves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from support.waiting import wait_until

from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.tpengine_pb2_grpc import GenerationServiceStub

END_S = 60.0
DYING = Path(__file__).with_name("dying_server.py")


def session(pid: int) -> list[str]:
    """Commands that run in the session that a process began, except itself."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "--sid", str(pid)], capture_output=True, text=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [args for of, state, args in lines if int(of) != pid and not state.startswith("Z")]


def wait_for(log: Path, words: str) -> str:
    """Waits until a log has these words; returns what follows them in their line."""
    wait_until(lambda: words in log.read_text(), END_S)
    return log.read_text().partition(words)[2].partition("\n")[0]


def rank_pid(rank: pb.RankInfo) -> int:
    """The process of a rank."""
    match = re.search(r"pid[ =](\d+)", rank.device)
    return int(match[1])


@contextmanager
def own_ray() -> Iterator[None]:
    """Servers that start meanwhile have a Ray of their own."""
    # Ray's sockets are in its folder, and paths of sockets must be short.
    folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("RAY_ADDRESS", "local")
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def dying_server(
    log: Path, when: str, *options: str, stderr: int = subprocess.STDOUT
) -> Iterator[tuple[subprocess.Popen[bytes], GenerationServiceStub, grpc.Channel]]:
    """A process of `dying_server.py`, a stub and its channel; the process is killed at the end.

    Args:
        stderr: see `Popen`; by default the log.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", str(DYING), when, "--port", "0", *options],
            stdout=out,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{wait_for(log, 'the port is ')}") as channel:
            yield process, GenerationServiceStub(channel), channel
    finally:
        process.kill()
        process.wait(END_S)
