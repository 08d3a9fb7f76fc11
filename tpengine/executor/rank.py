"""One rank in its own process, whatever launcher started it: it answers the driver's frames.

All of the worker's code runs in one thread, since devices and thread pools belong to threads. That
thread takes steps and calls from the channel, one after another, while another one sends
heartbeats. Where a token goes from here: head of `server/grpc/service.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.errors import error_number, is_shortage
from tpengine.executor.channel import Channel, ChannelError, Frame, FrameKind
from tpengine.executor.codec import decode_call, decode_step, encode, encode_call
from tpengine.executor.diagnosis import (
    DRIVER_GONE,
    Doing,
    KeptMemory,
    LastLines,
    RankFailure,
    RankPlace,
)
from tpengine.executor.held_files import AgentFiles
from tpengine.executor.watch import Heartbeat, end_process
from tpengine.logger import init_logger
from tpengine.messages import StepOutput

if TYPE_CHECKING:
    from tpengine.worker.gpu_memory import GpuSections
    from tpengine.worker.worker import Worker

logger = init_logger(__name__)

_MAX_TEXT = 20_000
"""Characters of a traceback or message that are sent."""
_SEND_TIMEOUT_S = 30.0
_NEXT_STEP_MS = 2.0
"""How long a GPU's rank that has begun a step listens for the next one, before it waits for the
device alone. Not measured on a GPU."""
_Answer = tuple[FrameKind, int, bytes]
"""Kind, number and payload of a frame."""


class Rank:
    """The calls of one rank. Constructing it imports no torch: the rank's devices may be known only
    later, and torch must not be imported before.

    Attributes:
        place: where the process runs; None: not known yet.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(sys.stderr)  # a crash in native code leaves its stack in the log
        self.place: RankPlace | None = None
        self._rank = 0
        self._samples = False
        self._begun: deque[int] = deque()  # steps without an answer
        self._has_failed = False  # in a step; none runs after it until the ranks connect again
        self._waited_s = self._idle_since = 0.0
        self._log = LastLines()
        init_logger("tpengine").addHandler(self._log)
        self._heartbeat: Heartbeat  # from `serve` on
        self._worker: Worker  # from `create` on

    def serve(self, steps: Channel, control: Channel) -> None:
        """Answers the driver's frames until the process ends; from `join` on it also ends when the
        driver closes one of the channels or is silent.

        Args:
            steps: for steps and calls.
            control: for heartbeats.
        """
        self._heartbeat = Heartbeat(control, steps)
        poll = select.poll()
        poll.register(steps.fileno(), select.POLLIN)
        try:
            while True:
                # Without a bound: the channel's keep-alive ends it when the link is lost.
                ready = poll.poll(_NEXT_STEP_MS if self._begun else None)
                while (frame := steps.take()) is not None:
                    for answer in self._serve_frame(frame):
                        steps.send(*answer, _SEND_TIMEOUT_S)
                for answer in () if ready else self._finish_steps():
                    steps.send(*answer, _SEND_TIMEOUT_S)
        except ChannelError as error:
            end_process(self._rank, DRIVER_GONE, f"the driver is gone: {error}")

    def _serve_frame(self, frame: Frame) -> list[_Answer]:
        """Runs a step or a call; returns the answers that are there now, which may be those of
        earlier steps."""
        if frame.kind is FrameKind.STEP:
            if self._has_failed:
                return []
            self._waited_s = time.perf_counter() - self._idle_since
            self._begun.append(frame.number)
            return self._answer_steps(partial(self._execute, frame.payload))
        earlier = self._finish_steps()
        phase = "a call"
        try:
            phase, args, kwargs = decode_call(frame.payload)
            if phase == "connect":
                self._has_failed = False
            with self._heartbeat.during(Doing(phase)):
                target = self if phase in ("join", "create") else self._worker
                payload = encode_call(getattr(target, phase)(*args, **kwargs))
        except BaseException as error:
            return [*earlier, self._failed(error, phase, frame.number)]
        return [*earlier, (FrameKind.ANSWER, frame.number, payload)]

    def _execute(self, payload: bytes) -> list[StepOutput]:
        return self._worker.execute_model(decode_step(payload))

    def _finish_steps(self) -> list[_Answer]:
        """Waits for the step that a GPU still computes, as no other one has come."""
        return self._answer_steps(self._worker.finish_steps) if self._begun else []

    def _answer_steps(self, run: Callable[[], list[StepOutput]]) -> list[_Answer]:
        number = self._begun[0]
        try:
            with self._heartbeat.during(Doing("execute_model", number)):
                outputs = run()
        except BaseException as error:  # after which no step is answered
            self._begun.clear()
            self._has_failed = True
            return [self._failed(error, f"step {number}", number)]
        self._idle_since = time.perf_counter()
        answers = []
        for output in outputs:
            self._begun.popleft()
            output.waited_s = self._waited_s
            # The other ranks' samples are the same; their empty answer says that they are done.
            errors = output.load_results
            answer = output if self._samples else StepOutput(output.step, [], load_results=errors)
            answers.append((FrameKind.ANSWER, output.step, encode(answer)))
        return answers

    def _failed(self, error: BaseException, phase: str, number: int) -> _Answer:
        failure = self.failure(error, phase)
        return FrameKind.FAILURE, number, encode(dataclasses.astuple(failure))

    def join(self, rank: int, place: RankPlace) -> None:
        """Makes this process a rank, which sends heartbeats from now on.

        Args:
            place: the rank takes the GPUs that it names; none: the same as the driver, or those
                that Ray gave it.
        """
        self._rank = self._heartbeat.rank = rank
        self.place = place
        if place.devices:
            envs.set_visible_gpus(place.devices)
        self._heartbeat.start()

    def create(self, config: EngineConfig, kept: KeptMemory | None) -> bool:
        """Makes the worker, which imports torch; returns whether what it holds outlives it.

        Args:
            kept: None: nothing outlives the process.
        """
        file = None if kept is None else _open_memory(kept)
        worker_type = _import_worker()
        gc.freeze()  # to look through all imports takes 0.1 s of a recovery under Ray
        memory = None
        if kept is not None and file is not None:
            from tpengine.worker.rank_memory import RankMemory

            owner = kept.engine_id, kept.epoch
            gpu = _gpu_sections(kept) if config.device == "cuda" else None
            memory = RankMemory(file, config, self._rank, *owner, gpu)
        self._worker = worker_type(config, None, self._rank, memory)
        self._samples = self._rank == config.parallel.sampling_rank
        return memory is not None

    def failure(self, error: BaseException, phase: str) -> RankFailure:
        """An exception of this rank, as data.

        Args:
            phase: the method that failed.
        """
        return RankFailure(
            rank=self._rank,
            place=str(self.place),
            phase=phase,
            type_name=type(error).__name__,
            message=str(error)[:_MAX_TEXT],
            traceback="".join(traceback.format_exception(error))[-_MAX_TEXT:],
            log_lines=list(self._log.lines),
            waited_for=getattr(error, "failed_rank", None),
            shortage=error_number(error) if is_shortage(error) else None,
        )


def _open_memory(kept: KeptMemory) -> int | None:
    """Opens a file that the node's agent holds; returns a descriptor, or None if this process does
    not see it, as in another container, where the path may lead to any file."""
    try:
        file = os.open(kept.path, os.O_RDWR | os.O_CLOEXEC)
        if os.readlink(f"/proc/self/fd/{file}") == kept.target:
            return file
        os.close(file)
        reason = "another process has its number"
    except OSError as error:
        reason = str(error)
    logger.warning("what this rank holds ends with it: its node's agent is not seen: %s", reason)
    return None


def _gpu_sections(kept: KeptMemory) -> GpuSections:
    from tpengine.worker.gpu_memory import GpuSections

    logger.warning("what this rank has on its GPU is kept for a loss: no card has run this yet")
    return GpuSections(AgentFiles(kept.target))


def import_all(model_code: Sequence[Any]) -> None:
    """Imports all that a rank of a model with such code needs, for a spare or a template."""
    import numpy.ma  # noqa: F401 (`numpy.unique` imports it at its first call: half a second)

    _import_worker()
    from tpengine.worker.spare_imports import import_model_code

    import_model_code(*model_code)


def _import_worker() -> type[Worker]:
    """Imports the worker, and torch with it."""
    envs.tune_openmp_spinning()
    from tpengine.worker.worker import Worker

    return Worker
