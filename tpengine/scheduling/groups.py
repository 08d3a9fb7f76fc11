"""Requests with more than one sequence: what the sequences have in common, and which of them a step
takes."""

from __future__ import annotations

from tpengine.sequence import Request, Sequence, SequenceStatus


def num_common_tokens(sequences: list[Sequence]) -> int:
    """Number of tokens from the start that are computed only once for all of the sequences.

    If the sequences are equal, all tokens are common. Otherwise at least the last token of each
    sequence is its own, since the next token is sampled there.
    """
    first = sequences[0]
    if len(sequences) == 1 or not any(s.num_output_tokens for s in sequences):
        return first.num_tokens
    token_ids = [sequence.token_ids for sequence in sequences]
    # What the lowest and the highest list begin with is common to all lists between them.
    low, high = min(token_ids), max(token_ids)
    if low == high:
        return len(low)
    pairs = zip(low, high)  # noqa: B905 (one may be longer)
    parting = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(low), len(high)))
    return min(parting, min(map(len, token_ids)) - 1)


def choose_rows(request: Request, tokens_left: int) -> list[tuple[Sequence, int]]:
    """The running sequences of a request that fit into a step with `tokens_left` free tokens, each
    with its number of tokens.

    Beams are compared with each other after every token, so either all of them compute their last
    token in a step or none of them does.
    """
    behind = [
        (sequence, sequence.num_tokens - sequence.num_computed_tokens)
        for sequence in request.sequences
        if sequence.status is SequenceStatus.RUNNING
    ]
    if request.sampling_params.use_beam_search:
        if any(num_left > 1 for _, num_left in behind):
            behind = [(sequence, num_left - 1) for sequence, num_left in behind if num_left > 1]
        elif len(behind) > tokens_left:
            return []
    rows = []
    for sequence, num_left in behind:
        if not tokens_left:
            break
        rows.append((sequence, min(num_left, tokens_left)))
        tokens_left -= rows[-1][1]
    return rows


def find_catching_up(running: list[Request]) -> list[Request]:
    """Running requests with more than one token to compute.

    Without chunked prefill, these are requests that were preempted when they were longer than a
    step. Their prompt was accepted, so they are computed in parts instead of being refused.
    """
    return [
        request
        for request in running
        if any(
            sequence.num_tokens - sequence.num_computed_tokens > 1
            for sequence in request.sequences
            if sequence.status is SequenceStatus.RUNNING
        )
    ]
