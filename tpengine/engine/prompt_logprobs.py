"""Log probabilities of prompts, gathered from the steps that compute them."""

from __future__ import annotations

from tpengine.engine.tokenizer import Tokenizer
from tpengine.messages import PromptLogprobs, TokenLogprobs
from tpengine.outputs import Logprob
from tpengine.sequence import Request


class PromptLogprobsCollector:
    """Puts the parts together that chunks of a prompt bring.

    Parts are kept by position, so that a prompt that is computed again after preemption replaces
    what is there by the same.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[dict[int, Logprob] | None]] = {}

    def record(self, request: Request, part: PromptLogprobs, tokenizer: Tokenizer | None) -> None:
        """Notes one part."""
        prompt = request.prompt_token_ids
        entries = self._found.setdefault(request.request_id, [None] * len(prompt))
        for position, found in enumerate(part.entries, start=part.first_position):
            entries[position] = as_logprobs(prompt[position], found, tokenizer)

    def of(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """By position of the prompt; None unless asked for and complete."""
        if request.sampling_params.prompt_logprobs is None:
            return None
        if len(request.prompt_token_ids) == 1:
            return [None]
        entries = self._found.get(request.request_id)
        return None if entries is None or None in entries[1:] else entries

    def forget(self, request_id: str) -> None:
        """Drops a request's; an unknown one is ignored."""
        self._found.pop(request_id, None)


def as_logprobs(
    token_id: int, found: TokenLogprobs, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The likeliest tokens of a position and the one that stands there, by id."""

    def text(candidate: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(candidate)

    entries = {
        candidate: Logprob(logprob, rank, text(candidate))
        for rank, (candidate, logprob) in enumerate(
            zip(found.top_token_ids, found.top_logprobs, strict=True), start=1
        )
    }
    entries.setdefault(token_id, Logprob(found.logprob, found.rank, text(token_id)))
    return entries
