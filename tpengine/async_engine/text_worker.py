"""`TextWorker`: checks new requests and serves tokenize and detokenize calls, on a thread.

Both use the tokenizer, and a long prompt takes longer to tokenize than the event loop may block.
The text of a request's output is not made here, but by `engine/output_processor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import EngineDeadError, QueueFullError
from tpengine.scheduling.sequence import CheckedRequest

_SHORT_IDS = 2048
"""To check this many ids takes less time than to hand them to another thread and back."""
Answer = TypeVar("Answer")
_Work = tuple[Callable[[], Any], asyncio.Future[Any]]


class TextWorker:
    """Checks requests, which tokenizes their prompts, and runs the work of tokenize and detokenize
    calls. All of it runs on one thread: a tokenizer does not serve two threads at once.

    Requests come before those calls.

    Args:
        max_texts: number of such calls that may wait; admission bounds the requests.
    """

    def __init__(self, engine: LLMEngine, max_texts: int) -> None:
        self._engine = engine
        self._max_texts = max_texts
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tpengine-text")
        self._requests: deque[_Work] = deque()
        self._texts: deque[_Work] = deque()
        self._open: set[asyncio.Future[Any]] = set()

    def check(self, request: GenerateRequest) -> CheckedRequest | asyncio.Future[CheckedRequest]:
        """Checks a request; returns a future if that takes a while.

        Raises:
            RequestError: it cannot be served; also as the future's error.
            EngineDeadError: the engine was shut down; also as the future's error.
        """
        token_ids = request.prompt_token_ids
        is_short = isinstance(token_ids, list) and len(token_ids) <= _SHORT_IDS
        is_plain = request.messages is None and request.lora_request is None
        has_words = request.params.bad_words or request.params.bad_words_token_ids
        takes_long = has_words or request.params.structured_outputs  # a grammar: perhaps seconds
        if is_short and is_plain and not takes_long:
            return self._engine.check_request(request)
        return self._begin(self._requests, partial(self._engine.check_request, request))

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Does the work of a tokenize or detokenize call on the thread; returns its result.

        Raises:
            QueueFullError: too much of it waits.
            EngineDeadError: the engine was shut down.
        """
        if len(self._texts) >= self._max_texts:
            raise QueueFullError(
                f"{len(self._texts)} texts wait already for the tokenizer, and no more than "
                f"{self._max_texts} may; try again later"
            )
        return await self._begin(self._texts, work)

    def close(self) -> None:
        """Takes no more work, and fails what waits. The thread finishes its present work in the
        background."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for answer in tuple(self._open):
            if not answer.done() and not answer.get_loop().is_closed():
                answer.set_exception(_death())

    def _begin(self, queue: deque[_Work], work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        queue.append((work, answer))
        try:
            self._pool.submit(self._do_next)
        except RuntimeError as error:
            raise _death() from error
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        return answer

    def _do_next(self) -> None:
        """Runs on the thread, once for each piece of work that was queued."""
        work, answer = (self._requests or self._texts).popleft()
        if answer.done():  # its caller has left
            return
        try:
            resolve = partial(answer.set_result, work())
        except Exception as error:
            resolve = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            answer.get_loop().call_soon_threadsafe(_unless_done, answer, resolve)


def _unless_done(answer: asyncio.Future[Any], resolve: Callable[[], None]) -> None:
    if not answer.done():  # else its caller has left, or the engine was shut down
        resolve()


def _death() -> EngineDeadError:
    return EngineDeadError("the engine was shut down; make a new one")
