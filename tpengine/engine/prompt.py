"""Checks of what a request brings, before it touches the engine."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TypedDict

from tpengine.config import ModelConfig
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as ids."""

    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt


def read_prompt(
    prompt: Prompt | None,
    prompt_token_ids: list[int] | None,
    tokenizer: Tokenizer | None,
    model: ModelConfig,
) -> tuple[str | None, list[int]]:
    """Returns the prompt's text, if it has one, and its ids, checked.

    Raises:
        InvalidPromptError: it is empty, too long, holds ids outside the vocabulary, or is text
            and there is no tokenizer.
    """
    if isinstance(prompt, dict):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise InvalidPromptError(
                f"a prompt's keys are prompt and prompt_token_ids; got {sorted(unknown)}"
            )
        prompt_token_ids = prompt.get("prompt_token_ids", prompt_token_ids)  # type: ignore[assignment]
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidPromptError(
            f"a prompt is a string or a dict, got {type(prompt).__name__}; give ids as "
            "prompt_token_ids"
        )
    if prompt_token_ids is None:
        if prompt is None:
            raise InvalidPromptError("a request needs a prompt or prompt_token_ids; got neither")
        if tokenizer is None:
            raise InvalidPromptError(
                f"the model {model.model} has no tokenizer; give prompt_token_ids, or name a "
                "tokenizer"
            )
        prompt_token_ids = tokenizer.encode(prompt)
    return prompt, _checked_ids(prompt_token_ids, model)


def _checked_ids(token_ids: object, model: ModelConfig) -> list[int]:
    """The ids as plain integers (NumPy's come often)."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise InvalidPromptError(
            f"prompt_token_ids must be a list of integers, got {type(token_ids).__name__}"
        )
    token_ids = list(token_ids)
    if not token_ids:
        raise InvalidPromptError("the prompt is empty: it has no tokens; give at least one")
    if len(token_ids) > model.max_model_len:
        raise InvalidPromptError(
            f"the prompt has {len(token_ids)} tokens, more than max_model_len = "
            f"{model.max_model_len}; shorten it"
        )
    for position, token_id in enumerate(token_ids):
        whole = hasattr(token_id, "__index__") and not isinstance(token_id, bool)
        if not whole or not 0 <= token_id < model.vocab_size:
            raise InvalidPromptError(
                f"prompt_token_ids[{position}] = {token_id!r} is no id of the vocabulary; ids are "
                f"integers in [0, {model.vocab_size - 1}]"
            )
    return [index(token_id) for token_id in token_ids]


def check_sampling_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Checks what `SamplingParams` cannot know at construction.

    Raises:
        InvalidSamplingParamsError: a stop token is no id of the vocabulary, or stop strings are
            asked for without a tokenizer.
    """
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise InvalidSamplingParamsError(
                f"stop_token_ids holds {token_id}, which is no id of the vocabulary; ids are in "
                f"[0, {vocab_size - 1}]"
            )
    if params.stop and not has_tokenizer:
        raise InvalidSamplingParamsError(
            "stop strings need a tokenizer, and the model has none; use stop_token_ids"
        )
