"""A server that dies, and the processes that a server leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from support.programs import running
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
def dying_server(
    log: Path, when: str, *options: str, stderr: int = subprocess.STDOUT
) -> Iterator[tuple[subprocess.Popen[bytes], GenerationServiceStub, grpc.Channel]]:
    """A process of `dying_server.py`, a stub and its channel; the process is killed at the end.

    Args:
        stderr: see `Popen`; by default the log.
    """
    command = (sys.executable, "-P", DYING, when, "--port", "0", *options)
    with (
        log.open("wb") as out,
        running(*command, stdout=out, stderr=stderr, start_new_session=True) as process,
        grpc.insecure_channel(f"127.0.0.1:{wait_for(log, 'the port is ')}") as channel,
    ):
        yield process, GenerationServiceStub(channel), channel
