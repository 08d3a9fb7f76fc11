"""A server of its own process, and what the system says of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from support.waiting import wait_until
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
_READY = re.compile(r"tpengine is ready on (\S+):.*metrics on (\S+);")
_HTTP = re.compile(r"OpenAI on (\S+)/v1;")


class ServerProcess:
    """`tpengine serve` on a free port of this machine, ended with its group.

    Args:
        options: of the command line.
        log: file for what it prints.
        program: words for Python before the options; another one serves as `tpengine serve` does.
        max_files: files that the server may open; None: as many as this process.

    Attributes:
        target: HOST:PORT of the service.
        metrics_url: of the page for Prometheus.
        system: what the system counts of the process.
    """

    def __init__(
        self,
        *options: str,
        log: Path,
        program: Sequence[str] = ("-m", "tpengine", "serve"),
        start_timeout_s: float = START_TIMEOUT_S,
        max_files: int | None = None,
    ) -> None:
        self.log = log
        ports = ["--port", "0", "--metrics-port", "0"]
        command = [sys.executable, *program, *ports, *options]
        if max_files is not None:
            command = ["sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh", *command]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            wait_until(self._is_ready, start_timeout_s)
        except BaseException:
            self._end()
            raise
        match = _READY.search(log.read_text())
        self.target, self.metrics_url = match.groups()
        self.channel = grpc.insecure_channel(self.target)
        self.stub = tpengine_pb2_grpc.GenerationServiceStub(self.channel)
        self.system = psutil.Process(self.pid)

    @property
    def http_address(self) -> str:
        """http://HOST:PORT of the HTTP door."""
        match = _HTTP.search(self.log.read_text())
        assert match is not None, "the server was started without --http-port"
        return match.group(1)

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self.process.pid

    def _is_ready(self) -> bool:
        said = self.log.read_text()
        assert self.process.poll() is None, f"the server has ended: {said[-2000:]}"
        return _READY.search(said) is not None

    def loads(self) -> pb.GetLoadsResponse:
        """The server's own figures."""
        return self.stub.GetLoads(pb.GetLoadsRequest(), timeout=CALL_TIMEOUT_S)

    def is_at_rest(self) -> bool:
        """Whether no call is open and all blocks are free; those of a client that left are freed in
        the next step."""
        loads = self.loads()
        return not loads.num_open_calls and loads.num_free_blocks == loads.num_total_blocks

    def metric(self, name: str, **labels: str) -> float:
        """A figure of the metrics port, of all series that have these labels; 0 without any."""
        with urllib.request.urlopen(self.metrics_url, timeout=CALL_TIMEOUT_S) as answer:
            text = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def stop(self) -> int | None:
        """Ends it by SIGTERM; returns the exit code, None if it had to be killed."""
        self.channel.close()
        return self._end()

    def _end(self) -> int | None:
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

    def __exit__(self, *error: object) -> None:
        self.stop()


@contextmanager
def serving(folder: Path, *options: str, **more: Any) -> Iterator[ServerProcess]:
    """A server whose log lies in a folder, and has no traceback at its end."""
    with ServerProcess(*options, log=folder / "log", **more) as process:
        yield process
    assert "Traceback" not in process.log.read_text()
