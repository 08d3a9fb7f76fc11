"""`PoolingCalls`: what `LLM` offers for models that make no tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpengine.engine import requests as checks
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import GenerateRequest, one_per_prompt
from tpengine.errors import InvalidPromptError, RequestError
from tpengine.inputs import LoRARequest, PoolingParams, PromptInputs
from tpengine.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)

Prompts = PromptInputs | Sequence[int] | Sequence[PromptInputs | Sequence[int]]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class PoolingCalls(ABC):
    """Embeddings, scores and classes of prompts that are all known at once."""

    llm_engine: LLMEngine

    @abstractmethod
    def _serve(
        self, requests: list[GenerateRequest], on_error: str, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Checks all requests, and then runs them; see `LLM.generate`."""

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        *,
        on_error: str = "raise",
    ) -> list[EmbeddingRequestOutput]:
        """Embeds every prompt, or gives the numbers of a model that scores or classifies.

        Args:
            prompts, prompt_token_ids, use_tqdm, lora_request, on_error: see `LLM.generate`.
            pooling_params: one for all, or a list with one per prompt; default: `PoolingParams()`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: see `LLM.generate`; or the model generates, and `task` does not say embed.
        """
        pairs = checks.pair_prompts(prompts, prompt_token_ids, "encode")
        outputs = self._pool(pairs, pooling_params, lora_request, use_tqdm, on_error)
        return list(map(EmbeddingRequestOutput.of, outputs))

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """See `encode`; only for a model that embeds."""
        self._check_task("embed", "embed")
        return self.encode(prompts, pooling_params, None, use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """Gives the probability of each class for every prompt.

        Raises:
            RequestError: see `encode`; or the model does not classify.
        """
        self._check_task("classify", "classify")
        pairs = checks.pair_prompts(prompts, None)
        outputs = self._pool(pairs, pooling_params, lora_request, use_tqdm)
        return list(map(ClassificationRequestOutput.of, outputs))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores how well texts fit: by a model that reads both, or by the cosine of embeddings.

        Args:
            text_1: one text for all of `text_2`, or as many.
            text_2: the texts that are compared with it.
            truncate_prompt_tokens: see `PoolingParams`.

        Returns:
            One output for each of `text_2`. By embeddings, its tokens are those of both texts.

        Raises:
            RequestError: see `encode`; or the numbers of texts do not fit.
        """
        task = self._check_task("score", "score", "embed")
        firsts, seconds = _pair_texts(text_1, text_2)
        params = pooling_params or PoolingParams()
        if truncate_prompt_tokens is not None:
            params = replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        if task == "score":
            pairs = checks.pair_prompts(firsts, None)
            outputs = self._pool(pairs, params, lora_request, use_tqdm, seconds=seconds)
            return list(map(ScoringRequestOutput.of, outputs))
        texts = list(dict.fromkeys([*firsts, *seconds]))  # each text is embedded once
        outputs = self._pool(checks.pair_prompts(texts, None), params, lora_request, use_tqdm)
        embedded = dict(zip(texts, outputs, strict=True))
        compared = (map(embedded.__getitem__, each) for each in (firsts, seconds))
        return list(map(ScoringRequestOutput.of_embeddings, *compared))

    def _check_task(self, method: str, *tasks: str) -> str:
        """Returns the task of the model, if it is one of these."""
        task = self.llm_engine.get_model_config().task
        if task in tasks:
            return task
        text = f"LLM.{method} needs a model for {' or '.join(tasks)}, and the model does {task!r}"
        raise RequestError(f"{text}; docs/embeddings.md lists the models for each task")

    def _pool(
        self,
        pairs: Sequence[tuple[Any, Any]],
        pooling_params: Any,
        lora_request: Any,
        use_tqdm: bool,
        on_error: str = "raise",
        seconds: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Serves requests to a model that makes no tokens.

        Args:
            pairs: text and ids of each prompt, see `checks.pair_prompts`.
            seconds: the second text of each pair; None: there are no pairs.
        """
        count = len(pairs)
        each_second = [None] * count if seconds is None else seconds
        params = PoolingParams() if pooling_params is None else pooling_params
        each_params = one_per_prompt("pooling_params", params, count)
        adapters = one_per_prompt("lora_request", lora_request, count)
        each = zip(pairs, each_params, adapters, each_second, strict=True)
        requests = [
            GenerateRequest(*pair, pooling_params=own, lora_request=adapter, second=second)
            for pair, own, adapter, second in each
        ]
        return self._serve(requests, on_error, use_tqdm)


def _pair_texts(first: Any, second: Any) -> tuple[list[str], list[str]]:
    """Brings the texts that `LLM.score` compares into two lists of one length.

    Raises:
        InvalidPromptError: one is no text, or neither one nor as many as the others.
    """
    firsts, seconds = checks.as_many("text_1", first), checks.as_many("text_2", second)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        got = f"{len(firsts)} and {len(seconds)}"
        raise InvalidPromptError(f"give one text_1, or as many as text_2; got {got}")
    for text in (*firsts, *seconds):
        if not isinstance(text, str):
            raise InvalidPromptError(f"score compares texts, got {text!r:.80}")
    return firsts, seconds
