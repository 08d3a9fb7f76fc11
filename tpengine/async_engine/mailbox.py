"""Mailbox: holds the outputs of one request until its reader takes them, merged into one output.

All of it runs on the reader's event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tpengine.outputs import CompletionOutput, RequestOutput

Answer = TypeVar("Answer")


class DeltaMerger:
    """Merges deltas of one request into one output.

    Args:
        first: the earliest of them; it is changed in place.
    """

    def __init__(self, first: RequestOutput) -> None:
        self._newest = first
        self._completions: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._take(first)

    def add(self, output: RequestOutput) -> None:
        """Appends the next delta."""
        if output.prompt_logprobs is None:
            output.prompt_logprobs = self._newest.prompt_logprobs
        self._newest = output
        self._take(output)

    def build(self) -> RequestOutput:
        """Returns all deltas as one output."""
        for index, completion in self._completions.items():
            completion.text = "".join(self._texts[index])
            completion.token_ids = tuple(self._token_ids[index])
        self._newest.outputs = [one for _, one in sorted(self._completions.items())]
        return self._newest

    def _take(self, output: RequestOutput) -> None:
        for new in output.outputs:
            known = self._completions.get(new.index)
            if known is None:
                self._completions[new.index] = new
                self._texts[new.index] = [new.text]
                self._token_ids[new.index] = list(new.token_ids)
                continue
            # Texts are joined when they are read: a text that grows by `+=` is copied each time.
            self._texts[new.index].append(new.text)
            self._token_ids[new.index] += new.token_ids
            if new.logprobs is not None:
                known.logprobs = (known.logprobs or []) + new.logprobs
            known.cumulative_logprob = new.cumulative_logprob
            known.finish_reason = new.finish_reason
            known.stop_reason = new.stop_reason


@dataclass(slots=True, eq=False)
class Mailbox:
    """The outputs of one request that its reader has not taken.

    Deltas are merged; an output of another kind replaces the one before. So the mailbox never holds
    more than the request's whole output, however slow the reader is.

    Attributes:
        merges: whether outputs are deltas.
        error: why no more outputs will come; the reader gets it once. StopAsyncIteration: it was
            aborted, and its reader gets no error.
        listener: if set, called instead of waking a reader in `take` when there is something to
            take. It must not raise: outputs of other requests are delivered after it.
        finished: whether the last output has come.
        num_output_tokens: tokens that have come, over all sequences.
    """

    merges: bool
    listener: Callable[[], None] | None = None
    error: Exception | None = None
    finished: bool = False
    num_output_tokens: int = 0
    _unread: RequestOutput | None = None
    _merger: DeltaMerger | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self.finished or self.error is not None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; ignored once the mailbox is closed."""
        if self.closed:
            return
        num_tokens = sum(len(one.token_ids) for one in output.outputs)
        if self.merges:
            self.num_output_tokens += num_tokens
            if self._unread is None:
                self._unread = output
            else:
                if self._merger is None:
                    self._merger = DeltaMerger(self._unread)
                self._merger.add(output)
        else:
            self.num_output_tokens = num_tokens
            self._unread = output
        self.finished = output.finished
        self._wake()

    def fail(self, error: Exception) -> None:
        """Gives the reader an error instead of what it has not taken; only the first counts."""
        if self.closed:
            return
        self.error = error
        self._wake()

    def take_unread(self) -> RequestOutput | None:
        """Takes what the reader has not taken yet; None: nothing."""
        output, merger = self._unread, self._merger
        self._unread = self._merger = None
        return output if merger is None else merger.build()

    async def unless_failed(self, work: asyncio.Future[Answer]) -> Answer:
        """Waits for work that must be done before there can be outputs. The wait ends early, and
        the work is cancelled, when the mailbox gets its error; the engine's end gives it one.

        Raises:
            Exception: the `error`, or that of the work.
        """
        if self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            first: set[asyncio.Future[Any]] = {work, self._waiter}
            try:
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                work.cancel()
                raise
            finally:
                self._waiter = None
        if self.error is not None:
            # asyncio logs an error that is never retrieved.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            work.cancel()
            raise self.error
        return work.result()

    async def take(self) -> RequestOutput:
        """Waits for an output and takes it. The engine's end ends the wait with an error.

        Raises:
            Exception: the `error`.
        """
        if self._unread is None and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self.take_now()
        if output is None:
            raise asyncio.InvalidStateError("a mailbox has one reader, and another took its output")
        return output

    def take_now(self) -> RequestOutput | None:
        """Takes what there is; None: nothing yet.

        Raises:
            Exception: the `error`.
        """
        if self.error is not None:
            raise self.error
        return self.take_unread()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self.listener is not None:
            self.listener()
