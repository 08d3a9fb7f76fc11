"""What `LLM.generate` is given, one by one: prompts as text, ids or both, and their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from tpengine.engine.prompt import Prompt, is_whole
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError, RequestError, counted
from tpengine.outputs import CompletionOutput, RequestOutput
from tpengine.sampling_params import SamplingParams


def pair_prompts(
    prompts: Prompt | Sequence[Prompt] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
) -> list[tuple[Prompt | None, list[int] | None]]:
    """Brings one prompt or many, as text, ids or both, into one list."""
    texts: list[Prompt | None] | None = None
    if prompts is not None:
        single = isinstance(prompts, (str, dict))
        if not single and not isinstance(prompts, Iterable):
            raise InvalidPromptError(
                f"prompts must be a string, a dict or a list of such, got {type(prompts).__name__}"
            )
        texts = cast(list[Prompt | None], [prompts] if single else list(prompts))
    ids: list[list[int] | None] | None = None
    if prompt_token_ids is not None:
        if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Iterable):
            raise InvalidPromptError(
                "prompt_token_ids must be a list of ids or a list of such lists, got "
                f"{prompt_token_ids!r:.80}"
            )
        many = list(prompt_token_ids)
        nested = not many or not is_whole(many[0])
        ids = cast(list[list[int] | None], many if nested else [many])
    if texts is None and ids is None:
        raise InvalidPromptError("generate needs prompts or prompt_token_ids; got neither")
    if texts is None:
        texts = [None] * len(ids or [])
    if ids is None:
        ids = [None] * len(texts)
    if len(texts) != len(ids):
        raise InvalidPromptError(
            f"prompts and prompt_token_ids must be equally many, got {len(texts)} and {len(ids)}"
        )
    return list(zip(texts, ids, strict=True))


def one_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The parameters of every prompt: those of all, or its own."""
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    params = list(sampling_params) if isinstance(sampling_params, Iterable) else [sampling_params]
    for one in params:
        if not isinstance(one, SamplingParams):
            raise InvalidSamplingParamsError(
                f"sampling_params must be SamplingParams or a list of them, got {one!r}"
            )
    if len(params) != num_prompts:
        raise InvalidPromptError(
            f"a list of sampling_params needs one per prompt: got {len(params)} for "
            f"{counted(num_prompts, 'prompt')}"
        )
    return params


def refusal(
    request_id: str, prompt: Prompt | None, token_ids: list[int] | None, error: RequestError
) -> RequestOutput:
    """An output for a prompt that never reached the engine."""
    if isinstance(prompt, dict):
        token_ids = cast(Any, prompt).get("prompt_token_ids", token_ids)
        prompt = cast(Any, prompt).get("prompt")
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(token_ids) if isinstance(token_ids, Iterable) else [],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")],
        finished=True,
        error=str(error),
    )
