"""Mailbox: holds the outputs of one request until its reader takes them, merged into one output.

All of it runs on the reader's event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from tpengine.outputs import CompletionOutput, RequestOutput

Answer = TypeVar("Answer")
_MOST_APART = 64
"""Deltas that wait unmerged: each holds more than its tokens, and merging them one by one would
copy all text and tokens each time."""


def merge(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Returns consecutive deltas of one request as one: the newest of them, changed in place."""
    newest = deltas[-1]
    if len(deltas) == 1:
        return newest
    parts: dict[int, list[CompletionOutput]] = {}
    for delta in deltas:
        for completion in delta.outputs:
            parts.setdefault(completion.index, []).append(completion)
    newest.outputs = [_join(parts[index]) for index in sorted(parts)]
    once = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    newest.prompt_logprobs = once[0] if once else None
    return newest


def _join(parts: list[CompletionOutput]) -> CompletionOutput:
    """Returns the parts of one sequence as one: the last, changed in place."""
    last = parts[-1]
    last.text = "".join([part.text for part in parts])
    last.token_ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    if last.logprobs is not None:
        last.logprobs = list(chain.from_iterable(part.logprobs or () for part in parts))
    return last


@dataclass(slots=True, eq=False)
class Mailbox:
    """The outputs of one request that its reader has not taken.

    Deltas are merged; an output of another kind replaces the one before. So the mailbox never holds
    more than the request's whole output, however slow the reader is.

    Attributes:
        merges: whether outputs are deltas.
        error: why no more outputs will come; the reader gets it in their place.
        listener: if set, called when there is something to take, for a reader that does not wait in
            `take`. It must not raise: outputs of other requests are delivered after it.
        finished: whether no more outputs will come, without an error.
        num_output_tokens: tokens that have come, over all sequences.
    """

    merges: bool
    listener: Callable[[], None] | None = None
    error: Exception | None = None
    finished: bool = False
    num_output_tokens: int = 0
    _unread: list[RequestOutput] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self.finished or self.error is not None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; ignored once the mailbox is closed."""
        if self.closed:
            return
        self.num_output_tokens = output.num_output_tokens
        if not self.merges:
            self._unread.clear()
        elif len(self._unread) == _MOST_APART:
            self._unread = [merge(self._unread)]
        self._unread.append(output)
        self.finished = output.finished
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Ends it before its last output; only the first end counts.

        Args:
            error: what the reader gets instead of what it has not taken; None: its outputs end.
        """
        if self.closed:
            return
        self.error, self.finished = error, error is None
        self._wake()

    def take_unread(self) -> RequestOutput | None:
        """Takes what the reader has not taken yet; None: nothing."""
        unread, self._unread = self._unread, []
        return merge(unread) if unread else None

    async def unless_closed(self, work: asyncio.Future[Answer]) -> Answer | None:
        """Waits for work that must be done before there can be outputs. The wait ends early, and
        the work is cancelled, when the mailbox is closed; the engine's end closes it.

        Returns:
            The result of the work; None: the mailbox was closed.

        Raises:
            Exception: the `error`, or that of the work.
        """
        news = asyncio.ensure_future(self._news.wait())
        first: set[asyncio.Future[Any]] = {work, news}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            work.cancel()  # no effect on work that is done
        if not self.closed:
            return work.result()
        # asyncio logs an error that is never retrieved.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.error is not None:
            raise self.error
        return None

    async def await_news(self) -> None:
        """Waits until there is an output or an error to take, or no more will come. The engine's
        end ends the wait with an error."""
        while not self._unread and not self.closed:
            self._news.clear()
            await self._news.wait()

    async def take(self) -> RequestOutput:
        """Waits for an output and takes it. The engine's end ends the wait with an error.

        Raises:
            Exception: the `error`.
        """
        await self.await_news()
        output = self.take_now()
        if output is None:
            raise asyncio.InvalidStateError("a mailbox has one reader, and another took its output")
        return output

    def take_now(self) -> RequestOutput | None:
        """Takes what there is; None: nothing, or nothing yet.

        Raises:
            Exception: the `error`.
        """
        if self.error is not None:
            raise self.error
        return self.take_unread()

    def _wake(self) -> None:
        self._news.set()
        if self.listener is not None:
            self.listener()
