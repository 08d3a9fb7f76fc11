"""`AsyncLLMEngine`: many requests at once from an event loop, the engine on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from tpengine.config import ModelConfig
from tpengine.engine.admission import QueueLimits
from tpengine.engine.engine_stats import EngineHealth, EngineStats
from tpengine.engine.generate_request import GenerateRequest
from tpengine.engine.prompt import Prompt
from tpengine.engine_args import EngineArgs
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams


class AsyncLLMEngine:
    """An `LLMEngine` on its own thread, behind `async` methods; belongs to one event loop.

    Built and shut down from any thread; `from_engine_args` blocks while the model is loaded.
    """

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, limits: QueueLimits | None = None
    ) -> AsyncLLMEngine:
        """Builds the engine and waits until it is ready.

        Raises:
            EngineError: an argument, the model or the memory does not allow it; see the message.
        """
        raise NotImplementedError

    async def generate(
        self,
        inputs: Prompt | None = None,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        max_queue_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Serves one request; see `serve`."""
        raise NotImplementedError
        yield

    async def serve(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Serves one request, and yields its outputs as the params' `output_kind` asks; the last is
        `finished`, with finish reason stop or length. What a slow reader has not taken is merged
        into one output. Leaving the iterator (break, aclose, cancellation) aborts the request.

        Raises:
            InvalidPromptError, InvalidSamplingParamsError, InvalidPriorityError: as `LLMEngine`;
                among them RequestIgnoredError: it does not fit into the cache.
            DuplicateRequestError: a live request has this id.
            QueueFullError: too much waits already.
            DeadlineExceededError: its deadline or `max_queue_s` has passed.
            RequestAbortedError: somebody else called `abort`, or a drain's time was up.
            RequestFailedError: it went wrong while it ran.
            EngineDrainingError: the engine takes no new requests.
            EngineDeadError: the engine failed or was shut down.
        """
        raise NotImplementedError
        yield

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its blocks are free when this returns. Its reader gets
        `RequestAbortedError`.

        Returns:
            Whether there was such a request, unfinished.
        """
        raise NotImplementedError

    def owner(self, request_id: str) -> str | None:
        """Owner of an unfinished request, as its `GenerateRequest` named it."""
        raise NotImplementedError

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Raises:
            InvalidPromptError: the model has no tokenizer, or the text is no valid Unicode.
        """
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids.

        Raises:
            InvalidPromptError: the model has no tokenizer, or an id is none of the vocabulary.
        """
        raise NotImplementedError

    async def chat_token_ids(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """A conversation as the ids of a prompt, by the model's chat template.

        Raises:
            InvalidPromptError: there is no tokenizer or template, or it refuses the messages.
        """
        raise NotImplementedError

    def get_model_config(self) -> ModelConfig:
        """What is known of the model."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Figures of this moment; cheap, from any thread."""
        raise NotImplementedError

    def health(self) -> EngineHealth:
        """Whether the engine lives and gets on; cheap, from any thread."""
        raise NotImplementedError

    def metrics_text(self) -> bytes:
        """The same and more in Prometheus' text format; needs prometheus_client."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> int:
        """Takes no new requests from now on, and lets those that it has finish.

        Returns:
            Number of requests that were aborted because they had not finished by then.
        """
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Ends the engine and its thread; requests that remain get `EngineDeadError`. A second call
        does nothing."""
        raise NotImplementedError
