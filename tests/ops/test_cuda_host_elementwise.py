"""The CUDA cache and fused kernels' own source on the CPU stand-in, against plain torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tpengine.ops import reference

from .cases import generator, hugging_face_norm, make_case, nan_like, relative_error, same
from .cuda_host_library import (
    BOUND,
    F32,
    FAR_BLOCKS,
    I32,
    I64,
    P,
    far_pointer,
    load_host,
    needs_compiler,
    pointer,
    set_schedule,
    struct,
)

pytestmark = needs_compiler

BlockPlace = struct(
    ("base", P), ("ids", P), ("id_stride", I64), ("block_stride", I64), ("piece_stride", I64)
)
CopyBlocksArgs = struct(("source", BlockPlace), ("target", BlockPlace), ("piece_bytes", I64))
StoreArgs = struct(
    ("q", P), ("k", P), ("v", P), ("k_cache", P), ("v_cache", P), ("slot_mapping", P),
    ("positions", P), ("cos_sin_cache", P), ("q_token_stride", I64), ("q_head_stride", I64),
    ("k_token_stride", I64), ("k_head_stride", I64), ("v_token_stride", I64),
    ("v_head_stride", I64), ("num_heads", I32), ("num_kv_heads", I32), ("head_dim", I32),
    ("rotary_dim", I32), ("is_neox", I32), ("num_positions", I32), ("k_inverse_scale", F32),
    ("v_inverse_scale", F32),
)  # fmt: skip
GatherArgs = struct(
    ("k", P), ("v", P), ("k_cache", P), ("v_cache", P), ("block_table", P), ("token_start", P),
    ("block_table_stride", I64), ("num_tokens", I32), ("num_seqs", I32), ("block_size", I32),
    ("row_size", I32), ("k_scale", F32), ("v_scale", F32),
)  # fmt: skip
NormArgs = struct(
    ("out", P), ("x", P), ("residual", P), ("weight", P), ("out_token_stride", I64),
    ("out_head_stride", I64), ("x_token_stride", I64), ("x_head_stride", I64),
    ("residual_stride", I64), ("heads_per_token", I32), ("size", I32), ("eps", F32),
)  # fmt: skip
GatedArgs = struct(
    ("out", P), ("x", P), ("out_stride", I64), ("x_stride", I64), ("size", I32)
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.25, 2.0


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_host("elementwise")


def _caches(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.full((6, 8, 2, head_dim), float("nan")).to(dtype) for _ in range(2))


class Packed:
    """Tokens with 4 query and 2 kv heads, in a packed qkv, and where they go."""

    def __init__(self, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
        gen = generator(head_dim + rotary_dim)
        self.dtype, self.head_dim = dtype, head_dim
        self.qkv = torch.randn(21, 8 * head_dim, generator=gen).to(dtype)
        self.positions = torch.randint(0, 40, (21,), generator=gen, dtype=torch.int32)
        self.table = torch.randn(40, rotary_dim, generator=gen)
        self.slots = torch.randperm(48, generator=gen)[:21].int()
        self.slots[[3, 20]] = -1

    def args(self, k_cache: Tensor | None, v_cache: Tensor | None, is_neox: bool) -> object:
        d, row = self.head_dim, 8 * self.head_dim
        first = self.qkv.data_ptr()
        bytes_per_head = d * self.qkv.element_size()
        is_fp8 = k_cache is not None and k_cache.dtype == FP8
        return StoreArgs(
            first, first + 4 * bytes_per_head, first + 6 * bytes_per_head, pointer(k_cache),
            pointer(v_cache), pointer(self.slots), pointer(self.positions), pointer(self.table),
            row, d, row, d, row, d, 4, 2, d, self.table.shape[1], is_neox, 40,
            1 / K_SCALE if is_fp8 else 1.0, 1 / V_SCALE if is_fp8 else 1.0,
        )  # fmt: skip


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (20, 12), (32, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_and_cache_write(
    kernels: ctypes.CDLL, dtype: torch.dtype, head_dim: int, rotary_dim: int, is_neox: bool
) -> None:
    set_schedule(kernels, 1)
    for cache_dtype in (dtype, *((FP8,) if dtype != torch.float32 else ())):
        for wide in (False, True) if head_dim > 20 else (False,):
            packed = Packed(dtype, head_dim, rotary_dim)
            before = packed.qkv.clone()
            caches, expected = _caches(cache_dtype, head_dim), _caches(cache_dtype, head_dim)
            args = packed.args(*caches, is_neox)
            kernels.store_kv(DTYPES.index(dtype), cache_dtype == FP8, wide, ctypes.byref(args), 21)
            scales = (K_SCALE, V_SCALE) if cache_dtype == FP8 else ()
            reference.rotary_write_kv_cache(
                packed.positions, before, packed.table, packed.slots, *expected, 4, 2, is_neox,
                *scales,
            )  # fmt: skip
            assert relative_error(packed.qkv, before) < 1e-6
            # What is cached is what is left in qkv; the reference rounds its products elsewhere.
            heads = packed.qkv.view(21, 8, head_dim)
            again = _caches(cache_dtype, head_dim)
            reference.write_kv_cache(heads[:, 4:6], heads[:, 6:], *again, packed.slots, *scales)
            for cache, exact, close in zip(caches, again, expected, strict=True):
                assert same(cache, exact)
                numbers = close.float().nan_to_num(nan=0.0)
                assert relative_error(cache.float().nan_to_num(nan=0.0), numbers) < 1e-2


def test_rotation_without_a_cache(kernels: ctypes.CDLL) -> None:
    packed = Packed(torch.bfloat16, 64, 48)
    expected = packed.qkv.clone().view(21, 8, 64)
    args = packed.args(None, None, True)
    kernels.store_kv(2, False, True, ctypes.byref(args), 21)
    reference.rotary_embedding(
        packed.positions, expected[:, :4], expected[:, 4:6], packed.table, True
    )
    assert relative_error(packed.qkv.view(21, 8, 64), expected) < 1e-6


def test_fp8_saturates_and_keeps_nan(kernels: ctypes.CDLL) -> None:
    packed = Packed(torch.bfloat16, 32, 0)
    special = torch.tensor([1e4, -1e4, float("nan"), float("inf"), 448.0, 0.001, -0.0, 17.0])
    packed.qkv[:, 4 * 32 :] = special.repeat(16).to(torch.bfloat16)
    caches = _caches(FP8, 32)
    args = packed.args(*caches, True)
    kernels.store_kv(2, True, True, ctypes.byref(args), 21)
    slot = int(packed.slots[0])
    found = caches[0].float().view(48, 2, 32)[slot, 0, :8] * K_SCALE
    expected = [112.0, -112.0, None, 112.0, 112.0, 0.001, 0.0, 17.0]
    assert found[2].isnan()
    for x, y in zip(found.tolist(), expected, strict=True):
        assert y is None or x == pytest.approx(y, rel=0.07)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_kv(kernels: ctypes.CDLL, dtype: torch.dtype, wide: bool) -> None:
    lengths = [1, 40, 0, 17, 16]
    start = torch.tensor([0, 1, 41, 41, 58, 74], dtype=torch.int32)
    case = make_case(lengths, 2, 64, dtype, generator(3), device_layout="cuda")
    for cache_dtype in (dtype, *((FP8,) if dtype != torch.float32 else ())):
        caches = case.k_cache.to(cache_dtype), case.v_cache.to(cache_dtype)
        k, v = (torch.full((80, 2, 64), 7.0, dtype=dtype) for _ in range(2))
        expected = k.clone(), v.clone()
        scales = (K_SCALE, V_SCALE) if cache_dtype == FP8 else (1.0, 1.0)
        args = GatherArgs(
            pointer(k), pointer(v), *map(pointer, caches), pointer(case.block_table),
            pointer(start), case.block_table.stride(0), 80, 5, 16, 128, *scales,
        )  # fmt: skip
        kernels.gather_kv(DTYPES.index(dtype), cache_dtype == FP8, wide, ctypes.byref(args))
        reference.gather_kv(*expected, *caches, case.block_table, start, *scales)
        assert torch.equal(k, expected[0])
        assert torch.equal(v, expected[1])
        assert (k[74:] == 7.0).all()


def test_offsets_beyond_32_bits(kernels: ctypes.CDLL) -> None:
    """Tokens that are written to the end of a huge cache, gathered from there, and copied there."""
    packed = Packed(torch.bfloat16, 128, 0)
    caches = [torch.full((6, 8, 2, 128), float("nan")).to(torch.bfloat16) for _ in range(2)]
    args = packed.args(*caches, True)
    slots = torch.where(packed.slots < 0, packed.slots, packed.slots + 8 * FAR_BLOCKS)
    args.slot_mapping = pointer(slots)
    args.k_cache, args.v_cache = map(far_pointer, caches)
    kernels.store_kv(2, False, True, ctypes.byref(args), 21)
    heads = packed.qkv.view(21, 8, 128)
    expected = [torch.full_like(cache, float("nan")) for cache in caches]
    reference.write_kv_cache(heads[:, 4:6], heads[:, 6:], *expected, packed.slots)
    assert all(same(a, b) for a, b in zip(caches, expected, strict=True))
    table, start = torch.tensor([[2, 5, 0]], dtype=torch.int32), torch.tensor([0, 20]).int()
    far_table = table + FAR_BLOCKS
    found, gathered = (torch.zeros(2, 20, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    gather = GatherArgs(
        pointer(found[0]), pointer(found[1]), *map(far_pointer, caches), pointer(far_table),
        pointer(start), 3, 20, 1, 8, 256, 1.0, 1.0,
    )  # fmt: skip
    kernels.gather_kv(2, False, True, ctypes.byref(gather))
    reference.gather_kv(*gathered, *caches, table, start)
    assert same(found, gathered)
    pairs, size = torch.tensor([(2, 4)]) + FAR_BLOCKS, caches[0].stride(0) * 2
    places = [
        BlockPlace(far_pointer(caches[0]), pairs.data_ptr() + 8 * side, 2, size, 0)
        for side in (0, 1)
    ]
    kernels.copy_blocks(ctypes.byref(CopyBlocksArgs(*places, size)), 1, 1)
    assert same(caches[0][4], caches[0][2])


def test_blocks_are_copied_packed_and_unpacked(kernels: ctypes.CDLL) -> None:
    gen = generator(4)
    cache = torch.randn(6, 20, 8, 2, 80, generator=gen)  # 3 layers' K and V; 5120 bytes a piece
    pairs = torch.tensor([(0, 5), (0, 6), (19, 1), (3, 18)])
    expected = cache.clone()
    reference.copy_cache_blocks(expected, pairs)
    piece, item = cache.stride(1) * 4, cache.stride(0) * 4
    inside = [cache.data_ptr(), pairs.data_ptr(), 2, piece, item]
    target = [cache.data_ptr(), pairs.data_ptr() + 8, 2, piece, item]
    args = CopyBlocksArgs(BlockPlace(*inside), BlockPlace(*target), piece)
    kernels.copy_blocks(ctypes.byref(args), 4, 6)
    assert torch.equal(cache, expected)
    ids = torch.tensor([7, 2, 19])
    packed = torch.full((3, 6, 8, 2, 80), float("nan"))
    outside = BlockPlace(packed.data_ptr(), None, 1, packed.stride(0) * 4, piece)
    inside = BlockPlace(cache.data_ptr(), ids.data_ptr(), 1, piece, item)
    kernels.copy_blocks(ctypes.byref(CopyBlocksArgs(inside, outside, piece)), 3, 6)
    assert torch.equal(packed, cache[:, ids].transpose(0, 1))
    packed.mul_(2)
    expected[:, ids] *= 2
    kernels.copy_blocks(ctypes.byref(CopyBlocksArgs(outside, inside, piece)), 3, 6)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(kernels: ctypes.CDLL, dtype: torch.dtype, seed: int) -> None:
    gen = generator(1)
    set_schedule(kernels, seed)
    # One row longer than what the threads keep, with wide and with narrow accesses.
    for size, add, wide in (
        (7, False, False), (304, True, True), (1500, True, False), (9000, True, True),
    ):  # fmt: skip
        x, residual = (torch.randn(3, size, generator=gen).to(dtype) for _ in range(2))
        weight = torch.randn(size, generator=gen).to(dtype)
        out, summed = nan_like(x), residual + x
        args = NormArgs(
            out.data_ptr(), x.data_ptr(), residual.data_ptr() if add else None,
            weight.data_ptr(), size, 0, size, 0, size, 1, size, 1e-5,
        )  # fmt: skip
        kernels.rms_norm(DTYPES.index(dtype), False, wide, ctypes.byref(args), 3)
        expected = hugging_face_norm(summed if add else x, weight, 1e-5)
        assert relative_error(out, expected) < BOUND[dtype]
        if add:
            assert torch.equal(residual, summed)


def test_rms_norm_per_head_in_place(kernels: ctypes.CDLL) -> None:
    qkv = torch.randn(5, 10, 64, generator=generator(2)).to(torch.bfloat16)
    before, weight = qkv.clone(), torch.randn(64, generator=generator(3))
    args = NormArgs(
        qkv.data_ptr(), qkv.data_ptr(), None, weight.data_ptr(), 640, 64, 640, 64, 0, 6, 64, 1e-6
    )
    kernels.rms_norm(2, True, True, ctypes.byref(args), 30)
    expected = hugging_face_norm(before[:, :6], weight, 1e-6)
    assert relative_error(qkv[:, :6], expected) < 2e-3
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations(kernels: ctypes.CDLL, dtype: torch.dtype, activation: str) -> None:
    gen = generator(5)
    code = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"].index(activation)
    for size, wide in ((45, False), (2560, True)):
        x = (torch.randn(5, 2 * size, generator=gen) * 4).to(dtype)
        x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, -0.0  # saturated, and exp's ends
        out = torch.full((5, size), float("nan"), dtype=dtype)
        args = GatedArgs(out.data_ptr(), x.data_ptr(), size, 2 * size, size)
        kernels.gated(DTYPES.index(dtype), code, wide, ctypes.byref(args), 5)
        expected = torch.empty(5, size, dtype=torch.float64)
        getattr(reference, activation)(expected, x.double())
        assert relative_error(out, expected) < BOUND[dtype]
