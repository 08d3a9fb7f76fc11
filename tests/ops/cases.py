"""Random paged caches with NaN in every unused slot, and dense attention in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tpengine.ops import (  # noqa: F401 (these modules define the ops)
    attention_ops,
    expert_ops,
    fused_ops,
    library,
    lora_ops,
    weight_only,
)
from tpengine.ops import cache_ops as cache

from .cuda_host_library import needs_compiler
from .cuda_host_ops import FP8, StandIn, on_card

ISAS = library.supported_cpu_isas()
EMULATED = library.EMULATED_CPU_ISA
BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16)
NAMES = list(itertools.product(BACKENDS, DTYPES))
"""Every backend on a CPU with every dtype."""
CACHES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
)
"""Dtypes of a model and of its cache on a CPU."""
CUDA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CUDA_CACHES = (*((d, d) for d in CUDA_DTYPES), (torch.float16, FP8), (torch.bfloat16, FP8))
CUDA_OPS = {"stand-in": StandIn(0), "stand-in wide": StandIn(1, is_wide=True), "gpu": on_card}
"""How CUDA kernels are found: two ways on the CPU, and one on a card, if there is one."""
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not library.has_cuda_kernels(), reason="the CUDA library is not built"),
]


def layout_of(name: str) -> str:
    """The device whose layout of the cache a backend takes."""
    return "cuda" if name in CUDA_OPS else "cpu"


def on_cuda(*values: Any) -> list[Any]:
    """Values, or tuples of them, each with the name of every way to a CUDA kernel."""
    return [
        pytest.param(
            name,
            *(value if isinstance(value, tuple) else (value,)),
            marks=GPU if name == "gpu" else needs_compiler,
        )
        for name in CUDA_OPS
        for value in values or ((),)
    ]


# Relative Frobenius distance to float64 on the same inputs.
ATTENTION_BOUND = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


@contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Within the block, the CPU kernels use the instruction set `name`."""
    before = library.cpu_isa()
    library.set_cpu_isa(name)
    try:
        yield
    finally:
        library.set_cpu_isa(before)


@contextmanager
def backend(name: str) -> Iterator[Callable[[str], Callable[..., None]]]:
    """Looks ops up by name: the plain-torch reference, or the kernels of CUDA or of an instruction
    set."""
    others = {"reference": library.REFERENCES.__getitem__, **CUDA_OPS}
    if name in others:
        yield others[name]
        return
    with use_cpu_isa(name):
        yield lambda op: getattr(torch.ops.tpengine, op).default


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch uses `count` threads; the other tests of this folder use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether numbers and places of NaN are equal."""
    return torch.equal(a.float().nan_to_num(nan=1e9), b.float().nan_to_num(nan=1e9))


def replaced(index: int, change: Callable[[Any], object]) -> Callable[[Sequence[Any]], list[Any]]:
    """Arguments of an op with a change to one of them."""
    return lambda a: [*a[:index], change(a[index]), *a[index + 1 :]]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache in which nothing is written: NaN, in int8 -1 with scales that are NaN."""
    return torch.full(shape, -1.0 if dtype == torch.int8 else torch.nan).to(dtype)


def nan_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


@dataclass
class PagedCase:
    k: list[Tensor]  # dense, per sequence [seq_len, num_kv_heads, head_dim]
    v: list[Tensor]
    unrounded: list[tuple[Tensor, Tensor]]  # K and V before they were rounded to int8
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    block_size: int

    def queries(self, num_heads: int, counts: list[int], gen: torch.Generator) -> Tensor:
        """Random queries `[sum(counts), num_heads, head_dim]`, a view of a packed qkv."""
        kv_heads, head_dim = self.k[0].shape[1:]
        qkv = torch.full((sum(counts), num_heads + 2 * kv_heads, head_dim), torch.nan)
        qkv[:, :num_heads] = torch.randn(sum(counts), num_heads, head_dim, generator=gen)
        return qkv.to(self.unrounded[0][0].dtype)[:, :num_heads]


def place(case: PagedCase, seq: int, position: int) -> None:
    """Writes one token into the caches, by the definition of the layout."""
    block = int(case.block_table[seq, position // case.block_size])
    offset = position % case.block_size
    k, v = case.k[seq][position], case.v[seq][position]
    if case.k_cache.dim() == 4:
        case.k_cache[block, offset] = k
        case.v_cache[block, offset] = v
        return
    pack = case.k_cache.shape[4]
    case.k_cache[block, :, :, offset] = k.reshape(k.shape[0], -1, pack)
    case.v_cache[block, :, offset // pack, :, offset % pack] = v


def place_bytes(case: PagedCase, seq: int) -> None:
    """Rounds a sequence's K and V to int8 and writes them into the caches, by the definition of the
    layout; the case then holds what the bytes stand for."""
    position = torch.arange(int(case.seq_lens[seq]))
    block = case.block_table[seq, position // case.block_size].long()[:, None]
    offset = (position % case.block_size)[:, None]
    for cache_, dense in ((case.k_cache, case.k), (case.v_cache, case.v)):
        x, flat = dense[seq].float(), cache_.flatten(2)
        d, head = torch.arange(x.shape[2]), torch.arange(x.shape[1])
        if cache_ is case.k_cache:
            at = d // 2 * 2 * case.block_size + 2 * offset + d % 2
        else:
            at = offset // 2 * 2 * x.shape[2] + 2 * d + offset % 2
        largest = x.abs().amax(-1, keepdim=True)
        numbers = (x * (torch.full_like(largest, 127.0) / largest)).round()
        scales = largest / 127.0
        flat[block[..., None], head[:, None], at[:, None]] = numbers.to(torch.int8)
        all_scales = flat[:, :, case.block_size * x.shape[2] :].view(torch.float32)
        all_scales[block, head, offset] = scales[..., 0]
        dense[seq] = numbers * scales


def make_case(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    gen: torch.Generator,
    block_size: int = 16,
    device_layout: str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    """A case with K and V of `dtype`; with an int8 cache they become what its bytes stand for."""
    cache_dtype = cache_dtype or dtype
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    shapes = cache.kv_cache_shapes(
        device_layout, cache_dtype, num_blocks, block_size, num_kv_heads, head_dim
    )
    free = torch.randperm(num_blocks, generator=gen).tolist()
    # Entries after a sequence's blocks must never be read.
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    for seq, count in enumerate(counts):
        for i in range(count):
            table[seq, i] = free.pop()
    size = (num_kv_heads, head_dim)
    k, v = ([torch.randn(n, *size, generator=gen).to(dtype) for n in lengths] for _ in range(2))
    case = PagedCase(
        k=k,
        v=v,
        unrounded=list(zip(k, v, strict=True)),
        k_cache=poisoned(shapes[0], cache_dtype),
        v_cache=poisoned(shapes[1], cache_dtype),
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_size=block_size,
    )
    for seq, length in enumerate(lengths):
        if cache_dtype == torch.int8:
            place_bytes(case, seq)
            continue
        for position in range(length):
            place(case, seq, position)
    return case


def dense_attention(
    case: PagedCase,
    q: Tensor,
    counts: list[int],
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention per query and head, in float64, from the dense K and V."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // case.k[0].shape[1]
    row = 0
    for seq, count in enumerate(counts):
        length = int(case.seq_lens[seq])
        for i in range(length - count, length):
            if i < 0:  # the row of an empty sequence stays 0
                row += 1
                continue
            first = 0 if sliding_window is None else max(0, i - sliding_window + 1)
            k = case.k[seq][first : i + 1].double().repeat_interleave(group, 1)
            v = case.v[seq][first : i + 1].double().repeat_interleave(group, 1)
            logits = (k * q[row].double()).sum(-1) / math.sqrt(q.shape[2])
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            if alibi_slopes is not None:
                keys = torch.arange(first, i + 1, dtype=torch.float64, device=q.device)[:, None]
                logits = logits + alibi_slopes.double() * (keys - i)
            weights = (logits - logits.amax(0)).exp()
            out[row] = (weights[..., None] * v).sum(0) / weights.sum(0)[:, None]
            row += 1
    return out
