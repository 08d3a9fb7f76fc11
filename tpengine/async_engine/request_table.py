"""The one table of live requests: who reads each of them, its deadlines, and how it finishes.

All of it runs on the event loop, so nothing is locked. The engine's thread holds the same
`LiveRequest` objects; the class says which fields that thread writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from tpengine import errors
from tpengine.async_engine.admission import Admission
from tpengine.async_engine.mailbox import Mailbox
from tpengine.engine.requests import GenerateRequest, check_request_id
from tpengine.inputs import NO_OWNER, Owner
from tpengine.logger import init_logger
from tpengine.outputs import RequestMetrics, RequestOutput
from tpengine.sampling_params import RequestOutputKind
from tpengine.scheduling.sequence import CheckedRequest

logger = init_logger(__name__)

_ABORTED = "aborted"
_MAX_PICTURE_BYTES = 4 << 30
"""Of the pixels of all live requests: a file of some kilobytes may have 50 MB of them."""


def unique_id(name: str) -> str:
    """Returns an id for a request to which its client gives a name that other requests may have
    too; see `RequestTable.named`. An id that a client chooses has no space."""
    return f"{name} {uuid4().hex[:12]}"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its first check until its outcome is known.

    Attributes:
        owner: the client that sent it.
        arrival_time: seconds of `time.time`.
        metrics: the engine's thread sets and fills them; None until it has the request.
        num_prompt_tokens: 0 until they have been counted.
        num_picture_bytes: of the pixels of its pictures, as well.
        outcome: how it finished, for the log; None while it lives.
        timers: its deadlines.
        ends_as_output: True: an abort, or a prompt that is too long, gives the reader a last
            output. False: it gives an error.
    """

    request_id: str
    mailbox: Mailbox
    owner: Owner = NO_OWNER
    arrival_time: float = field(default_factory=time.time)
    metrics: RequestMetrics | None = None
    num_prompt_tokens: int = 0
    num_picture_bytes: int = 0
    outcome: str | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    ends_as_output: bool = False

    @property
    def started_at(self) -> float | None:
        """Seconds of `time.time` at which its first step was scheduled; None before that."""
        return None if self.metrics is None else self.metrics.first_scheduled_time

    @property
    def phase(self) -> str:
        """How far it has come: queued, prefill or decode."""
        if self.metrics is None or self.metrics.first_scheduled_time is None:
            return "queued"
        return "prefill" if self.metrics.first_token_time is None else "decode"

    def log_finish(self) -> None:
        """Logs its one line, without the prompt, which may be confidential."""
        if not logger.isEnabledFor(logging.INFO):
            return
        metrics = self.metrics or RequestMetrics.of_arrival(self.arrival_time)
        logger.info(
            "request %r: %s after %.3f s; queue %s, first token %s; prompt tokens %d (%d cached), "
            "output tokens %d, preemptions %d",
            self.request_id,
            self.outcome,
            time.time() - self.arrival_time,
            self._age(metrics.first_scheduled_time),
            self._age(metrics.first_token_time),
            self.num_prompt_tokens,
            metrics.num_cached_tokens,
            # The mailbox gets no token before the end if only the whole output is asked for.
            self.mailbox.num_output_tokens or metrics.num_sampled_tokens,
            metrics.num_preemptions,
        )

    def _age(self, moment: float | None) -> str:
        return "none" if moment is None else f"{moment - self.arrival_time:.3f} s"


@dataclass(eq=False, repr=False)
class AsyncStream:
    """The outputs of a request, for one reader. After the last one, or an error, the iterator ends.

    A reader that stops reads no more, but its request goes on until it finishes or is aborted.

    Args:
        live: the request; its mailbox has no other reader.
        form: what makes the reader's form of an output; None: it is a `RequestOutput`.
    """

    _live: LiveRequest
    _form: Callable[[RequestOutput], Any] | None = None
    _ended: bool = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._live.request_id

    @property
    def finished(self) -> bool:
        """Whether the last output has come."""
        return self._live.mailbox.closed

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Any:
        mailbox = self._live.mailbox
        output = None
        if not self._ended:
            await mailbox.await_news()
            self._ended = mailbox.closed
            output = mailbox.take_now()
        if output is None:
            raise StopAsyncIteration
        return output if self._form is None else self._form(output)


Event = tuple[LiveRequest, RequestOutput | Exception | None]
"""News of a request from the engine's thread: an output, the error with which the engine refused
it, or None: the engine has freed all of it."""


@dataclass(eq=False, repr=False)
class RequestTable:
    """The live requests of one engine, by id.

    Args:
        admission: the bounded queue, in which a request has a place until it starts or finishes.
        abort_in_engine: makes the engine's thread abort a request and send the event None.
        log_requests: log a line when a request finishes.

    Attributes:
        refused: number of requests that were not taken, by the class of the error.
    """

    _admission: Admission
    _abort_in_engine: Callable[[LiveRequest], None]
    _log_requests: bool
    refused: Counter[str] = field(default_factory=Counter)
    _live: dict[str, LiveRequest] = field(default_factory=dict)
    # Of each request for which a caller waits: done when the engine has freed all of it.
    _freed: dict[LiveRequest, asyncio.Future[None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> tuple[LiveRequest, ...]:
        """Returns the live requests."""
        return tuple(self._live.values())

    def find(self, request_id: str) -> LiveRequest | None:
        """Returns the live request of that id; None if there is none."""
        return self._live.get(request_id)

    def named(self, names: set[str]) -> list[LiveRequest]:
        """Returns the live requests of these ids, and those of a `unique_id` of these names."""
        ids = ((live.request_id, live) for live in self.all())
        return [live for own_id, live in ids if {own_id, own_id.rpartition(" ")[0]} & names]

    def open(self, request: GenerateRequest, ends_as_output: bool) -> LiveRequest:
        """Gives a request a place in the queue and in the table. Its deadlines run from now on.

        Raises:
            InvalidPromptError, DuplicateRequestError: its id cannot be used.
            QueueFullError: too many requests wait.
        """
        request_id = uuid4().hex if request.request_id is None else request.request_id
        check_request_id(request_id, self._live.__contains__)
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        mailbox = Mailbox(is_delta)
        live = LiveRequest(request_id, mailbox, request.owner, ends_as_output=ends_as_output)
        if request.arrival_time is not None:
            live.arrival_time = request.arrival_time
        self._admission.enter(live)
        self._live[request_id] = live
        loop = asyncio.get_running_loop()
        if request.deadline is not None:
            left_s = request.deadline - time.monotonic()
            live.timers.append(loop.call_later(max(0.0, left_s), partial(self._expire, live)))
            if left_s <= 0:
                self._expire(live)
        if request.max_queue_s is not None:
            expire = partial(self._expire_queued, live, request.max_queue_s)
            live.timers.append(loop.call_later(request.max_queue_s, expire))
        return live

    def admit(self, live: LiveRequest, checked: CheckedRequest) -> None:
        """Counts a request's prompt tokens and pixels, after which the engine may have it.

        Raises:
            QueueFullError: too many prompt tokens wait, or pixels are held.
            Exception: the error with which the request finished while it was checked.
        """
        if live.mailbox.error is not None:
            raise live.mailbox.error
        if checked.pictures is not None:
            num_bytes = sum(len(load.pixels) for load in checked.pictures.loads.values())
            held = sum(other.num_picture_bytes for other in self._live.values())
            if held and held + num_bytes > _MAX_PICTURE_BYTES:
                text = f"the pictures of unfinished requests have {held} bytes of pixels; with "
                text = f"{text}{num_bytes} more they would exceed the {_MAX_PICTURE_BYTES} that may"
                raise errors.QueueFullError(f"{text}; try again later, or send smaller ones")
            live.num_picture_bytes = num_bytes
        live.num_prompt_tokens = checked.num_prompt_tokens
        self._admission.charge(live, live.num_prompt_tokens)

    def finish(self, live: LiveRequest, outcome: str, error: Exception | None = None) -> None:
        """Finishes a request before its last output, in any phase; nothing happens if it has
        finished.

        Args:
            error: what its reader gets.
        """
        if self._take_out(live, outcome, error):
            self._abort_in_engine(live)

    def refuse(self, live: LiveRequest | None, error: BaseException) -> None:
        """Finishes and counts a request that was refused; None: it had no place in the table."""
        name = type(error).__name__
        if live is not None:
            self.finish(live, f"refused: {name}")
        if isinstance(error, errors.TPEngineError):
            self.refused[name] += 1

    async def abort(self, live: LiveRequest, timeout_s: float) -> None:
        """Finishes a request for a caller, and waits until the engine has freed it, or the time is
        over."""
        freed = self._freeing(live)
        if live.ends_as_output and live.num_prompt_tokens:  # the engine has it
            self._abort_in_engine(live)  # its last output comes before the event None
        else:
            error = None
            if not live.ends_as_output:
                why = f"request {live.request_id!r} was aborted"
                error = errors.RequestAbortedError(why, live.mailbox.take_unread())
            self.finish(live, _ABORTED)
            live.mailbox.close(error)
        await asyncio.wait({freed}, timeout=timeout_s)

    async def cut_off(self, why: str, timeout_s: float, *lives: LiveRequest) -> None:
        """Finishes requests with an error, and waits until the engine has freed them, or the time
        is over.

        Args:
            why: the text of their readers' `RequestAbortedError`.
        """
        waits_for_free = []
        # In one turn of the loop: an output that came in between would be lost.
        for live in lives:
            waits_for_free.append(self._freeing(live))
            error = errors.RequestAbortedError(why, live.mailbox.take_unread())
            self.finish(live, "cut off", error)
        if waits_for_free:
            await asyncio.wait(waits_for_free, timeout=timeout_s)

    def receive(self, events: Iterable[Event]) -> None:
        """Takes the news of the engine's thread, in order: each output comes into the mailbox of
        its request."""
        for live, news in events:
            if isinstance(news, RequestOutput):
                self._deliver(live, news)
            elif news is not None:
                if self._take_out(live, "refused", news):
                    self.refused[type(news).__name__] += 1
            elif live in self._freed:
                self._freed.pop(live).set_result(None)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Finishes all requests, because the engine is gone. Each reader gets an error object of
        its own, so that each has its own traceback."""
        for live in self.all():
            self._take_out(live, "engine dead", make_error())
        while self._freed:
            self._freed.popitem()[1].set_result(None)

    def leave_loop(self) -> None:
        """Finishes all requests, because the loop of their readers was closed. Callers that waited
        there are gone, and their futures cannot be used any more."""
        waits = self._freed.items()
        self._freed = {live: freed for live, freed in waits if not freed.get_loop().is_closed()}
        for live in self.all():
            self.finish(live, "left by its reader")

    def _freeing(self, live: LiveRequest) -> asyncio.Future[None]:
        """Returns the future that is done when the engine has freed all of a request."""
        if live not in self._freed:
            self._freed[live] = asyncio.get_running_loop().create_future()
        return self._freed[live]

    def _expire(self, live: LiveRequest) -> None:
        age_s = time.time() - live.arrival_time
        what = f"was not done by its deadline, {age_s:.3f} s after it came; it was in "
        self._finish_late(live, f"{what}{live.phase!r}")

    def _expire_queued(self, live: LiveRequest, max_queue_s: float) -> None:
        if live.phase == "queued":
            what = f"waited {max_queue_s:.3f} s, its max_queue_s, without being started; allow "
            self._finish_late(live, f"{what}more, or ask an engine with a shorter queue")

    def _finish_late(self, live: LiveRequest, what: str) -> None:
        error = errors.DeadlineExceededError(f"request {live.request_id!r} {what}", live.phase)
        self.finish(live, f"deadline exceeded ({live.phase})", error)

    def _deliver(self, live: LiveRequest, output: RequestOutput) -> None:
        if live.outcome is not None:  # its reader has left
            return
        if not output.finished:
            live.mailbox.put(output)
            return
        reasons, failure = [part.finish_reason for part in output.outputs], output.failure
        has_failed, outcome = "error" in reasons, str(reasons[0])
        if has_failed:
            outcome, failure = "error", failure or errors.RequestFailedError("the request failed")
        elif "abort" in reasons:
            outcome = _ABORTED
        elif failure is not None:  # else the end of its text could not be decoded
            outcome = "too long" if isinstance(failure, errors.RequestIgnoredError) else "error"
        if has_failed or (failure is not None and not live.ends_as_output):
            self._take_out(live, outcome, failure)
        else:
            live.mailbox.put(output)
            self._take_out(live, outcome)

    def _take_out(self, live: LiveRequest, outcome: str, error: Exception | None = None) -> bool:
        """Takes a finished request out of the table; returns False if it was taken out before."""
        if live.outcome is not None:
            return False
        live.outcome = outcome
        for timer in live.timers:
            timer.cancel()
        live.timers.clear()
        self._admission.leave(live)
        del self._live[live.request_id]
        if self._log_requests:
            live.log_finish()
        if error is not None:
            live.mailbox.close(error)
        return True
