"""The CUDA kernels' own source, compiled for the CPU by a stand-in for CUDA (cuda_host/).

What this cannot show: memory ordering of a real GPU, and speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .cases import dense_attention, generator, make_case, nan_like, relative_error

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUND = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
SEEDS = (0, 1)  # round-robin, and warps that run ahead of each other

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _struct(*fields: tuple[str, object]) -> type[ctypes.Structure]:
    return type("Args", (ctypes.Structure,), {"_fields_": list(fields)})


P, I32, I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
WriteCacheArgs = _struct(
    ("source", P * 2), ("cache", P * 2), ("slot_mapping", P), ("token_stride", I64 * 2),
    ("head_stride", I64 * 2), ("num_kv_heads", I32), ("head_dim", I32),
)  # fmt: skip
NormArgs = _struct(
    ("out", P), ("x", P), ("residual", P), ("weight", P), ("out_token_stride", I64),
    ("out_head_stride", I64), ("x_token_stride", I64), ("x_head_stride", I64),
    ("residual_stride", I64), ("heads_per_token", I32), ("size", I32), ("eps", ctypes.c_float),
)  # fmt: skip
PagedAttentionArgs = _struct(
    ("out", P), ("q", P), ("k_cache", P), ("v_cache", P), ("block_table", P), ("seq_lens", P),
    ("alibi_slopes", P), ("out_token_stride", I64), ("out_head_stride", I64),
    ("q_token_stride", I64), ("q_head_stride", I64), ("block_table_stride", I64),
    ("num_heads", I32), ("num_kv_heads", I32), ("head_dim", I32), ("block_size", I32),
    ("sliding_window", I32), ("scale", ctypes.c_float),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("cuda_host") / "libcuda_host.so"
    command = [
        "g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE",
        "-I", str(Path(__file__).parent / "cuda_host"), "-I", str(ROOT / "csrc" / "cuda"),
        str(Path(__file__).parent / "cuda_host" / "entry.cpp"), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_write_kv_cache(kernels: ctypes.CDLL, dtype: torch.dtype, head_dim: int) -> None:
    gen = generator(0)
    case = make_case([21, 3], 2, head_dim, dtype, gen, device_layout="cuda")
    k_cache, v_cache = nan_like(case.k_cache), nan_like(case.v_cache)
    slots = [
        int(case.block_table[seq, i // 16]) * 16 + i % 16
        for seq, n in ((0, 21), (1, 3))
        for i in range(n)
    ]
    qkv = torch.full((25, 8, head_dim), float("nan"), dtype=dtype)
    qkv[:24, 4:6], qkv[:24, 6:] = torch.cat(case.k), torch.cat(case.v)
    slot_mapping = torch.tensor([*slots, -1], dtype=torch.int32)
    unit = 16 if head_dim == 64 else dtype.itemsize
    ratio = unit // dtype.itemsize
    args = WriteCacheArgs(
        (P * 2)(qkv[:, 4:].data_ptr(), qkv[:, 6:].data_ptr()),
        (P * 2)(k_cache.data_ptr(), v_cache.data_ptr()), slot_mapping.data_ptr(),
        (I64 * 2)(*[8 * head_dim // ratio] * 2), (I64 * 2)(*[head_dim // ratio] * 2), 2,
        head_dim // ratio,
    )  # fmt: skip
    kernels.write_kv_cache(unit, ctypes.byref(args), 25)
    for written, expected in ((k_cache, case.k_cache), (v_cache, case.v_cache)):
        assert torch.equal(written.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(kernels: ctypes.CDLL, dtype: torch.dtype, seed: int) -> None:
    gen = generator(1)
    kernels.set_schedule(ctypes.c_uint64(seed))
    for size, add in ((7, False), (300, True), (1000, False)):
        x, residual = (torch.randn(5, size, generator=gen).to(dtype) for _ in range(2))
        weight = torch.randn(size, generator=gen).to(dtype)
        out, summed = nan_like(x), residual + x
        args = NormArgs(
            out.data_ptr(), x.data_ptr(), residual.data_ptr() if add else None,
            weight.data_ptr(), size, 0, size, 0, size, 1, size, 1e-5,
        )  # fmt: skip
        kernels.rms_norm(DTYPES.index(dtype), ctypes.byref(args), 5)
        y = (summed if add else x).double()
        expected = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        expected = expected.to(dtype).double() * weight.double()
        assert relative_error(out, expected) < BOUND[dtype]
        if add:
            assert torch.equal(residual, summed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_attention(kernels: ctypes.CDLL, dtype: torch.dtype, seed: int) -> None:
    gen = generator(2)
    kernels.set_schedule(ctypes.c_uint64(seed))
    for num_heads, num_kv_heads, head_dim, block_size, alibi, window in (
        (6, 1, 64, 16, False, None),
        (4, 4, 80, 8, True, None),
        (7, 1, 256, 32, False, 9),
    ):
        lengths = [1, block_size - 1, block_size + 1, 0, 70]
        case = make_case(
            lengths, num_kv_heads, head_dim, dtype, gen, block_size, device_layout="cuda"
        )
        q = case.queries(num_heads, [1] * 5, gen)
        out = torch.full((5, num_heads, head_dim), float("nan"), dtype=dtype)
        slopes = torch.logspace(-3, 0, num_heads) if alibi else None
        args = PagedAttentionArgs(
            out.data_ptr(), q.data_ptr(), case.k_cache.data_ptr(), case.v_cache.data_ptr(),
            case.block_table.data_ptr(), case.seq_lens.data_ptr(),
            None if slopes is None else slopes.data_ptr(), out.stride(0), out.stride(1),
            q.stride(0), q.stride(1), case.block_table.stride(0), num_heads, num_kv_heads,
            head_dim, block_size, window or 2**31 - 1, head_dim**-0.5,
        )  # fmt: skip
        kernels.paged_attention(DTYPES.index(dtype), ctypes.byref(args), 5)
        assert relative_error(out, dense_attention(case, q, [1] * 5, slopes, window)) < BOUND[dtype]
