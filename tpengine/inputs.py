"""Forms of a prompt that a user may give as a dict."""

from __future__ import annotations

from typing import TypedDict

from tpengine.errors import InvalidPromptError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


_NOT_SERVED = {
    "lora_request": "merge the adapter into the weights (peft: merge_and_unload)",
    "trace_headers": "leave it out; AsyncLLMEngine logs the times of each request",
    "prompt_adapter_request": "put its instruction into the prompt",
    "guided_options_request": "use allowed_token_ids or logits_processors of SamplingParams",
}
"""Argument: what to do without it."""


def check_not_served(*values: object, **arguments: object) -> None:
    """Refuses arguments of a request that vLLM takes and tpengine does not, unless they are None.

    Args:
        values: the first ones in the order of `_NOT_SERVED`.

    Raises:
        InvalidPromptError: one of them is not None.
    """
    for name, value in (dict(zip(_NOT_SERVED, values, strict=False)) | arguments).items():
        if value is not None:
            raise InvalidPromptError(f"{name} = {value!r:.80} is not served; {_NOT_SERVED[name]}")
