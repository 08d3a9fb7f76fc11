"""The two prompts of a request to a model with two halves: what the encoder reads, and how the
decoder begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpengine.config import EncoderConfig
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidPromptError

_KEYS = {"encoder_prompt", "decoder_prompt"}


@dataclass(frozen=True, slots=True)
class TwoPrompts:
    """The prompts of a request before their ids are checked.

    Attributes:
        encoder, encoder_ids: as `GenerateRequest` has a prompt.
        decoder: its text; None: ids alone were given, or nothing.
        decoder_ids: with those that stand before every output of the model.
    """

    encoder: Any
    encoder_ids: Any
    decoder: str | None
    decoder_ids: Any


def is_two_prompts(prompt: Any) -> bool:
    """Whether a prompt names what an encoder reads."""
    return isinstance(prompt, Mapping) and not _KEYS.isdisjoint(prompt)


def divide_prompt(
    prompt: Any, token_ids: Any, encoder: EncoderConfig, tokenizer: Tokenizer | None
) -> TwoPrompts:
    """Finds the two prompts of a request. One without keys is the encoder's; the decoder then
    begins with `EncoderConfig.start_token_ids`, as it does before a decoder's text. Ids of the
    decoder begin with the first of these.

    Raises:
        InvalidPromptError: the prompts have another form, or a text cannot be tokenized.
    """
    decoder: Any = None
    if is_two_prompts(prompt):
        if unknown := prompt.keys() - _KEYS:
            keys = "encoder_prompt and decoder_prompt"
            raise InvalidPromptError(f"a prompt's keys are {keys}; got {sorted(unknown)} too")
        prompt, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
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
    return TwoPrompts(prompt, token_ids, text, ids)


def _has_begun(ids: list[Any], encoder: EncoderConfig) -> bool:
    """Whether a decoder's prompt has the first id of all outputs. Before a sound's may stand what
    was said before."""
    first = ids if encoder.sound is not None else ids[:1]
    return encoder.start_token_ids[0] in first


def check_encoder_length(num_tokens: int, encoder: EncoderConfig) -> None:
    """Raises InvalidPromptError if the encoder cannot read so many tokens."""
    if num_tokens > encoder.max_len:
        text = f"has {num_tokens} tokens, more than the {encoder.max_len} positions of the encoder"
        raise InvalidPromptError.of_field("encoder_prompt", f"{text}; shorten it")
