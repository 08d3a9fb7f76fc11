"""The actor of one rank: Ray starts it and calls it for what is rare; steps come by the channel."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import select
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import ray

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.executor.channel import Channel, ChannelError, Frame, FrameKind
from tpengine.executor.codec import decode_step, encode
from tpengine.executor.failures import LastLines, RankFailure
from tpengine.executor.handshake import connect
from tpengine.executor.heartbeat import DRIVER_GONE, BeatThread, Progress, end_process
from tpengine.executor.launch.placement import RankPlace
from tpengine.executor.processes import own_error_log
from tpengine.host import start_ticks
from tpengine.logger import init_logger
from tpengine.messages import StepOutput

if TYPE_CHECKING:
    from tpengine.worker.worker import Worker

_SEND_TIMEOUT_S = 30.0
_CALL_LIMIT_S = 24 * 3600.0
"""Of a call in the worker's thread; the driver gives up long before."""
Address = tuple[str, int]


class RayWorker:
    """One rank. Constructing it imports nothing heavy: only then does Ray say which devices it
    gets, and only the driver then knows which rank it is.

    All of the worker's code runs in one thread of its own, whoever asks for it, since devices and
    thread pools belong to threads; the actor's thread stays free to answer.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._changed_variables = envs.adopt(environment)
        self._log = LastLines()
        init_logger("tpengine")
        logging.getLogger("tpengine").addHandler(self._log)
        self._thread: WorkerThread | None = None
        self._place: RankPlace | None = None

    def prepare(self) -> RankPlace:
        """Imports all that a rank needs, for a spare; returns where it is."""
        place, _ = self.describe()
        _import_worker()
        return place

    def describe(self, devices: tuple[str, ...] | None = None) -> tuple[RankPlace, list[str]]:
        """Where this actor is, and which variables of the driver's were different here.

        Args:
            devices: for a spare that becomes a rank: the GPUs that Ray gave the rank before it;
                None: those that Ray gave this actor.
        """
        context = ray.get_runtime_context()
        if devices is None:
            accelerators = context.get_accelerator_ids().values()
            devices = tuple(str(device) for ids in accelerators for device in ids)
        elif devices:
            envs.set_visible_gpus(devices)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.stderr)  # a crash in native code leaves its stack in the log
        self._place = RankPlace(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            host_name=socket.gethostname(),
            devices=devices,
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            log_path=own_error_log(),
        )
        return self._place, self._changed_variables

    def join(
        self,
        rank: int,
        epoch: int,
        addresses: tuple[Address, Address],
        secret: bytes,
        wait_s: float,
    ) -> RankFailure | None:
        """Learns its rank and connects to the driver; returns what prevented it.

        From here on the process ends when the driver's end of a channel closes, or is silent.

        Args:
            addresses: where the driver listens for the channels of steps and of beats.
            wait_s: for the driver to take each connection.
        """
        try:
            steps = connect(addresses[0], secret, rank, epoch, wait_s)
            control = connect(addresses[1], secret, rank, epoch, wait_s)
        except ChannelError as error:
            return RankFailure.of(error, rank, str(self._place), "join", self._log.lines)
        progress = Progress()
        BeatThread(rank, control, steps, progress, wait_s).start()
        self._thread = WorkerThread(steps, rank, str(self._place), self._log, progress)
        self._thread.start()
        return None

    def create(self, config: EngineConfig) -> RankFailure | None:
        """Makes the worker, which imports torch; returns what prevented it."""
        assert self._thread is not None, "create before join"
        answer: RankFailure | None = self._thread.call("create", (config,), {})
        return answer

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the worker; returns its answer or a `RankFailure`."""
        assert self._thread is not None, "call before join"
        return self._thread.call(method, args, kwargs)

    def loaded_modules(self) -> list[str]:
        """Top-level packages that this process has imported, for tests and reports."""
        return sorted({name.partition(".")[0] for name in list(sys.modules)})


class WorkerThread(threading.Thread):
    """Runs the worker: steps from the channel, and calls from the actor's thread between them."""

    def __init__(
        self, channel: Channel, rank: int, place: str, log: LastLines, progress: Progress
    ) -> None:
        super().__init__(name="tpengine-worker", daemon=True)
        self._progress = progress
        self._channel = channel
        self._rank = rank
        self._place = place
        self._log = log
        self._worker: Worker | None = None
        self._calls: queue.SimpleQueue[tuple[str, Any, Any, queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Has the thread call a method of the worker; the answer or a `RankFailure`."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((method, args, kwargs, answer))
        os.eventfd_write(self._wake, 1)
        return answer.get(timeout=_CALL_LIMIT_S)

    def run(self) -> None:
        """Until the process ends."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while True:
                poll.poll()  # ends with the channel, whose keep-alive finds a lost link
                while (frame := self._channel.take()) is not None:
                    self._step(frame)
                self._answer_calls()
        except ChannelError as error:
            end_process(self._rank, DRIVER_GONE, f"the driver is gone: {error}")

    def _answer_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._calls.empty():
            method, args, kwargs, answer = self._calls.get()
            self._progress.begin(method)
            try:
                result = self._run(method, args, kwargs)
            except BaseException as error:
                result = self._failure(error, method)
            self._progress.end()
            answer.put(result)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method == "create":
            self._create(*args)
            return None
        assert self._worker is not None, "the worker was not created"
        return getattr(self._worker, method)(*args, **kwargs)

    def _create(self, config: EngineConfig) -> None:
        self._worker = _import_worker()(config, rank=self._rank)

    def _step(self, frame: Frame) -> None:
        kind, payload = FrameKind.OUTPUT, b""
        self._progress.begin("execute_model", frame.step)
        try:
            step = decode_step(frame.payload)
            assert self._worker is not None, "a step before the worker was created"
            output = self._worker.execute_model(step)
            # The other ranks' samples are the same: their answer is that they got there.
            payload = encode(output if self._rank == 0 else StepOutput(step.step, []))
        except BaseException as error:
            kind = FrameKind.FAILURE
            payload = encode(self._failure(error, f"step {frame.step}").to_fields())
        self._progress.end()
        self._channel.send(kind, frame.step, payload, _SEND_TIMEOUT_S)

    def _failure(self, error: BaseException, phase: str) -> RankFailure:
        return RankFailure.of(error, self._rank, self._place, phase, self._log.lines)


def _import_worker() -> type[Worker]:
    """Imports torch, too."""
    envs.tune_openmp_spinning()
    from tpengine.worker.worker import Worker

    return Worker
