"""The thread that steps an `LLMEngine`. The event loop puts commands into its queue; it calls the
event loop with the events of each step.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from tpengine.async_engine.request_table import Event, LiveRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError, RequestError, RequestFailedError
from tpengine.executor.executor import Executor
from tpengine.executor.launch.chosen_executor import create_executor
from tpengine.logger import init_logger
from tpengine.outputs import RequestOutput
from tpengine.scheduling.sequence import CheckedRequest

logger = init_logger(__name__)

IDLE_S = 0.5
"""An idle engine is stepped this often, because a step notices that a rank was lost."""
_STALL_S = 0.005
_EXIT_S = 10.0
_START_END_S = 30.0

Command = Callable[[LLMEngine], None]


class EngineThread:
    """Builds an engine, steps it while it has requests, and ends it.

    The engine is built on this thread because some libraries keep threads for each calling thread.
    Commands are executed between steps. All outputs of a step go to the event loop in one call: a
    call for each output would take longer than the step's own work.

    Args:
        build: makes the engine.

    Attributes:
        progress_at: moment of `time.monotonic` at which a step was last finished, or there was no
            work.
    """

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        self._build = build
        self._built: Future[LLMEngine] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[list[Event]], None]
        self._on_end: Callable[[], None]
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._entered: dict[str, LiveRequest] = {}
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._pause_s = IDLE_S
        self.progress_at = time.monotonic()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpengine-engine", daemon=True)

    def start(self, timeout_s: float) -> LLMEngine:
        """Starts the thread and waits for its engine.

        Raises:
            EngineError: the engine could not be built, or not in time.
        """
        self._thread.start()
        # The thread is a daemon, so that a process which forgets its engine can end; `atexit` then
        # ends the engine in order.
        atexit.register(self.stop, _EXIT_S)
        try:
            if not wait([self._built], timeout_s).done:
                raise EngineError(
                    f"the engine was not ready within {timeout_s:.0f} s; give it more time, or "
                    "find out from the log what it waits for"
                )
        except BaseException:
            self._stop.set()
            raise
        return self._built.result()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine; None: no error did. An engine that has failed ends its
        ranks before this thread ends."""
        if self._failure is None and self._built.done() and self._built.exception() is None:
            return self._built.result().health().failure
        return self._failure

    @property
    def ended(self) -> bool:
        """Whether there will be no more steps."""
        return self._ended.is_set() or not self._thread.is_alive()

    def bind(
        self,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[list[Event]], None],
        on_end: Callable[[], None],
    ) -> None:
        """From now on calls `receive` on `loop` with the events of each step, and `on_end` after
        the last of them, when the thread ends."""
        self._receive, self._on_end = receive, on_end
        self._loop = loop  # last: the thread looks at it first

    def enter(self, live: LiveRequest, checked: CheckedRequest) -> None:
        """Gives a request to the engine before its next step."""
        self.put(partial(self._do_enter, live, checked))

    def abort(self, live: LiveRequest) -> None:
        """Takes a request from the engine before its next step; the event None says that it
        is out of the engine."""
        self.put(partial(self._do_abort, live))

    def put(self, command: Command) -> None:
        """Executes a command on the engine between two steps. It must not raise."""
        self._commands.put(command)

    def stop(self, timeout_s: float) -> bool:
        """Makes the thread end after its present step, and the engine with it.

        Returns:
            Whether it has ended within that time.
        """
        atexit.unregister(self.stop)
        self._stop.set()
        if self._thread.is_alive():
            self._commands.put(lambda engine: None)  # ends the wait for a command
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Names the thread for `top -H`; threads that libraries start from it inherit the name.
        # From Python 3.14 on `threading` does so.
        with contextlib.suppress(OSError):
            comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
            comm.write_text(self._thread.name)
        try:
            engine = self._build()
        except BaseException as error:
            self._built.set_exception(error)
            return
        self._built.set_result(engine)
        try:
            while not self._stop.is_set():
                self._turn(engine)
        except BaseException as error:
            logger.exception("the engine has failed; every request that it had fails with it")
            self._failure = error
        finally:
            self._ended.set()
            if self._loop is not None:
                self._call_in_loop(self._on_end)
            engine.shutdown()

    def _turn(self, engine: LLMEngine) -> None:
        """Executes the commands, then a step."""
        for command in self._take_commands(self._pause_s):
            command(engine)
        if self._stop.is_set():
            return
        before = engine.last_step
        outputs = engine.step()
        advanced = bool(outputs) or engine.last_step is not before
        now = time.monotonic()
        has_work = engine.has_unfinished_requests()
        if advanced or not has_work:
            self.progress_at = now
        if has_work:
            # An engine that cannot advance, for example during a recovery, is not stepped in a
            # busy loop.
            self._pause_s = 0.0 if advanced else _STALL_S
        else:
            self._pause_s = IDLE_S
        if outputs:
            self._call_in_loop(self._receive, self._make_events(outputs))
            engine.counters.step_seconds["hand_over"] += time.monotonic() - now

    def _take_commands(self, pause_s: float) -> list[Command]:
        """Returns the commands that have come; waits for the first one, for `pause_s` at most."""
        commands = []
        if pause_s:
            with contextlib.suppress(queue.Empty):
                commands.append(self._commands.get(timeout=pause_s))
        # Commands that come from now on are executed after the next step.
        return commands + [self._commands.get_nowait() for _ in range(self._commands.qsize())]

    def _do_enter(self, live: LiveRequest, checked: CheckedRequest, engine: LLMEngine) -> None:
        if live.outcome is not None:  # it finished before this command was executed
            return
        try:
            live.metrics = engine.add_checked(live.request_id, checked, live.arrival_time)
        except EngineError:
            raise
        except Exception as error:  # one request must not end the others
            if not isinstance(error, RequestError):
                logger.exception("request %r could not be added", live.request_id)
                error = RequestFailedError(f"request {live.request_id!r} failed: {error!r}")
            self._call_in_loop(self._receive, [(live, error)])
            return
        self._entered[live.request_id] = live

    def _do_abort(self, live: LiveRequest, engine: LLMEngine) -> None:
        # Compared by identity: another request may have the same id by now.
        events: list[Event] = [(live, None)]
        if self._entered.get(live.request_id) is live:
            engine.abort_request(live.request_id)
            last = engine.discard_outputs([live.request_id])
            events = [*((live, output) for output in last), *events]
            del self._entered[live.request_id]
        self._call_in_loop(self._receive, events)

    def _make_events(self, outputs: list[RequestOutput]) -> list[Event]:
        events: list[Event] = []
        for output in outputs:
            live = self._entered.get(output.request_id)
            if live is not None:
                events.append((live, output))
                if output.finished:
                    del self._entered[live.request_id]
        return events

    def _call_in_loop(self, callback: Callable[..., None], *args: object) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed, and every reader with it
            for live in tuple(self._entered.values()):
                self._commands.put(partial(self._do_abort, live))
            if self._loop is loop:  # no other loop was bound in the meantime
                self._loop = None


class EngineStart:
    """One start of an `LLMEngine`, which another thread may cancel. A caller that stops waiting for
    `build` has no engine yet to end, but its ranks may run as processes on many machines."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._is_cancelled = threading.Event()
        self._has_ended = threading.Event()
        self._executor: Executor | None = None

    def build(self) -> LLMEngine:
        """Builds the engine.

        Raises:
            EngineError: an argument, the model or the memory does not allow it, see the message; or
                the start was cancelled.
        """
        config, executor = create_executor(self._args)
        self._executor = executor
        if self._is_cancelled.is_set():
            executor.shutdown()
            raise EngineError("the start of the engine was cancelled")
        try:
            return LLMEngine(config, executor, log_stats=not self._args.disable_log_stats)
        except BaseException:
            # The system kills a Ray that this thread has started when this thread ends. Ray would
            # then leave processes behind that an orderly shutdown ends.
            if self._is_cancelled.is_set():
                self._has_ended.wait(_START_END_S)
            raise

    def cancel(self) -> None:
        """Ends the ranks at any point of their start, also those of an engine that was built and
        hangs; `build` fails soon after. Blocks until the ranks have ended."""
        self._is_cancelled.set()
        try:
            if self._executor is not None:
                self._executor.shutdown()
        finally:
            self._has_ended.set()
