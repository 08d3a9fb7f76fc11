"""A model and its KV cache without an engine around them, and the logits of two prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tpengine.checkpoint.loader import load_model
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.layers.attention import AttentionMetadata, padded_head_dim
from tpengine.layers.weights import Weights
from tpengine.worker.cache_engine import CacheEngine, CacheShape

CPU = torch.device("cpu")
BLOCK_SIZE = 16
BLOCKS_EACH = 4
"""Of a sequence; sequence i has the blocks from 4 i on."""
PROMPTS = ([5, 127, 128, 254, 255, 256, 383, 384], list(range(30, 75)))
"""Some ids lie on the borders of the ranks' parts of the vocabulary. For a model with a smaller
vocabulary their remainders are taken."""
NEXT = (3, 4)
"""The tokens after the prompts."""


def tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill_metadata(lengths: Sequence[int]) -> AttentionMetadata:
    """Whole prompts as one step."""
    return step_metadata(dict(enumerate(map(range, lengths))), num_decodes=0)


def step_metadata(positions: Mapping[int, range], num_decodes: int) -> AttentionMetadata:
    """A step that computes these positions of each sequence, by its number; decodes are first."""
    places = [(i, place) for i, own in positions.items() for place in own]
    starts = np.cumsum([0, *map(len, list(positions.values())[num_decodes:])])
    return AttentionMetadata(
        positions=tensor([place for _, place in places]),
        slot_mapping=tensor([BLOCKS_EACH * BLOCK_SIZE * i + place for i, place in places]),
        block_table=torch.stack([_block_table(i) for i in positions]),
        seq_lens=tensor([own.stop for own in positions.values()]),
        query_start_loc=tensor(starts.tolist()),
        num_decodes=num_decodes,
    )


def _block_table(sequence: int) -> torch.Tensor:
    return tensor(range(BLOCKS_EACH * sequence, BLOCKS_EACH * (sequence + 1)))


class BareModel:
    """One rank's share of a model, with room for a few sequences of up to 64 tokens.

    Attributes:
        num_bytes: of its weights.
        form: see `Weights.form`.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelState | None = None,
        quantization: str | None = None,
        as_stored: bool = False,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        num_sequences: int = len(PROMPTS),
        **args: Any,
    ) -> None:
        args = {"dtype": str(dtype)[6:], "quantization": quantization, **args}
        config = EngineArgs(str(folder), **args).create_engine_config("cpu").model
        parallel = parallel or ParallelState()
        weights = Weights(dtype, CPU, parallel, quantization, as_stored)
        self.model = load_model(config, weights)
        self.num_bytes, self.form = weights.num_bytes, weights.form
        self._vocab_size = config.vocab_size
        kv_heads = max(1, config.total_num_kv_heads // parallel.tp_size)
        sizes = BLOCK_SIZE, config.num_layers, kv_heads, padded_head_dim(config.head_dim)
        shape = CacheShape(CPU, cache_dtype or dtype, *sizes)
        self.kv_caches = CacheEngine(shape, num_sequences * BLOCKS_EACH).kv_caches

    def logits(self) -> torch.Tensor:
        """Of every prompt token and of one decode, `[num_tokens, vocab_size]`."""
        lengths = [len(prompt) for prompt in PROMPTS]
        token_ids = tensor([token for prompt in PROMPTS for token in prompt])
        parts = []
        for ids, metadata in (
            (token_ids, prefill_metadata(lengths)),
            (tensor(NEXT), step_metadata({i: range(n, n + 1) for i, n in enumerate(lengths)}, 2)),
        ):
            parts.append(self.step(ids, metadata))
        return torch.cat(parts)

    def step(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """The logits of each token of a step, `[num_tokens, vocab_size]`."""
        token_ids = token_ids % self._vocab_size
        return self.model.compute_logits(self.model.forward(token_ids, self.kv_caches, metadata))


def logits_in_transformers(model: Any) -> torch.Tensor:
    """Those of `BareModel.logits` by transformers."""
    size = model.config.vocab_size
    with torch.inference_mode():
        whole = [
            model(torch.tensor([[*prompt, extra]]) % size).logits[0]
            for prompt, extra in zip(PROMPTS, NEXT, strict=True)
        ]
    return torch.cat([*(logits[:-1] for logits in whole), *(logits[-1:] for logits in whole)])
