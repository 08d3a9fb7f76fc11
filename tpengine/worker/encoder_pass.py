"""The pass of an encoder over the new encoder prompts of a step, before the step's rows.

The prompts are ragged chunks whose tokens see each other in both directions. While the encoder
runs, the first layer's cache holds its K and V, in the blocks of the prompts; then each layer of
the decoder fills its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from tpengine.config import SoundConfig
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.device_values import Array
from tpengine.messages import CrossInput
from tpengine.worker.input_batch import StepArrays


@runtime_checkable
class TwoHalves(Protocol):
    """What a model with two halves has beside `registry.CausalLM`."""

    def encode(
        self, prompts: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata, /
    ) -> None:
        """Reads whole encoder prompts, and writes K and V of them into the blocks of `metadata`, in
        the cache of each layer of the decoder.

        Args:
            prompts: ids, int32 `[num_tokens]`; or features of sounds, float32 `[num_sounds,
                num_mel_bins, num_frames]`.
        """


def sound_features(prompts: Sequence[CrossInput], sound: SoundConfig) -> Array:
    """Returns the features of sounds with the silence behind them, float32 `[num_sounds,
    num_mel_bins, num_frames]`."""
    features = np.empty((len(prompts), sound.num_mel_bins, sound.num_frames), np.float32)
    for whole, prompt in zip(features, prompts, strict=True):
        sent = np.frombuffer(prompt.features, np.float32).reshape(-1, sound.num_mel_bins).T
        whole[:, : sent.shape[1]] = sent
        whole[:, sent.shape[1] :] = sent[:, -1:]
    return features


def encoder_arrays(prompts: Sequence[CrossInput], block_size: int) -> StepArrays:
    """Returns the arrays of a pass over encoder prompts, in their blocks.

    Example, block_size 4: a prompt of 5 tokens in the blocks 9 and 3, and one of 2 in block 8.

        positions        0 1 2 3 4 | 0 1
        slot_mapping     36 37 38 39 12 | 32 33
        block_table      [9, 3] [8, 0]
        query_start_loc  0 5 7
    """
    lengths = np.array([prompt.num_tokens for prompt in prompts], np.int32)
    table = np.zeros((len(prompts), -(-int(lengths.max()) // block_size)), np.int32)
    for row, prompt in enumerate(prompts):
        table[row, : len(prompt.block_ids)] = prompt.block_ids
    starts = np.zeros(len(prompts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    token_ids = np.concatenate([prompt.token_ids for prompt in prompts]).astype(np.int32)
    rows = np.repeat(np.arange(len(prompts)), lengths)
    positions = np.arange(len(token_ids), dtype=np.int32) - starts[rows]
    slots = table[rows, positions // block_size] * block_size + positions % block_size
    return StepArrays(token_ids, positions, slots, table, lengths, starts, 0, lengths)
