"""A server of its own process, and what the system says of it from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpengine.server.health import READINESS
from tpengine.server.proto import tpengine_pb2 as pb
from tpengine.server.proto import tpengine_pb2_grpc

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 10.0
_POLL_S = 0.05
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]


class ServerProcess:
    """`tpengine serve` on a free port of this machine, ended with its group.

    Args:
        options: of the command line.
        log: file for what it prints.
    """

    def __init__(self, *options: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.target = f"127.0.0.1:{probe.getsockname()[1]}"
        port = self.target.partition(":")[2]
        self.log = log
        command = [sys.executable, "-m", "tpengine.cli", "serve", "--port", port, *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.channel = grpc.insecure_channel(self.target, _RECONNECT)
        self.stub = tpengine_pb2_grpc.GenerationServiceStub(self.channel)
        try:
            wait_until(self._is_ready, START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self.process.pid

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server has ended: {self.log.read_text()[-2000:]}"
        health = health_pb2_grpc.HealthStub(self.channel)
        try:
            answer = health.Check(
                health_pb2.HealthCheckRequest(service=READINESS), timeout=CALL_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def loads(self) -> pb.GetLoadsResponse:
        """The server's own figures."""
        return self.stub.GetLoads(pb.GetLoadsRequest(), timeout=CALL_TIMEOUT_S)

    def num_file_descriptors(self) -> int:
        """As the system counts them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def num_threads(self) -> int:
        """As the system counts them."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def resident_bytes(self) -> int:
        """As the system counts them."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> int | None:
        """Ends it by SIGTERM; returns the exit code, None if it had to be killed."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(END_TIMEOUT_S)
            return None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Fails if something does not become true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(_POLL_S)
