"""The one form in which a request reaches the asynchronous engine, whatever protocol brought it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpengine.engine.prompt import Prompt
from tpengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, as a protocol's converter makes it; it has `prompt`, `prompt_token_ids` or
    `messages`.

    Attributes:
        prompt: text, or a dict as `LLM.generate` takes it; beside ids it is only echoed.
        request_id: any string that no unfinished request has; None: the engine makes one.
        messages: a conversation, laid out by the model's chat template.
        priority: lower is served first; needs scheduling_policy "priority".
        deadline: moment of `time.monotonic` at which the request is ended, whatever it is doing.
        max_queue_s: seconds that it may wait for its first step.
        owner: whose request it is, in the protocol's words; the engine only keeps it.
    """

    prompt: Prompt | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    deadline: float | None = None
    max_queue_s: float | None = None
    owner: str | None = None
