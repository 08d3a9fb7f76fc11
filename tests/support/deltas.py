"""Deltas of a request, as an engine gives them to a stream."""

from __future__ import annotations

from tpengine.outputs import CompletionOutput, Logprob, RequestOutput


def delta(
    tokens: dict[int, list[int]],
    finished: bool = False,
    has_logprobs: bool = True,
    num_output_tokens: int = 0,
) -> RequestOutput:
    """A delta of these tokens by sequence; a token's text is its number."""
    outputs = [
        CompletionOutput(
            index=index,
            text="".join(f"{token} " for token in ids),
            token_ids=tuple(ids),
            cumulative_logprob=-float(sum(ids)) if has_logprobs else None,
            logprobs=[{token: Logprob(-1.0, 1)} for token in ids] if has_logprobs else None,
            finish_reason="length" if finished else None,
        )
        for index, ids in tokens.items()
    ]
    return RequestOutput(
        "it", None, [1], None, outputs, finished, num_output_tokens=num_output_tokens
    )
