"""A model and its KV cache without an engine around them, and the logits of two prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tpengine.checkpoint.loader import load_model
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.layers.attention import AttentionMetadata
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
    return _metadata([range(length) for length in lengths], num_decodes=0)


def _metadata(positions: Sequence[range], num_decodes: int) -> AttentionMetadata:
    """A step that computes these positions of each sequence; decodes are first."""
    places = [(i, place) for i, own in enumerate(positions) for place in own]
    starts = np.cumsum([0, *map(len, positions[num_decodes:])])
    return AttentionMetadata(
        positions=tensor([place for _, place in places]),
        slot_mapping=tensor([BLOCKS_EACH * BLOCK_SIZE * i + place for i, place in places]),
        block_table=tensor(range(BLOCKS_EACH * len(positions))).view(-1, BLOCKS_EACH),
        seq_lens=tensor([own.stop for own in positions]),
        query_start_loc=tensor(starts.tolist()),
        num_decodes=num_decodes,
    )


class BareModel:
    """One rank's share of a model in float32, with room for two sequences.

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
        **args: Any,
    ) -> None:
        args = {"dtype": "float32", "quantization": quantization, **args}
        config = EngineArgs(str(folder), **args).create_engine_config("cpu").model
        parallel = parallel or ParallelState()
        weights = Weights(torch.float32, CPU, parallel, quantization, as_stored)
        self.model = load_model(config, weights)
        self.num_bytes, self.form = weights.num_bytes, weights.form
        self._vocab_size = config.vocab_size
        kv_heads = max(1, config.total_num_kv_heads // parallel.tp_size)
        sizes = BLOCK_SIZE, config.num_layers, kv_heads, config.head_dim
        cache = CacheEngine(CacheShape(CPU, torch.float32, *sizes), len(PROMPTS) * BLOCKS_EACH)
        self.kv_caches = cache.kv_caches

    def logits(self) -> torch.Tensor:
        """Of every prompt token and of one decode, `[num_tokens, vocab_size]`."""
        lengths = [len(prompt) for prompt in PROMPTS]
        token_ids = tensor([token for prompt in PROMPTS for token in prompt])
        parts = []
        for ids, metadata in (
            (token_ids, prefill_metadata(lengths)),
            (tensor(NEXT), _metadata([range(n, n + 1) for n in lengths], len(lengths))),
        ):
            hidden = self.model.forward(ids % self._vocab_size, self.kv_caches, metadata)
            parts.append(self.model.compute_logits(hidden))
        return torch.cat(parts)


def logits_in_transformers(model: Any) -> torch.Tensor:
    """Those of `BareModel.logits` by transformers."""
    size = model.config.vocab_size
    with torch.inference_mode():
        whole = [
            model(torch.tensor([[*prompt, extra]]) % size).logits[0]
            for prompt, extra in zip(PROMPTS, NEXT, strict=True)
        ]
    return torch.cat([*(logits[:-1] for logits in whole), *(logits[-1:] for logits in whole)])
