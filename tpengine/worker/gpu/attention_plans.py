"""What attention needs on a GPU: decode plans, a backend for prompts, and scratch memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from tpengine.checkpoint.kv_scales import read_scale
from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers import gpu_attention
from tpengine.layers.attention import Attention
from tpengine.layers.weights import Weights
from tpengine.logger import init_logger
from tpengine.ops import attention_ops
from tpengine.ops.library import has_cuda_kernels
from tpengine.worker.input_batch import StepArrays
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)

_OWN_PARTS = ("tpengine.models.", "tpengine.layers.attention")
_GATHERED_TOKENS = 1 << 16
"""Tokens whose K and V are gathered at once for chunks with context; more for a sequence that is
longer than that."""


def check_attention(
    model: Any, config: EngineConfig, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Checks the head size that a model gives the KV cache: its configuration may name another one.

    Raises:
        ConfigError: the kernels of a GPU do not take the model's attention.
    """
    if config.device == "cuda":
        head_dim = next(attention_layers(model)).head_dim
        capability = torch.cuda.get_device_capability()
        attention_ops.check_decode_support(head_dim, dtype, cache_dtype, capability)


def set_kv_scales(
    model: Any, weights: Weights, config: EngineConfig, parallel: ParallelState
) -> None:
    """Gives the layers of this rank the scales of an fp8 cache: those of the file that the user
    named, else those of the checkpoint, else 1.

    Raises:
        ModelLoadError: a scale of the checkpoint is not one number above 0.
    """
    named, tensors = config.cache.kv_scales, weights.kv_scales
    numbers = parallel.stage.layers or range(config.model.num_layers)
    for number, layer in zip(numbers, attention_layers(model), strict=True):
        if named is not None:
            layer.kv_scales = (named[parallel.tp_rank][number],) * 2
        else:
            k, v = (read_scale(tensors.get((number, kind))) for kind in "kv")
            layer.kv_scales = k, v
    if parallel.rank == 0:
        source = "quantization_param_path" if named else "the checkpoint" if tensors else ""
        logger.info("fp8 KV cache: scales %s", f"from {source}" if source else "are 1")


class GpuAttention:
    """Plans, backend and scratch memory of attention on this rank, allocated once per model.

    Args:
        cache_dtype: of the KV cache.

    Attributes:
        backend: computes attention of prompts.

    Raises:
        ConfigError: the requested attention backend cannot be used.
        NativeLibraryError: the CUDA kernels do not run on this GPU.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers = list(attention_layers(model))
        windows = frozenset(layer.rule.window for layer in layers)
        heads, kv_heads, head_dim = layers[0].num_heads, layers[0].num_kv_heads, layers[0].head_dim
        rule = layers[0].rule
        has_slopes = rule.slopes is not None
        shape = gpu_attention.PrefillShape(
            heads, kv_heads, head_dim, dtype, windows, has_slopes, rule.softcap
        )
        self.backend = gpu_attention.choose_backend(config.kernels.attention_backend, shape, device)
        scheduler = config.scheduler
        self._plans: dict[int | None, attention_ops.DecodePlan] = {}  # by window
        self._min_item_tokens = attention_ops.min_item_tokens(head_dim, cache_dtype)
        if device.type == "cuda" and has_cuda_kernels():
            rows = min(scheduler.max_sampled_rows, scheduler.max_num_batched_tokens)
            sizes = rows, heads, kv_heads, head_dim, cache_dtype
            make = partial(attention_ops.make_decode_plan, device, *sizes)
            self._plans = {window: make() for window in windows}
        longest = scheduler.max_model_len
        self._max_gathered = max(longest, min(_GATHERED_TOKENS, longest * scheduler.max_num_seqs))
        keys = torch.empty(self._max_gathered, kv_heads, head_dim, dtype=dtype, device=device)
        self._gathered = keys, torch.empty_like(keys)

    @property
    def num_bytes(self) -> int:
        """Device memory of plans and scratch."""
        plans = sum(plan.num_bytes for plan in self._plans.values())
        return plans + sum(buffer.nbytes for buffer in self._gathered)

    def batch(
        self, arrays: StepArrays, query_start_loc: torch.Tensor, uploads: Uploads
    ) -> gpu_attention.GpuBatch:
        """Makes what a step needs.

        Args:
            query_start_loc: of the step's metadata.
        """
        batch = self.decode_batch()
        query_lens = arrays.num_scheduled_tokens[arrays.num_decodes :]
        seq_lens = arrays.seq_lens[arrays.num_decodes :]
        lengths = query_lens.tolist(), seq_lens.tolist()
        groups = gpu_attention.group_rows(*lengths, self._max_gathered)
        for rows, has_context in groups:
            queries, keys = query_lens[rows], seq_lens[rows]
            first = int(query_lens[: rows.start].sum())
            tokens = slice(first, first + int(queries.sum()))
            query_start = key_start = query_start_loc
            if has_context or len(groups) > 1:
                query_start, key_start = uploads.send([_running_sum(queries), _running_sum(keys)])
            chunks = gpu_attention.Chunks(queries.tolist(), keys.tolist(), query_start, key_start)
            batch.groups.append(gpu_attention.ChunkGroup(rows, tokens, chunks, has_context))
        return batch

    def decode_batch(self) -> gpu_attention.GpuBatch:
        """Makes what a step without chunks needs."""
        plans = gpu_attention.StepPlans(self._plans, self._min_item_tokens) if self._plans else None
        return gpu_attention.GpuBatch(plans, self.backend, self._gathered)


def _running_sum(lengths: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def attention_layers(model: Any) -> Iterator[Attention]:
    """Yields the attention of each layer of a model, in order. It searches the model's attributes,
    since families name their parts differently. The encoder of a model with two halves has no cache
    of its own."""
    if isinstance(model, Attention):
        yield model
        return
    parts = enumerate(model) if isinstance(model, list) else vars(model).items()
    for name, part in parts:
        if name == "encoder":
            continue
        if isinstance(part, list) or type(part).__module__.startswith(_OWN_PARTS):
            yield from attention_layers(part)
