"""One rank in its own process, whatever launcher started it: its worker's thread and its calls.

All of the worker's code runs in one thread, since devices and thread pools belong to threads. That
thread takes steps from the channel, and between them calls that the launcher passes on. The
launcher's thread stays free to answer. Where a token goes from here: head of
`server/grpc/service.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpengine import envs
from tpengine.errors import ConfigError
from tpengine.executor.channel import (
    Channel,
    ChannelError,
    Frame,
    FrameKind,
    Invitation,
    connect,
)
from tpengine.executor.codec import decode_step, encode
from tpengine.executor.diagnosis import DRIVER_GONE, Doing, LastLines, RankFailure, RankPlace
from tpengine.executor.watch import Heartbeat, end_process
from tpengine.host import start_ticks
from tpengine.logger import init_logger
from tpengine.messages import StepOutput

if TYPE_CHECKING:
    from tpengine.worker.worker import Worker

_MAX_TEXT = 20_000
"""Characters of a traceback or message that are sent."""
_SEND_TIMEOUT_S = 30.0
_CALL_LIMIT_S = 24 * 3600.0
"""For a call in the worker's thread. The driver gives up long before."""


class Rank:
    """The calls of one rank. Constructing it imports no torch: the rank's devices may be known only
    later, and torch must not be imported before.

    Attributes:
        place: where the process runs; set before `join`.
        inherited: its ends of the sockets for steps and for heartbeats; empty: it connects.
    """

    inherited: Sequence[socket.socket] = ()

    def __init__(self) -> None:
        self.place: RankPlace | None = None
        self._rank = 0
        self._log = LastLines()
        init_logger("tpengine")
        logging.getLogger("tpengine").addHandler(self._log)
        self._heartbeat: Heartbeat | None = None
        self._worker: Worker  # from `create` on
        self._calls: queue.SimpleQueue[tuple[str, Any, Any, queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        self._called = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def locate(
        self, node_id: str, address: str, devices: tuple[str, ...], log_path: str
    ) -> RankPlace:
        """Notes and returns where this process runs; see `RankPlace`."""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.stderr)  # a crash in native code leaves its stack in the log
        pid = os.getpid()
        self.place = RankPlace(
            node_id, address, socket.gethostname(), devices, pid, start_ticks(pid) or 0, log_path
        )
        return self.place

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs `join`, `create` (makes the worker) or a method of the worker.

        Returns:
            Its answer, or a `RankFailure`.
        """
        if method == "join":
            return self._join(*args)
        assert self._heartbeat is not None, f"{method} before join"
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((method, args, kwargs, answer))
        os.eventfd_write(self._called, 1)
        return answer.get(timeout=_CALL_LIMIT_S)

    def _join(
        self, rank: int, epoch: int, invitation: Invitation | None, wait_s: float
    ) -> RankFailure | None:
        """Connects to the driver, by one channel for steps and one for heartbeats; from here on the
        process ends when the driver closes one of them or is silent.

        Args:
            invitation: None: the process has inherited both channels.
            wait_s: for the driver to accept each connection.
        """
        self._rank = rank
        try:
            if invitation is None:
                steps, control = (Channel(sock, epoch) for sock in self.inherited)
            else:
                steps = connect(*invitation, rank, epoch, wait_s, 0)
                control = connect(*invitation, rank, epoch, wait_s, 1)
        except (ChannelError, ConfigError) as error:
            return self._failure(error, "join")
        self._heartbeat = Heartbeat(rank, control, steps, wait_s)
        self._heartbeat.start()
        args = steps, self._heartbeat
        threading.Thread(target=self._serve, args=args, name="tpengine-worker", daemon=True).start()
        return None

    def _serve(self, steps: Channel, heartbeat: Heartbeat) -> None:
        """Runs in the worker's thread until the process ends."""
        poll = select.poll()
        poll.register(steps.fileno(), select.POLLIN)
        poll.register(self._called, select.POLLIN)
        try:
            while True:
                poll.poll()  # the channel's keep-alive ends it when the link is lost
                while (frame := steps.take()) is not None:
                    with heartbeat.during(Doing("execute_model", frame.step)):
                        kind, payload = self._step(frame)
                    steps.send(kind, frame.step, payload, _SEND_TIMEOUT_S)
                self._answer_calls(heartbeat)
        except ChannelError as error:
            end_process(self._rank, DRIVER_GONE, f"the driver is gone: {error}")

    def _answer_calls(self, heartbeat: Heartbeat) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._called)
        while not self._calls.empty():
            method, args, kwargs, answer = self._calls.get()
            with heartbeat.during(Doing(method)):
                answer.put(self._run(method, args, kwargs))

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        try:
            if method == "create":
                self._worker = _import_worker()(args[0], rank=self._rank)
                return None
            return getattr(self._worker, method)(*args, **kwargs)
        except BaseException as error:
            return self._failure(error, method)

    def _step(self, frame: Frame) -> tuple[FrameKind, bytes]:
        try:
            step = decode_step(frame.payload)
            output = self._worker.execute_model(step)
            # The other ranks' samples are the same; their empty answer says that they are done.
            answer = output if self._rank == 0 else StepOutput(step.step, [])
            return FrameKind.OUTPUT, encode(answer)
        except BaseException as error:
            failure = self._failure(error, f"step {frame.step}")
            return FrameKind.FAILURE, encode(dataclasses.astuple(failure))

    def _failure(self, error: BaseException, phase: str) -> RankFailure:
        return RankFailure(
            rank=self._rank,
            place=str(self.place),
            phase=phase,
            type_name=type(error).__name__,
            message=str(error)[:_MAX_TEXT],
            traceback="".join(traceback.format_exception(error))[-_MAX_TEXT:],
            log_lines=list(self._log.lines),
            waited_for=getattr(error, "failed_rank", None),
        )

    @staticmethod
    def import_all(model_impl: str) -> None:
        """Imports all that a rank of such a model needs, for a spare."""
        _import_worker().import_model_code(model_impl)


def _import_worker() -> type[Worker]:
    """Imports the worker, and torch with it."""
    envs.tune_openmp_spinning()
    from tpengine.worker.worker import Worker

    return Worker
