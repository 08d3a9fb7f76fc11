"""Tokenizers off the event loop: a long prompt takes them longer than a token takes the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tpengine.engine.checked_request import CheckedRequest
from tpengine.engine.generate_request import GenerateRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.prompt import is_whole
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import EngineDeadError, InvalidPromptError

_SHORT_IDS = 2048
"""So many ids are checked in less time than it takes to hand them to another thread and back."""
Answer = TypeVar("Answer")


class TextWorker:
    """Text to ids and back, on one thread: tokenizers are not made for two at once."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tpengine-text")

    async def check(self, request: GenerateRequest) -> CheckedRequest:
        """The request as the engine takes it.

        Raises:
            RequestError: it cannot be served.
        """
        token_ids = request.prompt_token_ids
        is_short = isinstance(token_ids, list) and len(token_ids) <= _SHORT_IDS
        if is_short and request.messages is None and not request.params.bad_words:
            return self._check(request)
        return await self._run(partial(self._check, request))

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `AsyncLLMEngine.tokenize`."""
        return await self._run(partial(self._tokenizer().encode, text, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See `AsyncLLMEngine.detokenize`."""
        tokenizer, vocab_size = self._tokenizer(), self._engine.get_model_config().vocab_size
        for position, token_id in enumerate(token_ids):
            if not is_whole(token_id) or not 0 <= token_id < vocab_size:
                raise InvalidPromptError(
                    f"token_ids[{position}] = {token_id!r} is no id of the vocabulary; ids are "
                    f"integers in [0, {vocab_size - 1}]"
                )
        return await self._run(partial(tokenizer.decode, list(token_ids), skip_special_tokens))

    async def chat_token_ids(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[int]:
        """See `AsyncLLMEngine.chat_token_ids`."""
        lay_out = self._tokenizer().apply_chat_template
        return await self._run(partial(lay_out, messages, add_generation_prompt))

    def stop(self) -> None:
        """Takes no more work; what is being done is finished by a thread that nobody awaits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:
            raise EngineDeadError("the engine was shut down; make a new one") from error
        return await future

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
