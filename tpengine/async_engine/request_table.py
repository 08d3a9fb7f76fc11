"""Who is being served: the event loop's side of the engine's thread.

All of it runs on the event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.async_engine.engine_thread import EngineThread
from tpengine.async_engine.generate_request import GenerateRequest
from tpengine.async_engine.mailbox import Mailbox
from tpengine.async_engine.ticket import Ticket
from tpengine.engine.checked_request import CheckedRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    RequestAbortedError,
    RequestFailedError,
    RequestIgnoredError,
)
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import RequestOutputKind

RELEASE_S = 60.0
_WATCH_S = 1.0


class Intake(enum.Enum):
    """Whether new requests are taken."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class RequestBook:
    """The live requests of one engine, by id, each with its mailbox and deadlines.

    Attributes:
        engine: built on the thread, to which it belongs.
        refused: requests that were not taken, by the reason.
    """

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        limits: QueueLimits,
        start_timeout_s: float,
        log_requests: bool,
    ) -> None:
        self._log_requests = log_requests
        self.admission = Admission(limits)
        self.intake = Intake.OPEN
        self.refused: Counter[str] = Counter()
        self.tickets: dict[str, Ticket] = {}
        self.thread = EngineThread(build, self.admission, self._receive)
        self.engine = self.thread.start(start_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._releases: set[asyncio.Future[None]] = set()
        self._emptied: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    def open(self, request: GenerateRequest) -> Ticket:
        """Takes a request in, with a place in the queue; from now on its time runs.

        Raises:
            EngineDrainingError, EngineDeadError: the engine takes no requests.
            DuplicateRequestError, QueueFullError, DeadlineExceededError: it cannot be taken.
        """
        self._bind()
        self.check_open()
        request_id = uuid4().hex if request.request_id is None else request.request_id
        if request_id in self.tickets:
            raise DuplicateRequestError(
                f"request id {request_id!r} belongs to an unfinished request; choose another"
            )
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        ticket = Ticket(request_id, Mailbox(is_delta), request.owner)
        self.admission.enter(ticket)
        self.tickets[request_id] = ticket
        self._set_timers(ticket, request)
        return ticket

    def enter(self, ticket: Ticket, checked: CheckedRequest) -> None:
        """Gives it to the engine, if it may still be served.

        Raises:
            QueueFullError: too many prompt tokens wait.
            Exception: what ended it meanwhile.
        """
        if ticket.mailbox.error is not None:
            raise ticket.mailbox.error
        self.check_open()
        ticket.num_prompt_tokens = len(checked.prompt_token_ids)
        self.admission.charge(ticket, ticket.num_prompt_tokens)
        self.thread.enter(ticket, checked)

    def end(self, ticket: Ticket, outcome: str, error: Exception | None = None) -> None:
        """Ends a request from outside, wherever it stands; nothing happens if it has ended.

        Args:
            error: what its reader gets.
        """
        if self._close(ticket, outcome):
            if error is not None:
                ticket.mailbox.fail(error)
            self.thread.end(ticket)

    async def release(self, ticket: Ticket, outcome: str, error: Exception) -> None:
        """Ends a request, and waits until the engine holds nothing of it; a minute at most."""
        self._begin_release(ticket, outcome, error)
        if ticket.release is not None:
            await asyncio.wait({ticket.release}, timeout=RELEASE_S)

    async def cut_off(self, why: str, timeout_s: float) -> int:
        """Ends all requests that are left, and waits until the engine holds nothing of them, or
        that time is over. Returns how many they were.

        Args:
            why: what their readers are told.
        """
        self._receive()  # those whose end is on its way have finished
        late = tuple(self.tickets.values())
        # All in one turn of the loop: of outputs that came between taking what is unread and the
        # end, the reader would get some, and not those before.
        for ticket in late:
            error = RequestAbortedError(why, ticket.mailbox.take_unread())
            self._begin_release(ticket, "cut off", error)
        releases = {ticket.release for ticket in late if ticket.release is not None}
        if releases:
            await asyncio.wait(releases, timeout=timeout_s)
        return len(late)

    def _begin_release(self, ticket: Ticket, outcome: str, error: Exception) -> None:
        """Ends a request such that its `release` is done when the engine holds nothing of it. One
        that has ended already is left as it is: the engine may have had its last word on it."""
        if ticket.outcome is not None:
            return
        ticket.release = asyncio.get_running_loop().create_future()
        self._releases.add(ticket.release)
        ticket.release.add_done_callback(self._releases.discard)
        self.end(ticket, outcome, error)

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when no request is left, or that time is over."""
        if self.tickets and timeout_s > 0:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=timeout_s)

    def check_open(self) -> None:
        """Makes sure that requests are taken.

        Raises:
            EngineDrainingError, EngineDeadError: they are not.
        """
        if self.thread.ended or self.intake is Intake.CLOSED:
            raise self._death()
        if self.intake is Intake.DRAINING:
            raise EngineDrainingError(
                "the engine is draining: it finishes what it has, and takes no new requests; ask "
                "another one"
            )

    def close(self) -> None:
        """Takes no more requests, and fails those that are left."""
        self.intake = Intake.CLOSED
        self._fail_all()
        if self._watch is not None:
            self._watch.cancel()

    def _bind(self) -> None:
        """Takes the running loop as its own.

        Raises:
            EngineError: another one still has requests here.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self.tickets:
            raise EngineError(
                "requests of another event loop are being served; an engine belongs to one loop at "
                "a time: give each its own"
            )
        for ticket in tuple(self.tickets.values()):  # of a loop that was closed: without readers
            self.end(ticket, "left by its reader")
        self._loop, self._watch = loop, None
        self.thread.bind(loop)

    def _set_timers(self, ticket: Ticket, request: GenerateRequest) -> None:
        loop = asyncio.get_running_loop()
        if request.deadline is not None:
            left_s = request.deadline - time.monotonic()
            timer = loop.call_later(max(0.0, left_s), partial(self._expire, ticket))
            ticket.timers.append(timer)
            if left_s <= 0:
                self._expire(ticket)
        if request.max_queue_s is not None:
            expire = partial(self._expire_queued, ticket, request.max_queue_s)
            ticket.timers.append(loop.call_later(request.max_queue_s, expire))
        if self._watch is None:
            self._watch = loop.call_later(_WATCH_S, self._look)

    def _expire(self, ticket: Ticket) -> None:
        where = ticket.phase
        error = DeadlineExceededError(
            f"request {ticket.request_id!r} was not done by its deadline, "
            f"{time.time() - ticket.arrival_time:.3f} s after it came; it was in {where!r}",
            where,
        )
        self.end(ticket, f"deadline exceeded ({where})", error)

    def _expire_queued(self, ticket: Ticket, max_queue_s: float) -> None:
        if ticket.phase == "queued":
            error = DeadlineExceededError(
                f"request {ticket.request_id!r} waited {max_queue_s:.3f} s without being started, "
                "as long as it was willing to",
                "queued",
            )
            self.end(ticket, "deadline exceeded (queued)", error)

    def _receive(self) -> None:
        """Takes what the engine's thread has brought."""
        for ticket, what in self.thread.take_events():
            if isinstance(what, RequestOutput):
                self._deliver(ticket, what)
            elif what is not None:
                if self._close(ticket, "refused"):
                    self.refused[type(what).__name__] += 1
                    ticket.mailbox.fail(what)
            elif ticket.release is not None and not ticket.release.done():
                ticket.release.set_result(None)
        if self.thread.ended:
            self._fail_all()

    def _deliver(self, ticket: Ticket, output: RequestOutput) -> None:
        mailbox = ticket.mailbox
        if not output.finished:
            mailbox.put(output)
            return
        reasons = [completion.finish_reason for completion in output.outputs]
        for reason, error_type in _FAULTS.items():
            if reason in reasons:
                if self._close(ticket, reason):
                    mailbox.fail(error_type(output.error or f"the request ended with {reason!r}"))
                return
        mailbox.put(output)
        self._close(ticket, str(reasons[0]))

    def _close(self, ticket: Ticket, outcome: str) -> bool:
        """Notes how a request ended; False if that is known already."""
        if ticket.outcome is not None:
            return False
        ticket.outcome = outcome
        ticket.cancel_timers()
        self.admission.leave(ticket)
        del self.tickets[ticket.request_id]
        if self._log_requests:
            ticket.log_end()
        if not self.tickets and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        return True

    def _fail_all(self) -> None:
        """The engine is gone: every reader gets an error of its own, once."""
        for ticket in tuple(self.tickets.values()):
            if self._close(ticket, "engine dead"):
                ticket.mailbox.fail(self._death())
        for release in tuple(self._releases):
            if not release.done():
                release.set_result(None)

    def _death(self) -> EngineDeadError:
        failure = self.thread.failure
        if failure is None:
            return EngineDeadError("the engine was shut down; make a new one")
        error = EngineDeadError(
            f"the engine has failed ({type(failure).__name__}: {failure}), and cannot go on; make "
            "a new one"
        )
        error.__cause__ = failure
        return error

    def _look(self) -> None:
        """Bounds every wait for an output: should the thread be gone, nobody else would say so."""
        self._receive()
        self._watch = None
        if self.tickets or self._releases:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)


_FAULTS: dict[str, type[RequestIgnoredError] | type[RequestFailedError]] = {
    "ignored": RequestIgnoredError,
    "error": RequestFailedError,
}
