"""The thread that steps an `LLMEngine`, and the two queues between it and the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tpengine.async_engine.admission import Admission
from tpengine.async_engine.ticket import Ticket
from tpengine.engine.checked_request import CheckedRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.errors import EngineError, RequestError, RequestFailedError
from tpengine.logger import init_logger
from tpengine.outputs import RequestOutput

logger = init_logger(__name__)

IDLE_S = 0.5
"""An idle engine is still called this often: it may find that a rank has gone."""
_STALL_S = 0.005
_POLL_S = 0.5
_EXIT_S = 10.0

Command = Callable[[LLMEngine], None]
Event = tuple[Ticket, RequestOutput | Exception | None]
"""What became of a request: an output, an error; None: the engine holds nothing of it any more."""


class EngineThread:
    """Builds an engine, steps it while there is anything to do, and ends it.

    The engine is built here too, since some libraries keep their threads by thread that called.
    Requests come in and outputs go out between steps, all of a step in one call into the event
    loop: a call for each would cost the step more than its own work.

    Args:
        build: makes the engine.
        admission: told of those that start.
        receive: called on the event loop when there are events to take, or the thread has ended.

    Attributes:
        progress_at: seconds of `time.monotonic` when a step was last finished, or none was due.
        failure: what ended the thread; None while it runs, and if it was told to end.
    """

    def __init__(
        self, build: Callable[[], LLMEngine], admission: Admission, receive: Callable[[], None]
    ) -> None:
        self._build = build
        self._admission = admission
        self._receive = receive
        self._engine: LLMEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._events: deque[list[Event]] = deque()
        self._live: dict[str, Ticket] = {}
        self._queued: dict[Ticket, None] = {}
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._patience_s = 0.0
        self.progress_at = time.monotonic()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpengine-engine", daemon=True)

    def start(self, timeout_s: float) -> LLMEngine:
        """Starts the thread and waits for its engine.

        Raises:
            EngineError: the engine could not be built, or not in time.
        """
        self._thread.start()
        # A daemon, so that a forgotten engine does not keep the process; ended in order even so.
        atexit.register(self.stop, _EXIT_S)
        end = time.monotonic() + timeout_s
        try:
            while not self._ready.wait(_POLL_S):
                if time.monotonic() > end:
                    raise EngineError(
                        f"the engine was not ready within {timeout_s:.0f} s; give it more time, "
                        "or find out from the log what it waits for"
                    )
        except BaseException:
            self._stop.set()
            raise
        if self._engine is None:
            raise self.failure or EngineError("the engine could not be built")
        return self._engine

    @property
    def ended(self) -> bool:
        """Whether there will be no more steps."""
        return self._ended.is_set() or not self._thread.is_alive()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Names the loop on which `receive` is called from now on."""
        self._loop = loop

    def enter(self, ticket: Ticket, checked: CheckedRequest) -> None:
        """Gives a request to the engine before its next step."""
        self._post(partial(self._do_enter, ticket, checked))

    def end(self, ticket: Ticket) -> None:
        """Takes a request from the engine before its next step; an event says when that is done."""
        self._post(partial(self._do_end, ticket))

    def take_events(self) -> list[Event]:
        """All that happened since the last call, in order."""
        events: list[Event] = []
        while self._events:
            events += self._events.popleft()
        return events

    def stop(self, timeout_s: float) -> bool:
        """Lets the thread end after the step that it is in, and the engine with it.

        Returns:
            Whether it has ended within that time.
        """
        atexit.unregister(self.stop)
        self._stop.set()
        with self._wake:
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        _show_name(self._thread.name)
        try:
            self._engine = engine = self._build()
        except BaseException as error:
            self.failure = error
            self._ended.set()
            self._ready.set()
            return
        # What the libraries made while they were loaded stays; to look through it for garbage, as
        # Python does now and then, would stop every thread for as long as several steps.
        gc.freeze()
        self._ready.set()
        try:
            while not self._stop.is_set():
                self._turn(engine)
        except BaseException as error:
            logger.exception("the engine has failed; every request that it had fails with it")
            self.failure = error
        finally:
            self._ended.set()
            self._hand_over([])
            engine.shutdown()
            gc.unfreeze()

    def _turn(self, engine: LLMEngine) -> None:
        """Does what was asked for, then a step."""
        patience_s = self._patience_s if engine.has_unfinished_requests() else IDLE_S
        for command in self._take_commands(patience_s):
            command(engine)
        if self._stop.is_set():
            return
        before = engine.last_step
        outputs = engine.step()
        advanced = bool(outputs) or engine.last_step is not before
        now = time.monotonic()
        if advanced or not engine.has_unfinished_requests():
            self.progress_at = now
        # An engine that cannot go on for a moment must not be asked without a pause.
        self._patience_s = 0.0 if advanced else _STALL_S
        self._note_starts()
        if outputs:
            self._hand_over([event for output in outputs if (event := self._event(output))])
            engine.figures.step_seconds["hand_over"] += time.monotonic() - now

    def _take_commands(self, patience_s: float) -> list[Command]:
        if not self._commands:
            if not patience_s:
                return []
            with self._wake:
                if not self._commands and not self._stop.is_set():
                    self._wake.wait(patience_s)
        # Those that come from now on are done after the next step.
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def _do_enter(self, ticket: Ticket, checked: CheckedRequest, engine: LLMEngine) -> None:
        if ticket.outcome is not None:  # ended while this was on its way
            return
        try:
            ticket.metrics = engine.add_checked(ticket.request_id, checked, ticket.arrival_time)
        except RequestError as error:
            self._hand_over([(ticket, error)])
            return
        except EngineError:
            raise
        except Exception as error:  # one request must not end the others
            logger.exception("request %r could not be added", ticket.request_id)
            failed = RequestFailedError(f"request {ticket.request_id!r} failed: {error!r}")
            self._hand_over([(ticket, failed)])
            return
        self._live[ticket.request_id] = ticket
        self._queued[ticket] = None

    def _do_end(self, ticket: Ticket, engine: LLMEngine) -> None:
        # By identity: the id may be another request's by now.
        if self._live.get(ticket.request_id) is ticket:
            engine.abort_request(ticket.request_id)
            engine.discard_outputs([ticket.request_id])
            self._forget(ticket)
        self._hand_over([(ticket, None)])

    def _event(self, output: RequestOutput) -> Event | None:
        ticket = self._live.get(output.request_id)
        if ticket is None:
            return None
        if output.finished:
            self._forget(ticket)
        return ticket, output

    def _forget(self, ticket: Ticket) -> None:
        del self._live[ticket.request_id]
        self._queued.pop(ticket, None)

    def _note_starts(self) -> None:
        for ticket in tuple(self._queued):
            if ticket.metrics is not None and ticket.metrics.first_scheduled_time is not None:
                del self._queued[ticket]
                self._admission.start(ticket)

    def _hand_over(self, events: list[Event]) -> None:
        self._events.append(events)
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._receive)
        except RuntimeError:  # the loop was closed: all who would read are gone
            self._events.clear()
            for ticket in tuple(self._live.values()):
                self._post(partial(self._do_end, ticket))
            if self._loop is loop:  # and no other was bound meanwhile
                self._loop = None


def _show_name(name: str) -> None:
    """Tells the system the name of this thread, for `top -H` and whoever wants to know what the
    engine costs; threads that libraries start for it inherit the name. Python does so since 3.14.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
