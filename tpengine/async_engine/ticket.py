"""A request of the asynchronous engine, as the event loop and the engine's thread both hold it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from tpengine.async_engine.mailbox import Mailbox
from tpengine.errors import counted
from tpengine.logger import init_logger
from tpengine.outputs import RequestMetrics

logger = init_logger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from the moment it is offered until its outcome is known.

    Attributes:
        owner: in the words of the protocol that brought it.
        arrival_time: seconds of `time.time`.
        metrics: written by the engine's thread as they come; None until it has the request.
        num_prompt_tokens: 0 until they have been counted.
        outcome: how it ended, in a word; None while it lives.
        timers: what ends it when its time is up.
        release: done when the engine holds nothing of it any more; None: nobody waits for that.
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

    def cancel_timers(self) -> None:
        """Forgets its deadlines."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def log_end(self) -> None:
        """Writes its one line. Never the prompt: it may be nobody's business."""
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
            # Nobody is told of any before the end where only the whole is asked for.
            counted(self.mailbox.num_output_tokens or metrics.num_sampled_tokens, "output token"),
            counted(metrics.num_preemptions, "time"),
        )


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f} s"
