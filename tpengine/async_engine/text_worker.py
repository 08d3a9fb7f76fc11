"""`TextWorker`: checks new requests and serves tokenize and detokenize calls, on threads.

Both use the tokenizer, and a long prompt takes longer to tokenize than the event loop may block.
The text of a request's output is not made here, but by `engine/output_processor.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.picture_reader import is_picture
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import EngineDeadError, QueueFullError
from tpengine.scheduling.sequence import CheckedRequest

_SHORT_IDS = 2048
"""To check this many ids takes less time than to hand them to another thread and back."""
_LONG_SIZE = 1 << 16
"""Characters, or ids, of a text that takes so long (20 ms and more) that others do not wait."""
_NUM_SLOW = 2
"""Threads for slow work."""
_CALLS = "calls of no request"
"""In the place of an owner's account."""
Answer = TypeVar("Answer")
_Work = tuple[Callable[[], Any], Future[Any]]
_Turn = tuple[ThreadPoolExecutor, str]
"""(threads, account)"""


class TextWorker:
    """Checks requests, which tokenizes their prompts, and runs the work of tokenize and detokenize
    calls. One thread does what is short; long texts, pictures and the checks of grammars have two
    threads of their own. A tokenizer that is written in Python does not serve two threads at once,
    so all of its work is done by the first thread.

    On each of them owners take turns, and of one owner one piece of work is done at a time, in
    order. All tokenize and detokenize calls together have the turn of one owner.

    Args:
        max_texts: number of such calls that may wait; admission bounds the requests.
    """

    def __init__(self, engine: LLMEngine, max_texts: int) -> None:
        self._engine = engine
        self._max_texts = max_texts
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tpengine-text")
        self._slow_pool = ThreadPoolExecutor(_NUM_SLOW, thread_name_prefix="tpengine-slow")
        self._waiting: dict[_Turn, deque[_Work]] = {}
        self._turns = threading.Lock()

    def check(self, request: GenerateRequest) -> CheckedRequest | asyncio.Future[CheckedRequest]:
        """Checks a request; returns a future if that takes a while.

        Raises:
            RequestError: it cannot be served; also as the future's error.
            EngineDeadError: the engine was shut down; also as the future's error.
        """
        token_ids = request.prompt_token_ids
        is_short = isinstance(token_ids, list) and len(token_ids) <= _SHORT_IDS
        is_plain = request.messages is None and request.lora_request is None
        is_plain &= not isinstance(request.prompt, Mapping)
        has_words = request.params.bad_words or request.params.bad_words_token_ids
        has_grammar = request.params.structured_outputs is not None
        if is_short and is_plain and not has_words and not has_grammar:
            return self._engine.check_request(request)
        work = partial(self._engine.check_request, request)
        texts = (request.prompt, request.second, token_ids, request.messages, request.chat_options)
        pool = self._choose_pool(texts, has_grammar)
        return self._begin((pool, request.owner.account), work)

    async def run(self, work: Callable[[], Answer], text: object) -> Answer:
        """Does the work of a tokenize or detokenize call on a thread; returns its result.

        Args:
            text: what it reads: text, ids or messages.

        Raises:
            QueueFullError: too much of it waits.
            EngineDeadError: the engine was shut down.
        """
        pools = self._pool, self._slow_pool
        num_waiting = sum(len(self._waiting.get((pool, _CALLS), ())) for pool in pools)
        if num_waiting >= self._max_texts:
            raise QueueFullError(
                f"{num_waiting} texts wait already for the tokenizer, and no more than "
                f"{self._max_texts} may; try again later"
            )
        return await self._begin((self._choose_pool(text), _CALLS), work)

    def close(self) -> None:
        """Takes no more work, and fails what waits. The threads finish their present work."""
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._turns:
            queues = list(self._waiting.values())
            self._waiting.clear()
        for _, answer in itertools.chain(*queues):
            if answer.set_running_or_notify_cancel():
                answer.set_exception(_death())

    def _choose_pool(self, text: object, has_grammar: bool = False) -> ThreadPoolExecutor:
        """The threads that read a text."""
        tokenizer = self._engine.tokenizer
        if tokenizer is not None and tokenizer.fast_backend is None:
            return self._pool
        parts = [text]
        size = _LONG_SIZE + 1 if has_grammar else 0
        while parts and size <= _LONG_SIZE:
            part = parts.pop()
            if isinstance(part, Mapping):
                size += (_LONG_SIZE + 1) * (is_picture(part) or "multi_modal_data" in part)
                parts += part.values()
            elif isinstance(part, list | tuple) and not (part and isinstance(part[0], int)):
                parts += part
            elif isinstance(part, str | list | tuple):
                size += len(part)
        return self._slow_pool if size > _LONG_SIZE else self._pool

    def _begin(self, turn: _Turn, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        answer: Future[Answer] = Future()
        with self._turns:
            if turn not in self._waiting:
                self._submit(turn)
            self._waiting.setdefault(turn, deque()).append((work, answer))
        return asyncio.wrap_future(answer)

    def _submit(self, turn: _Turn) -> None:
        try:
            turn[0].submit(self._do_turn, turn)
        except RuntimeError as error:
            raise _death() from error

    def _do_turn(self, turn: _Turn) -> None:
        """Runs on a thread: does an owner's next piece of work; then others have their turns."""
        with self._turns:
            queue = self._waiting.get(turn)
            if queue is None:  # `close` has failed what waits
                return
            work, answer = queue.popleft()
        if answer.set_running_or_notify_cancel():  # else its caller has left
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)
        with self._turns:
            if queue and turn in self._waiting:
                self._submit(turn)
            else:
                self._waiting.pop(turn, None)


def _death() -> EngineDeadError:
    return EngineDeadError("the engine was shut down; make a new one")
