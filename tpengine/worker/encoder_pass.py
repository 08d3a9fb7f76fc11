"""The pass of an encoder over the new encoder prompts of a step, before the step's rows.

The prompts are ragged chunks whose tokens see each other in both directions. While the encoder
runs, the first layer's cache holds its K and V, in the blocks of the prompts; then each layer of
the decoder fills its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tpengine.config import EncoderConfig, SoundConfig
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.device_values import Array, upload
from tpengine.messages import CrossInput, StepInput
from tpengine.worker.input_batch import StepArrays

UploadArrays = Callable[[StepArrays], tuple[Tensor, AttentionMetadata]]
"""Sends arrays to the device; returns token ids and metadata."""


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


class EncoderPass:
    """Runs the encoder of a model with two halves.

    Args:
        block_size: of the KV cache.
    """

    def __init__(
        self, config: EncoderConfig, model: object, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(model, TwoHalves)
        self._config, self._model = config, model
        self._block_size, self._device = block_size, device

    def run(self, step: StepInput, kv_caches: list[KVCache], upload_arrays: UploadArrays) -> None:
        """Reads those encoder prompts of a step whose blocks are empty, and fills the blocks."""
        prompts = [new.cross for new in step.new_sequences if new.cross is not None]
        self._read([prompt for prompt in prompts if prompt.token_ids], kv_caches, upload_arrays)

    def run_longest(
        self, num_tokens: int, kv_caches: list[KVCache], upload_arrays: UploadArrays
    ) -> None:
        """Reads as many of the longest prompts as `num_tokens` are. K and V go into block 0."""
        longest, sound = self._config.max_len, self._config.sound
        frame = bytes(4 * sound.num_mel_bins) if sound else b""
        prompt = CrossInput(longest, [], [0] * longest, frame)
        self._read([prompt] * (num_tokens // longest), kv_caches, upload_arrays)

    def _read(
        self, prompts: Sequence[CrossInput], kv_caches: list[KVCache], upload_arrays: UploadArrays
    ) -> None:
        if not prompts:
            return
        inputs, metadata = upload_arrays(encoder_arrays(prompts, self._block_size))
        if self._config.sound is not None:
            inputs = upload(sound_features(prompts, self._config.sound), self._device)
        self._model.encode(inputs, kv_caches, metadata)


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
