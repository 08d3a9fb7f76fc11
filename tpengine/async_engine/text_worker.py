"""Tokenizers off the event loop: a long prompt takes them longer than a token takes the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tpengine.async_engine.generate_request import GenerateRequest
from tpengine.engine.checked_request import CheckedRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.prompt import is_whole
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import EngineDeadError, InvalidPromptError, QueueFullError

_SHORT_IDS = 2048
"""So many ids are checked in less time than it takes to hand them to another thread and back."""
_RETRY_AFTER_S = 1.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to be done on the thread, and who waits for it on which loop."""

    do: Callable[[], Any]
    answer: asyncio.Future[Any]

    def run(self) -> None:
        if self.answer.done():  # nobody waits any more
            return
        try:
            result = self.do()
        except Exception as error:
            self._tell(self.answer.set_exception, error)
        else:
            self._tell(self.answer.set_result, result)

    def _tell(self, tell: Callable[[Any], None], what: Any) -> None:
        def tell_once() -> None:
            if not self.answer.done():
                tell(what)

        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self.answer.get_loop().call_soon_threadsafe(tell_once)


class TextWorker:
    """Text to ids and back, on one thread: tokenizers are not made for two at once.

    What a request needs comes before texts for their own sake, of which a bounded number waits.

    Args:
        max_texts: so many; requests are bounded by their own queue.
    """

    def __init__(self, engine: LLMEngine, max_texts: int) -> None:
        self._engine = engine
        self._max_texts = max_texts
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tpengine-text")
        self._requests: deque[_Work] = deque()
        self._texts: deque[_Work] = deque()
        self._open: set[asyncio.Future[Any]] = set()

    def check(self, request: GenerateRequest) -> CheckedRequest | asyncio.Future[CheckedRequest]:
        """The request as the engine takes it; a future where that takes a while.

        Raises:
            RequestError: it cannot be served; also as the future's error.
            EngineDeadError: the engine was shut down; also as the future's error.
        """
        token_ids = request.prompt_token_ids
        is_short = isinstance(token_ids, list) and len(token_ids) <= _SHORT_IDS
        if is_short and request.messages is None and not request.params.bad_words:
            return self._check(request)
        return self._begin(self._requests, partial(self._check, request))

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `AsyncLLMEngine.tokenize`."""
        return await self._run(partial(self._tokenizer().encode, text, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See `AsyncLLMEngine.detokenize`."""
        return await self._run(partial(self._decode, token_ids, skip_special_tokens))

    async def chat_token_ids(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[int]:
        """See `AsyncLLMEngine.chat_token_ids`."""
        lay_out = self._tokenizer().apply_chat_template
        return await self._run(partial(lay_out, messages, add_generation_prompt))

    def stop(self) -> None:
        """Takes no more work, and fails what waits; what is being done is finished by a thread
        that nobody awaits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for answer in tuple(self._open):
            if not answer.done() and not answer.get_loop().is_closed():
                answer.set_exception(_death())

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        """Does something that is no request's.

        Raises:
            QueueFullError: too much of that waits.
        """
        if len(self._texts) >= self._max_texts:
            raise QueueFullError(
                f"{len(self._texts)} texts wait already to be made ids, or ids text, and no more "
                f"than {self._max_texts} may; try again later",
                _RETRY_AFTER_S,
            )
        return await self._begin(self._texts, work)

    def _begin(self, queue: deque[_Work], work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        queue.append(_Work(work, answer))
        try:
            self._pool.submit(self._do_next)
        except RuntimeError as error:
            raise _death() from error
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        return answer

    def _do_next(self) -> None:
        """Runs on the thread, once for each piece of work that was queued."""
        (self._requests or self._texts).popleft().run()

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokenizer, vocab_size = self._tokenizer(), self._engine.get_model_config().vocab_size
        for position, token_id in enumerate(token_ids):
            if not is_whole(token_id) or not 0 <= token_id < vocab_size:
                raise InvalidPromptError(
                    f"token_ids[{position}] = {token_id!r} is no id of the vocabulary; ids are "
                    f"integers in [0, {vocab_size - 1}]"
                )
        return tokenizer.decode(list(token_ids), skip_special_tokens)

    def _check(self, request: GenerateRequest) -> CheckedRequest:
        prompt, token_ids = request.prompt, request.prompt_token_ids
        if request.messages is not None:
            if prompt is not None or token_ids is not None:
                raise InvalidPromptError(
                    "a request has messages or a prompt, and this one has both; give one of them"
                )
            token_ids = self._tokenizer().apply_chat_template(request.messages)
        return self._engine.check_request(
            prompt,
            request.params,
            prompt_token_ids=None if token_ids is None else list(token_ids),
            priority=request.priority,
        )

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidPromptError(
                f"the model {self._engine.get_model_config().model} has no tokenizer, which text "
                "and messages need; use ids"
            )
        return tokenizer


def _death() -> EngineDeadError:
    return EngineDeadError("the engine was shut down; make a new one")
