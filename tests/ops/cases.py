"""Random paged caches with NaN in every unused slot, and dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tpengine.ops import cache, library

NAN = float("nan")
ISAS = library.supported_cpu_isas()
BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16)
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
    """Looks ops up by name: the plain-torch reference, or the kernels of an instruction set."""
    if name == "reference":
        yield library.reference_of
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


def hugging_face_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Hugging Face's models write it, with float64 in place of float32."""
    y = x.double()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    # A float32 weight is Gemma's: rounded once, at the end.
    return weight.double() * y.to(weight.dtype).double()


def nan_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, NAN)


@dataclass
class PagedCase:
    k: list[Tensor]  # dense, per sequence [seq_len, num_kv_heads, head_dim]
    v: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    block_size: int

    def queries(self, num_heads: int, counts: list[int], gen: torch.Generator) -> Tensor:
        """Random queries `[sum(counts), num_heads, head_dim]`, a view of a packed qkv."""
        kv_heads, head_dim = self.k[0].shape[1:]
        qkv = torch.full((sum(counts), num_heads + 2 * kv_heads, head_dim), NAN)
        qkv[:, :num_heads] = torch.randn(sum(counts), num_heads, head_dim, generator=gen)
        return qkv.to(self.k_cache.dtype)[:, :num_heads]


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


def make_case(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    gen: torch.Generator,
    block_size: int = 16,
    device_layout: str = "cpu",
) -> PagedCase:
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    shapes = cache.kv_cache_shapes(
        device_layout, dtype, num_blocks, block_size, num_kv_heads, head_dim
    )
    free = torch.randperm(num_blocks, generator=gen).tolist()
    # Entries after a sequence's blocks must never be read.
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    for seq, count in enumerate(counts):
        for i in range(count):
            table[seq, i] = free.pop()
    size = (num_kv_heads, head_dim)
    case = PagedCase(
        k=[torch.randn(n, *size, generator=gen).to(dtype) for n in lengths],
        v=[torch.randn(n, *size, generator=gen).to(dtype) for n in lengths],
        k_cache=torch.full(shapes[0], NAN, dtype=dtype),
        v_cache=torch.full(shapes[1], NAN, dtype=dtype),
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_size=block_size,
    )
    for seq, length in enumerate(lengths):
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
