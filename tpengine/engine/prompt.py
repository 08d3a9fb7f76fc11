"""Checks of what a request brings, before it touches the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import index

from tpengine.config import ModelConfig
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.inputs import TextPrompt, TokensPrompt
from tpengine.sampling_params import SamplingParams, load_logits_processor

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


def is_whole(value: object) -> bool:
    """Whether a value is one integer, Python's or NumPy's or a tensor's; a bool is none."""
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _checked_ids(token_ids: object, model: ModelConfig) -> list[int]:
    """The ids as plain integers (NumPy's come often)."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise InvalidPromptError(
            f"prompt_token_ids must be a list of integers, got {type(token_ids).__name__}"
        )
    try:
        token_ids = list(token_ids)
    except TypeError as error:  # a tensor without dimensions says that it is iterable
        raise InvalidPromptError(f"prompt_token_ids must be a list of integers: {error}") from error
    if not token_ids:
        raise InvalidPromptError("the prompt is empty: it has no tokens; give at least one")
    if len(token_ids) > model.max_model_len:
        raise InvalidPromptError(
            f"the prompt has {len(token_ids)} tokens, more than max_model_len = "
            f"{model.max_model_len}; shorten it"
        )
    for position, token_id in enumerate(token_ids):
        if not is_whole(token_id) or not 0 <= token_id < model.vocab_size:
            raise InvalidPromptError(
                f"prompt_token_ids[{position}] = {token_id!r} is no id of the vocabulary; ids are "
                f"integers in [0, {model.vocab_size - 1}]"
            )
    return [index(token_id) for token_id in token_ids]


def read_sampling_params(
    params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None
) -> SamplingParams:
    """Checks what `SamplingParams` cannot know at construction, and turns `bad_words` into ids.

    Returns:
        The parameters as the workers understand them: without `bad_words`, which have become
        `bad_words_token_ids`.

    Raises:
        InvalidSamplingParamsError: an id is none of the vocabulary, texts are given and there is
            no tokenizer, or a logits processor cannot be imported.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in params.bad_words_token_ids:
        _check_ids("bad_words_token_ids", word, vocab_size)
    for path in params.logits_processors:
        load_logits_processor(path)
    if tokenizer is None and params.stop:
        raise InvalidSamplingParamsError(
            "stop strings need a tokenizer, and the model has none; use stop_token_ids"
        )
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise InvalidSamplingParamsError(
            "bad_words need a tokenizer, and the model has none; use bad_words_token_ids"
        )
    words = dict.fromkeys(map(tuple, params.bad_words_token_ids))
    for text in params.bad_words:
        words.update(dict.fromkeys(_bad_word_ids(text, tokenizer)))
    return replace(params, bad_words=(), bad_words_token_ids=tuple(words))


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidSamplingParamsError(
                f"{name} holds {token_id}, which is no id of the vocabulary; ids are in "
                f"[0, {vocab_size - 1}]"
            )


def _bad_word_ids(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Ids of a word in the middle of another and after a space: tokenizers tell them apart."""
    word = text.lstrip()
    try:
        found = [tuple(tokenizer.encode(form, False)) for form in (word, " " + word)]
    except InvalidPromptError as error:
        raise InvalidSamplingParamsError(
            f"bad_words holds {text!r}, which cannot be tokenized: {error}"
        ) from error
    if not all(found):
        raise InvalidSamplingParamsError(
            f"bad_words holds {text!r}, which has no tokens; give another, or leave it out"
        )
    return found
