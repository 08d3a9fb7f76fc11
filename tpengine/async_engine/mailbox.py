"""Between the engine and one reader: holds one output at most, however slow the reader is.

Everything here runs on the reader's event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from tpengine.outputs import CompletionOutput, RequestOutput

Answer = TypeVar("Answer")


class DeltaMerger:
    """Several deltas of one request as one.

    Args:
        first: the earliest of them; its lists are extended in place.
    """

    def __init__(self, first: RequestOutput) -> None:
        self._newest = first
        self._completions: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}
        self._take(first)

    def add(self, output: RequestOutput) -> None:
        """Appends what came next."""
        if output.prompt_logprobs is None:
            output.prompt_logprobs = self._newest.prompt_logprobs
        self._newest = output
        self._take(output)

    def build(self) -> RequestOutput:
        """All of it as one output."""
        completions = []
        for index, completion in sorted(self._completions.items()):
            completion.text = "".join(self._texts[index])
            completions.append(completion)
        self._newest.outputs = completions
        return self._newest

    def _take(self, output: RequestOutput) -> None:
        for new in output.outputs:
            known = self._completions.get(new.index)
            if known is None:
                self._completions[new.index] = new
                self._texts[new.index] = [new.text]
                continue
            # Joined only when they are read: a text that grows by `+=` is copied each time.
            self._texts[new.index].append(new.text)
            known.token_ids += new.token_ids
            if new.logprobs is not None:
                known.logprobs = (known.logprobs or []) + new.logprobs
            known.cumulative_logprob = new.cumulative_logprob
            known.finish_reason = new.finish_reason
            known.stop_reason = new.stop_reason


class Mailbox:
    """Where a request's outputs wait for its reader.

    Deltas that nobody has taken are merged, other outputs replaced by newer ones: it never holds
    more than the request's own output.

    Args:
        merges: whether outputs are deltas.

    Attributes:
        error: why there will be no more; the reader gets it once.
        listener: called, in place of waking whoever is in `take`, when there is something to take;
            must not raise, for it is called while others still wait for theirs.
        finished: whether the last output is in.
        num_output_tokens: tokens that were put in, over all sequences.
    """

    __slots__ = (
        "_merger",
        "_merges",
        "_unread",
        "_waiter",
        "error",
        "finished",
        "listener",
        "num_output_tokens",
    )

    def __init__(self, merges: bool) -> None:
        self._merges = merges
        self._unread: RequestOutput | None = None
        self._merger: DeltaMerger | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        self.error: Exception | None = None
        self.finished = False
        self.num_output_tokens = 0

    @property
    def closed(self) -> bool:
        """Whether nothing more will come in."""
        return self.finished or self.error is not None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; ignored once the box is closed."""
        if self.closed:
            return
        num_tokens = sum(len(one.token_ids) for one in output.outputs)
        if self._merges:
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
        """Lets the reader have an error instead of what it has not taken; only the first counts."""
        if self.closed:
            return
        self.error = error
        self._wake()

    def take_unread(self) -> RequestOutput | None:
        """What nobody has taken yet; None: nothing."""
        output, merger = self._unread, self._merger
        self._unread = self._merger = None
        return output if merger is None else merger.build()

    async def unless_failed(self, work: asyncio.Future[Answer]) -> Answer:
        """Waits for something that is needed before there can be outputs; given up when the box
        gets its error. Whoever made the future ends it with the engine.

        Raises:
            Exception: the `error`, or that of the future.
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
            work.add_done_callback(_forget)
            work.cancel()
            raise self.error
        return work.result()

    async def take(self) -> RequestOutput:
        """Waits for an output. The wait ends with the engine: whoever made the box closes it then.

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
        if output is None:  # woken for nothing; cannot happen with one reader
            raise asyncio.InvalidStateError("a mailbox has one reader")
        return output

    def take_now(self) -> RequestOutput | None:
        """What there is; None: nothing yet.

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


def _forget(work: asyncio.Future[Answer]) -> None:
    """Its error is nobody's any more; asyncio would write it to the log."""
    if not work.cancelled():
        work.exception()
