from __future__ import annotations

import itertools

import pytest
import torch

from tpengine.ops import cache_ops as cache

from .cases import (
    BACKENDS,
    CACHES,
    CUDA_CACHES,
    DTYPES,
    ISAS,
    backend,
    generator,
    layout_of,
    make_case,
    on_cuda,
    poisoned,
    relative_error,
    same,
    threads,
)
from .cuda_host_library import FAR_BLOCKS, needs_compiler
from .cuda_host_ops import BOUND, FP8, StandIn

NAMES = [*((name, *d) for name, d in itertools.product(BACKENDS, CACHES)), *on_cuda(*CUDA_CACHES)]
CUDA = on_cuda()


def test_shapes_hold_the_same_number_of_elements_on_every_device() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cpu = cache.kv_cache_shapes("cpu", dtype, 10, 16, 2, 64)
        cuda = cache.kv_cache_shapes("cuda", dtype, 10, 16, 2, 64)
        assert {torch.Size(s).numel() for s in (*cpu, *cuda)} == {10 * 16 * 2 * 64}
    assert cpu == ((10, 2, 32, 16, 2), (10, 2, 8, 64, 2))
    assert cache.kv_cache_shapes("cpu", torch.int8, 10, 16, 2, 64) == ((10, 2, 16, 68),) * 2
    assert cuda == ((10, 16, 2, 64),) * 2


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), NAMES, ids=str)
def test_write_fills_the_named_slots_and_nothing_else(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int
) -> None:
    gen = generator(0)
    case = make_case([45, 7], 3, 48, dtype, gen, block_size, layout_of(name), cache_dtype)
    k_cache, v_cache = (poisoned(x.shape, cache_dtype) for x in (case.k_cache, case.v_cache))
    slots = [
        int(case.block_table[seq, i // block_size]) * block_size + i % block_size
        for seq, length in enumerate((45, 7))
        for i in range(length)
    ]
    # strided views of a packed qkv with 5 query heads; two rows that are not cached
    qkv = torch.full((54, 11, 48), float("nan"), dtype=dtype)
    qkv[:52, 5:8] = torch.cat([k for k, _ in case.unrounded])
    qkv[:52, 8:] = torch.cat([v for _, v in case.unrounded])
    order = torch.randperm(54, generator=gen)
    slot_mapping = torch.tensor([*slots, -1, -1], dtype=torch.int32)[order]
    shuffled = qkv[order]
    with backend(name) as op:
        op("write_kv_cache")(shuffled[:, 5:8], shuffled[:, 8:], k_cache, v_cache, slot_mapping)
    assert same(k_cache, case.k_cache)
    assert same(v_cache, case.v_cache)


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), NAMES, ids=str)
def test_rotary_embedding(name: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """On packed qkv of which no row is cached, with dimensions beyond `rotary_dim` left alone."""
    shapes = cache.kv_cache_shapes(layout_of(name), cache_dtype, 1, 16, 2, 64)
    caches = [poisoned(shape, cache_dtype) for shape in shapes]
    for rotary_dim in (2, 24, 48, 64):
        gen, half = generator(rotary_dim), rotary_dim // 2
        angle = torch.arange(60)[:, None] * torch.rand(half, generator=gen)
        table = torch.cat([angle.cos(), angle.sin()], dim=-1)
        qkv = torch.randn(11, 8, 64, generator=gen).to(dtype)
        positions = torch.randint(0, 60, (11,), generator=gen, dtype=torch.int32)
        cos, sin = table.double()[positions.long()][:, None].chunk(2, dim=-1)
        x, y = qkv[:, :6, :half].double(), qkv[:, :6, half:rotary_dim].double()
        before, expected = qkv.clone(), qkv.double()
        expected[:, :6, :rotary_dim] = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)
        slots = torch.full_like(positions, -1)
        with backend(name) as op:
            op("rotary_write_kv_cache")(positions, qkv.flatten(1), table, slots, *caches, 4, 2)
        bound = 1e-6 if dtype == torch.float32 else BOUND[dtype]
        assert relative_error(qkv, expected) < bound, rotary_dim
        assert torch.equal(qkv[:, 6:], before[:, 6:])
        assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), NAMES, ids=str)
def test_rotary_write_equals_rotation_and_then_a_write(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    gen = generator(2)
    num_heads, num_kv_heads, head_dim, num_tokens = 6, 2, 64, 50
    qkv = torch.randn(num_tokens, 10 * head_dim, generator=gen).to(dtype)
    rotated = qkv.clone()
    heads = rotated.view(num_tokens, 10, head_dim)
    table = torch.randn(100, 48, generator=gen)
    positions = torch.randint(0, 100, (num_tokens,), generator=gen, dtype=torch.int32)
    slots = torch.randperm(128, generator=gen)[:num_tokens].int()
    slots[7] = -1
    shapes = cache.kv_cache_shapes(layout_of(name), cache_dtype, 8, 16, num_kv_heads, head_dim)
    fused, apart = ([poisoned(shape, cache_dtype) for shape in shapes] for _ in range(2))
    with backend(name) as op:
        rotary_write, counts = op("rotary_write_kv_cache"), (num_heads, num_kv_heads)
        rotary_write(positions, qkv, table, slots, *fused, *counts)
        rotary_write(positions, rotated, table, torch.full_like(slots, -1), *apart, *counts)
        op("write_kv_cache")(heads[:, 6:8], heads[:, 8:], *apart, slots)
    assert torch.equal(qkv, rotated)
    assert same(fused[0], apart[0])
    assert same(fused[1], apart[1])


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_a_prompt_is_written_the_same_by_several_threads(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Two tokens may share a line of the cache and belong to two threads."""
    gen = generator(5)
    num_tokens, num_blocks = 431, 28
    qkv = torch.randn(num_tokens, 3 * 64, generator=gen).to(dtype)
    table = torch.randn(num_tokens, 64, generator=gen)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    slots = positions + 5
    shapes = cache.kv_cache_shapes("cpu", cache_dtype, num_blocks, 16, 1, 64)
    results = []
    with backend(name) as op:
        for count in (1, *[4] * 10):
            caches = [poisoned(shape, cache_dtype) for shape in shapes]
            rotated = qkv.clone()
            with threads(count):
                op("rotary_write_kv_cache")(positions, rotated, table, slots, *caches, 1, 1)
            results.append((rotated, *caches))
    if cache_dtype == torch.int8:
        num_written = int(
            (~results[0][2].flatten(2)[:, :, 16 * 64 :].view(torch.float32).isnan()).sum()
        )
        assert num_written == num_tokens
    else:
        assert int((~results[0][2].isnan()).sum()) == num_tokens * 64
    for rotated, k_cache, v_cache in results[1:]:
        assert torch.equal(rotated, results[0][0])
        assert same(k_cache, results[0][1])
        assert same(v_cache, results[0][2])


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), NAMES, ids=str)
def test_copy_blocks(name: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    gen = generator(3)
    shapes = cache.kv_cache_shapes(layout_of(name), cache_dtype, 20, 16, 2, 64)
    k_cache, v_cache = ((30 * torch.randn(size, generator=gen)).to(cache_dtype) for size in shapes)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    pairs = [(0, 5), (0, 6), (19, 1), (3, 18)]
    for source, target in pairs:
        expected_k[target], expected_v[target] = k_cache[source], v_cache[source]
    with backend(name) as op:
        op("copy_blocks")(k_cache, v_cache, torch.tensor(pairs))
        op("copy_blocks")(k_cache, v_cache, torch.empty(0, 2, dtype=torch.int64))
    assert same(k_cache, expected_k)
    assert same(v_cache, expected_v)


@pytest.mark.parametrize("name", ["reference", *CUDA])
def test_blocks_are_copied_packed_and_unpacked(name: str) -> None:
    pool = torch.randn(6, 20, 8, 2, 80, generator=generator(4))  # 3 layers' K and V
    expected, pairs = pool.clone(), [(0, 5), (0, 6), (19, 1), (3, 18)]
    for source, target in pairs:
        expected[:, target] = pool[:, source]
    packed, ids = torch.full((3, 6, 8, 2, 80), torch.nan), torch.tensor([7, 2, 19])
    with backend(name) as op:
        op("copy_cache_blocks")(pool, torch.tensor(pairs))
        assert torch.equal(pool, expected)
        op("pack_blocks")(packed, pool, ids)
        assert torch.equal(packed, pool[:, ids].transpose(0, 1))
        op("unpack_blocks")(pool, packed.mul_(2), ids)
    expected[:, ids] *= 2
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("name", "dtype", "cache_dtype"),
    [*(("reference", *dtypes) for dtypes in CUDA_CACHES), *on_cuda(*CUDA_CACHES)],
    ids=str,
)
def test_gather_kv(name: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """The tokens of each sequence, of which one has none, and no more; in fp8 with scales."""
    lengths, scales = [1, 40, 0, 17, 16], (0.25, 2.0) if cache_dtype == FP8 else (1.0, 1.0)
    start = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    case = make_case(lengths, 2, 64, dtype, generator(3), 16, "cuda", cache_dtype)
    out = [torch.full((80, 2, 64), 7.0, dtype=dtype) for _ in range(2)]
    with backend(name) as op:
        op("gather_kv")(*out, case.k_cache, case.v_cache, case.block_table, start, *scales)
    for gathered, parts, scale in zip(out, (case.k, case.v), scales, strict=True):
        stored = torch.cat(parts).to(cache_dtype).float()
        assert torch.equal(gathered[:74], (stored * scale).to(dtype))
        assert (gathered[74:] == 7.0).all()


@pytest.mark.parametrize("name", CUDA)
def test_fp8_saturates_and_keeps_nan(name: str) -> None:
    special = torch.tensor([1e4, -1e4, torch.nan, float("inf"), 448.0, 0.001, -0.0, 17.0])
    k = special.repeat(4).to(torch.bfloat16).view(1, 1, 32)
    caches = [poisoned((1, 8, 1, 32), FP8) for _ in range(2)]
    with backend(name) as op:
        op("write_kv_cache")(k, k, *caches, torch.tensor([5]).int(), 0.25, 2.0)
    values = caches[0][0, 5, 0, :8].float() * 0.25
    assert values[2].isnan()
    expected = torch.tensor([112.0, -112.0, torch.nan, 112.0, 112.0, 0.001, 0.0, 17.0])
    torch.testing.assert_close(values, expected, rtol=0.07, atol=0, equal_nan=True)


@needs_compiler
def test_offsets_beyond_32_bits() -> None:
    """Tokens that are written to the end of a huge cache, gathered from there, and copied there."""
    far, near = StandIn(1, is_far=True), backend("reference")
    gen = generator(128)
    k, v = torch.randn(2, 21, 2, 128, generator=gen).to(torch.bfloat16)
    slots = torch.randperm(48, generator=gen)[:21].int()
    caches, expected = ([poisoned((6, 8, 2, 128), k.dtype) for _ in range(2)] for _ in range(2))
    table, start = torch.tensor([[2, 5, 0]], dtype=torch.int32), torch.tensor([0, 20]).int()
    actual, gathered = (torch.zeros(2, 20, 2, 128, dtype=k.dtype) for _ in range(2))
    far("write_kv_cache")(k, v, *caches, slots + 8 * FAR_BLOCKS)
    far("gather_kv")(*actual, *caches, table + FAR_BLOCKS, start, 1.0, 1.0)
    with near as op:
        op("write_kv_cache")(k, v, *expected, slots)
        op("gather_kv")(*gathered, *expected, table, start, 1.0, 1.0)
    assert all(same(a, b) for a, b in zip((*caches, actual), (*expected, gathered), strict=True))
    far("copy_blocks")(*caches, torch.tensor([(2, 4)]) + FAR_BLOCKS)
    assert same(caches[0][4], caches[0][2])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_of_unusual_numbers(name: str, dtype: torch.dtype) -> None:
    """Zeros and numbers next to zero, ties, and numbers that are not finite, in K and V alike."""
    k = torch.zeros(5, 1, 16)
    k[1, 0, 3], k[2, 0, :4] = -1e-35, torch.tensor([127.0, -2.5, 1.5, 0.5])
    k[3, 0, 7], k[4, 0, 15] = float("nan"), float("-inf")
    shape = cache.kv_cache_shapes("cpu", torch.int8, 1, 8, 1, 16)[0]
    k_cache, v_cache = poisoned(shape, torch.int8), poisoned(shape, torch.int8)
    with backend(name) as op:
        op("write_kv_cache")(k.to(dtype), k.to(dtype), k_cache, v_cache, torch.arange(5).int())
    numbers = (
        k_cache.flatten()[: 8 * 16].view(8, 8, 2).transpose(0, 1).reshape(8, 16)[:5],
        v_cache.flatten()[: 8 * 16].view(4, 16, 2).transpose(1, 2).reshape(8, 16)[:5],
    )
    for stored in numbers:
        assert stored[2].tolist() == [127, -2, 2, 0, *[0] * 12]
        assert not stored[[0, 1, 3, 4]].any()
    for x in (k_cache, v_cache):
        scales = x.flatten()[8 * 16 :].view(torch.float32)
        assert scales[[0, 2]].tolist() == [0.0, 1.0]
        assert 0 <= float(scales[1]) < 1e-36
        assert scales[3:].isnan().all()
