"""The two prompts of a request to a model with two halves: what the encoder reads, and how the
decoder begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tpengine.config import EncoderConfig, ModelConfig
from tpengine.engine.sound_prompts import read_features
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError
from tpengine.scheduling.sequence import EncoderPrompt

_KEYS = {"encoder_prompt", "decoder_prompt"}


def is_two_prompts(prompt: Any) -> bool:
    """Whether a prompt names what an encoder reads."""
    return isinstance(prompt, Mapping) and not _KEYS.isdisjoint(prompt)


def read_two_prompts(
    prompt: Any,
    token_ids: Any,
    messages: Any,
    num_kept: int | None,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    read: Callable[[Any, Any], tuple[str | None, list[int]]],
) -> tuple[str | None, Any, EncoderPrompt]:
    """Finds the two prompts of a request. One without keys is the encoder's; beside a sound it is
    the decoder's.

    Args:
        prompt, token_ids, messages: as `GenerateRequest` has them.
        num_kept: last tokens of the encoder's prompt that are kept; None: all.
        read: returns text and ids, checked, of a prompt and of ids given with it.

    Returns:
        The decoder's text, None: ids alone were given, or nothing; its ids, unchecked; and the
        encoder's prompt.

    Raises:
        InvalidPromptError: the prompts have another form, or a text cannot be tokenized.
        InvalidSamplingParamsError: a sound is to be truncated.
    """
    if (encoder := model.encoder) is None:
        lack = f"the model {model.model} has no encoder for encoder_prompt and"
        raise InvalidPromptError(f"{lack} decoder_prompt; give prompt or prompt_token_ids")
    if messages is not None:
        problem = "messages do not fit a model with an encoder and a decoder"
        raise InvalidPromptError(f"{problem}; give encoder_prompt, or a text")
    decoder: Any = None
    if encoder.sound is not None:
        prompt, token_ids = _around_sound(prompt, token_ids), None
    if is_two_prompts(prompt):
        if unknown := prompt.keys() - _KEYS:
            keys = "encoder_prompt and decoder_prompt"
            raise InvalidPromptError(f"a prompt's keys are {keys}; got {sorted(unknown)} too")
        prompt, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    text, ids = _begin_decoder(decoder, encoder, tokenizer)
    if encoder.sound is None:
        num_forced = len(ids) - 1 if ids == [*encoder.start_token_ids] else 0
        encoder_prompt = EncoderPrompt(*read(prompt, token_ids), num_forced=num_forced)
        if (count := encoder_prompt.num_tokens) > encoder.max_len:
            problem = f"has {count} tokens, more than the {encoder.max_len} positions of the"
            raise InvalidPromptError.of_field("encoder_prompt", f"{problem} encoder; shorten it")
    elif num_kept is None:
        features = read_features(prompt, encoder.sound)
        encoder_prompt = EncoderPrompt(None, [0] * encoder.max_len, features)
    else:
        problem = "does not fit a sound; leave it out"
        raise InvalidSamplingParamsError.of_field("truncate_prompt_tokens", problem)
    return text, ids, encoder_prompt


def _around_sound(prompt: Any, token_ids: Any) -> Mapping[str, Any]:
    """Brings a prompt whose text or ids are the decoder's, with the sound beside them, into the
    form that names both prompts."""
    if is_two_prompts(prompt):
        return dict(prompt)
    own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    data = own.pop("multi_modal_data", None)
    if token_ids is not None:
        own["prompt_token_ids"] = token_ids
    return {"encoder_prompt": {"multi_modal_data": data}, "decoder_prompt": own}


def _begin_decoder(
    decoder: Any, encoder: EncoderConfig, tokenizer: Tokenizer | None
) -> tuple[str | None, Any]:
    """Returns text and ids of the decoder's prompt. It begins with
    `EncoderConfig.start_token_ids`, and ids that are given with the first of these."""
    text, ids = decoder, None
    if isinstance(decoder, Mapping):
        if unknown := decoder.keys() - {"prompt", "prompt_token_ids"}:
            keys = "prompt and prompt_token_ids"
            raise InvalidPromptError(f"decoder_prompt has the keys {keys}; got {sorted(unknown)}")
        text, ids = decoder.get("prompt"), decoder.get("prompt_token_ids")
    if not isinstance(text, str | None):
        problem = f"decoder_prompt must be a text or a dict, got {text!r:.80}"
        raise InvalidPromptError(f"{problem}; or leave it out")
    start = list(encoder.start_token_ids)
    if ids is None:
        if text and tokenizer is None:
            problem = "the model has no tokenizer, which the text of decoder_prompt needs"
            raise InvalidPromptError(f"{problem}; give it as prompt_token_ids")
        own = tokenizer.encode(text, add_special_tokens=False) if text and tokenizer else []
        ids = own if _has_begun(own, encoder) else start + own
    elif isinstance(ids, Iterable) and not isinstance(ids, (str, bytes, Mapping)):
        ids = list(ids)
        ids = ids if _has_begun(ids, encoder) else start[:1] + ids
    return text, ids


def _has_begun(ids: list[Any], encoder: EncoderConfig) -> bool:
    """Whether a decoder's prompt has the first id of all outputs. Before a sound's may stand what
    was said before."""
    first = ids if encoder.sound is not None else ids[:1]
    return encoder.start_token_ids[0] in first
