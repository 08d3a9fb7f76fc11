"""What sampling parameters make of logits, by transformers' processors and NumPy."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tpengine import SamplingParams
from tpengine.messages import SamplingRules

END_TOKEN_ID = 2


def edited(
    params: SamplingParams | SamplingRules,
    token_ids: list[int],
    num_prompt_tokens: int,
    logits: torch.Tensor,
) -> torch.Tensor:
    """The edited logits of the token after these, float64."""
    ids, scores = torch.tensor([token_ids]), logits[None].clone()
    if params.logit_bias:
        bias = {(token_id,): float(value) for token_id, value in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.bad_words_token_ids:
        words = [list(word) for word in params.bad_words_token_ids]
        scores = NoBadWordsLogitsProcessor(words)(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    row = scores[0].numpy().astype(np.float64)
    output = token_ids[num_prompt_tokens:]
    for token_id in set(output):
        row[token_id] -= params.frequency_penalty * output.count(token_id)
        row[token_id] -= params.presence_penalty
    if params.allowed_token_ids is not None:
        row[[i for i in range(len(row)) if i not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        row[END_TOKEN_ID] = -np.inf
    return torch.from_numpy(row)
