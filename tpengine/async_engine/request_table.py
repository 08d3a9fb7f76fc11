"""The one table of live requests: who reads each of them, its deadlines, and how it ends.

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
from uuid import uuid4

from tpengine.async_engine.admission import Admission
from tpengine.async_engine.mailbox import Mailbox
from tpengine.engine.requests import CheckedRequest, GenerateRequest, check_request_id
from tpengine.errors import (
    DeadlineExceededError,
    RequestAbortedError,
    RequestFailedError,
    RequestIgnoredError,
    TPEngineError,
    counted,
)
from tpengine.logger import init_logger
from tpengine.outputs import RequestMetrics, RequestOutput
from tpengine.sampling_params import RequestOutputKind

logger = init_logger(__name__)

_FAULTS: dict[str, type[RequestIgnoredError] | type[RequestFailedError]] = {
    "ignored": RequestIgnoredError,
    "error": RequestFailedError,
}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its first check until its outcome is known.

    Attributes:
        owner: the client that sent it, in the protocol's words.
        arrival_time: seconds of `time.time`.
        metrics: the engine's thread sets and fills them; None until it has the request.
        num_prompt_tokens: 0 until they have been counted.
        outcome: how it ended, for the log; None while it lives.
        timers: its deadlines.
        release: done when the engine holds nothing of it any more; None: no caller waits for that.
    """

    request_id: str
    mailbox: Mailbox
    owner: str | None = None
    arrival_time: float = field(default_factory=time.time)
    metrics: RequestMetrics | None = None
    num_prompt_tokens: int = 0
    outcome: str | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    release: asyncio.Future[None] | None = None

    @property
    def phase(self) -> str:
        """How far it has come: queued, prefill or decode."""
        metrics = self.metrics
        if metrics is None or metrics.first_scheduled_time is None:
            return "queued"
        return "prefill" if metrics.first_token_time is None else "decode"

    def log_end(self) -> None:
        """Logs its one line, without the prompt, which may be confidential."""
        if not logger.isEnabledFor(logging.INFO):
            return
        metrics = self.metrics or RequestMetrics(self.arrival_time)
        first_token_s = None
        if metrics.first_token_time is not None:
            first_token_s = metrics.first_token_time - self.arrival_time
        logger.info(
            "request %r: %s after %.3f s; queue %s, first token %s; %s (%d cached), %s; "
            "preempted %s",
            self.request_id,
            self.outcome,
            time.time() - self.arrival_time,
            _seconds(metrics.time_in_queue),
            _seconds(first_token_s),
            counted(self.num_prompt_tokens, "prompt token"),
            metrics.num_cached_tokens,
            # The mailbox gets no token before the end if only the whole output is asked for.
            counted(self.mailbox.num_output_tokens or metrics.num_sampled_tokens, "output token"),
            counted(metrics.num_preemptions, "time"),
        )


Event = tuple[LiveRequest, RequestOutput | Exception | None]
"""News of a request from the engine's thread: an output, the error with which the engine refused
it, or None: the engine holds nothing of it any more."""


class RequestTable:
    """The live requests of one engine, by id.

    Args:
        admission: the bounded queue, in which a request has a place until it starts or ends.
        end_in_engine: makes the engine's thread end a request and send the event None.
        log_requests: log a line when a request ends.

    Attributes:
        refused: number of requests that were not taken, by the class of the error.
    """

    def __init__(
        self,
        admission: Admission,
        end_in_engine: Callable[[LiveRequest], None],
        log_requests: bool,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._admission = admission
        self._end_in_engine = end_in_engine
        self._log_requests = log_requests
        self._live: dict[str, LiveRequest] = {}
        self._releases: set[asyncio.Future[None]] = set()
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    @property
    def awaits_events(self) -> bool:
        """Whether a reader or a caller waits for the engine's thread."""
        return bool(self._live or self._releases)

    def all(self) -> tuple[LiveRequest, ...]:
        """Returns the live requests."""
        return tuple(self._live.values())

    def find(self, request_id: str) -> LiveRequest | None:
        """Returns the live request of that id; None if there is none."""
        return self._live.get(request_id)

    def open(self, request: GenerateRequest) -> LiveRequest:
        """Gives a request a place in the queue and in the table. Its deadlines run from now on.

        Raises:
            InvalidPromptError, DuplicateRequestError: its id cannot be used.
            QueueFullError: too many requests wait.
        """
        request_id = uuid4().hex if request.request_id is None else request.request_id
        check_request_id(request_id, self._live.__contains__)
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        live = LiveRequest(request_id, Mailbox(is_delta), request.owner)
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
        """Counts a request's prompt tokens, after which the engine may have it.

        Raises:
            QueueFullError: too many prompt tokens wait.
            Exception: the error that ended the request while it was checked.
        """
        if live.mailbox.error is not None:
            raise live.mailbox.error
        live.num_prompt_tokens = len(checked.prompt_token_ids)
        self._admission.charge(live, live.num_prompt_tokens)

    def end(self, live: LiveRequest, outcome: str, error: Exception | None = None) -> None:
        """Ends a request from outside, in any phase; nothing happens if it has ended.

        Args:
            error: what its reader gets.
        """
        if self._close(live, outcome, error):
            self._end_in_engine(live)

    def refuse(self, live: LiveRequest | None, error: BaseException) -> None:
        """Ends and counts a request that was refused; None: it had no place in the table yet."""
        name = type(error).__name__
        if live is not None:
            self.end(live, f"refused: {name}")
        if isinstance(error, TPEngineError):
            self.refused[name] += 1

    async def release(self, outcome: str, why: str, timeout_s: float, *lives: LiveRequest) -> None:
        """Ends requests, and waits until the engine holds nothing of them, or the time is over.

        Args:
            why: the text of their readers' `RequestAbortedError`.
        """
        releases = []
        # In one turn of the loop: an output that came in between would be lost.
        for live in lives:
            live.release = asyncio.get_running_loop().create_future()
            releases.append(live.release)
            live.release.add_done_callback(self._releases.discard)
            self.end(live, outcome, RequestAbortedError(why, live.mailbox.take_unread()))
        self._releases.update(releases)
        if releases:
            await asyncio.wait(releases, timeout=timeout_s)

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when no request is left, or the time is over."""
        if self._live and timeout_s > 0:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=timeout_s)

    def receive(self, events: Iterable[Event]) -> None:
        """Takes the news of the engine's thread, in order."""
        for live, news in events:
            if isinstance(news, RequestOutput):
                self._deliver(live, news)
            elif news is not None:
                if self._close(live, "refused", news):
                    self.refused[type(news).__name__] += 1
            elif live.release is not None and not live.release.done():
                live.release.set_result(None)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Ends all requests, because the engine is gone. Each reader gets an error object of its
        own, so that each has its own traceback."""
        for live in self.all():
            self._close(live, "engine dead", make_error())
        for release in tuple(self._releases):
            if not release.done():
                release.set_result(None)

    def _expire(self, live: LiveRequest) -> None:
        age_s = time.time() - live.arrival_time
        what = f"was not done by its deadline, {age_s:.3f} s after it came; it was in "
        self._end_late(live, f"{what}{live.phase!r}")

    def _expire_queued(self, live: LiveRequest, max_queue_s: float) -> None:
        if live.phase == "queued":
            what = f"waited {max_queue_s:.3f} s, its max_queue_s, without being started; allow "
            self._end_late(live, f"{what}more, or ask an engine with a shorter queue")

    def _end_late(self, live: LiveRequest, what: str) -> None:
        error = DeadlineExceededError(f"request {live.request_id!r} {what}", live.phase)
        self.end(live, f"deadline exceeded ({live.phase})", error)

    def _deliver(self, live: LiveRequest, output: RequestOutput) -> None:
        if not output.finished:
            live.mailbox.put(output)
            return
        reasons = [completion.finish_reason for completion in output.outputs]
        fault = next((name for name in _FAULTS if name in reasons), None)
        if fault is None:
            live.mailbox.put(output)
            self._close(live, str(reasons[0]))
        else:
            text = output.error or f"the request ended with {fault!r}"
            self._close(live, fault, _FAULTS[fault](text))

    def _close(self, live: LiveRequest, outcome: str, error: Exception | None = None) -> bool:
        """Takes a request out of the table; returns False if it has been taken out before."""
        if live.outcome is not None:
            return False
        live.outcome = outcome
        for timer in live.timers:
            timer.cancel()
        live.timers.clear()
        self._admission.leave(live)
        del self._live[live.request_id]
        if self._log_requests:
            live.log_end()
        if error is not None:
            live.mailbox.fail(error)
        if not self._live and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        return True


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"
