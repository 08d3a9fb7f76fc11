"""Steps that nobody asked for: for the memory profile, and to warm up."""

from __future__ import annotations

import numpy as np

from tpengine.layers.sampler import SamplingBatch
from tpengine.worker.input_batch import StepArrays


def dummy_arrays(query_lens: np.ndarray, block_size: int) -> StepArrays:
    """A step of new sequences. Writes go nowhere and every row reads block 0.

    Args:
        query_lens: int32 `[num_seqs]`, ascending.
    """
    num_seqs, num_tokens = len(query_lens), int(query_lens.sum())
    num_decodes = int(np.count_nonzero(query_lens == 1))
    starts = np.cumsum(query_lens) - query_lens
    positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(starts, query_lens)
    borders = np.concatenate([[0], np.cumsum(query_lens[num_decodes:])])
    max_blocks = -(-int(query_lens.max()) // block_size)
    return StepArrays(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int32),
        block_table=np.zeros((num_seqs, max_blocks), np.int32),
        seq_lens=query_lens,
        query_start_loc=borders.astype(np.int32),
        num_decodes=num_decodes,
        num_scheduled_tokens=query_lens,
    )


def worst_sampling(num_rows: int) -> SamplingBatch:
    """Every stage that takes memory, for every row."""
    return SamplingBatch(
        temperature=np.ones(num_rows, np.float32),
        top_k=np.full(num_rows, 50, np.int32),
        top_p=np.full(num_rows, 0.9, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        noise_key=np.zeros(num_rows, np.uint64),
        positions=np.zeros(num_rows, np.int32),
        num_logprobs=np.full(num_rows, 1, np.int32),
        num_candidates=np.zeros(num_rows, np.int32),
    )
