"""Schemas, fakes, errors, and the choice of instruction set."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from support.programs import python

from tpengine.errors import NativeLibraryError
from tpengine.ops import cache_ops as cache
from tpengine.ops import library

from .cases import ISAS, replaced, use_cpu_isa

needs_kernels = pytest.mark.skipif(not ISAS, reason="the native library is not built")


def _arguments() -> dict[str, tuple]:
    """Valid arguments for every op."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    k_cache, v_cache = (
        randn(*shape) for shape in cache.kv_cache_shapes("cpu", torch.float32, 6, 16, 2, 64)
    )
    table = ints(3, 1, 0, 2).view(2, 2)
    q, out = randn(5, 4, 64), torch.zeros(5, 4, 64)
    rotary = ints(0, 7, 3, 1, 2), randn(8, 64)
    slots = ints(0, 9, -1, 17, 95)
    x, y, weight = randn(5, 32), randn(5, 32), randn(32)
    groups = torch.zeros(2 * (512 + 64), dtype=torch.uint8)  # two panels of one group of 32
    return {
        "write_kv_cache": (randn(5, 2, 64), randn(5, 2, 64), k_cache, v_cache, slots),
        "rotary_write_kv_cache": (
            rotary[0], randn(5, 512), rotary[1], slots, k_cache, v_cache, 4, 2,
        ),
        "copy_blocks": (k_cache, v_cache, torch.tensor([[0, 1], [2, 3]])),
        "copy_cache_blocks": (randn(4, 6, 32), torch.tensor([[0, 1], [2, 3]])),
        "pack_blocks": (randn(2, 4, 32), randn(4, 6, 32), torch.tensor([5, 3])),
        "unpack_blocks": (randn(4, 6, 32), randn(2, 4, 32), torch.tensor([5, 3])),
        "gather_kv": (
            randn(40, 2, 64), randn(40, 2, 64), k_cache, v_cache, table, ints(0, 20, 40), 1.0, 1.0,
        ),
        "plan_decode": (
            torch.zeros(3, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32),
            ints(20, 300), 32, None,
        ),
        "paged_attention": (
            out[:2], q[:2], k_cache, v_cache, table, ints(20, 32), 0.125, randn(4), 7, 5.0,
        ),
        "prefill_attention": (
            out, q, k_cache, v_cache, table, ints(0, 2, 5), ints(20, 32), 0.125, None, None,
        ),
        "embedding": (torch.zeros(5, 32), randn(9, 32), ints(8, 0, 3, 3, 1)),
        "rms_norm": (torch.zeros(5, 32), x, weight, 1e-6),
        "add_rms_norm": (torch.zeros(5, 32), x, y, weight, 1e-6),
        "layer_norm": (torch.zeros(5, 32), x, weight, randn(32), 1e-5),
        "add_layer_norm": (torch.zeros(5, 32), x, y, None, None, 1e-5),
        "accumulate": (torch.zeros(5, 32), x),
        "add_gated": (torch.zeros(5, 32), x, randn(5, 1)),
        "relu": (randn(5, 32),),
        "silu": (randn(5, 32),),
        "gelu": (randn(5, 32),),
        "gelu_tanh": (randn(5, 32),),
        "silu_and_mul": (torch.zeros(5, 16), x),
        "gelu_and_mul": (torch.zeros(5, 16), x),
        "gelu_tanh_and_mul": (torch.zeros(5, 16), x),
        "pack_linear_weight": (torch.zeros(64 * 32), randn(40, 32)),
        "packed_linear": (torch.zeros(5, 40), x, randn(64 * 32), randn(40)),
        "quantize_weight": (groups, randn(40, 32), None, 4, 32),
        "pack_groups": (
            groups, torch.zeros(40, 1, 16, dtype=torch.uint8), randn(40, 1).half(), None, 4, 32, 2,
        ),
        "dequantize_blocks": (torch.zeros(3, 512), torch.zeros(3, 2, 210, dtype=torch.uint8), 14),
        "quantized_linear": (torch.zeros(5, 40), x, groups, None, 4, 32, 0),
        "quantized_embedding": (
            torch.zeros(5, 32), groups, ints(0, 39, 2, 2, 1), 40, 4, 32, 0, 2.0,
        ),
        "weight_only_linear": (torch.zeros(5, 40), x, groups, randn(40), 4, 32, 0),
        "dequantize_weight": (torch.zeros(32, 32), groups, 32, 40, 4, 32, 0),
        "add_lora": (
            torch.zeros(5, 40), x, randn(2, 2, 1, 2, 4, 16), randn(2, 3, 4, 16),
            ints(4, 0, 3, 2).view(2, 2), ints(0, 30, 40), ints(4, 1, 2),
            ints(1, 0, 2, 0, 2, 3).view(2, 3), randn(3, 8),
        ),
        "top_experts": (torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2), randn(5, 3), True),
        "expert_mlp": (
            torch.zeros(5, 32), x, ints(0, 1, 2, 2, 1).view(5, 1), torch.ones(5, 1),
            randn(3, 32 * 32), randn(3, 32 * 16),
        ),
        "argmax": (torch.zeros(5, dtype=torch.int64), x, torch.zeros(5)),
        "sample_tokens": (
            torch.zeros(5, dtype=torch.int64), x, torch.ones(5), ints(0, 1, 2, 3, 4),
            torch.full((5,), 0.9), torch.zeros(5),
            torch.rand(5, generator=gen, dtype=torch.float64),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", library.REFERENCES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.tpengine, name).default, _arguments()[name])


GPU_OPS = {
    "copy_cache_blocks", "dequantize_weight", "gather_kv", "pack_blocks", "plan_decode",
    "unpack_blocks", "weight_only_linear",
}  # fmt: skip
"""Ops that only an engine on a GPU calls; on CPU they have no kernel, only the reference."""


@needs_kernels
@pytest.mark.parametrize("name", sorted({*library.REFERENCES} - GPU_OPS))
def test_every_op_has_a_cpu_kernel(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tpengine::{name}", "CPU")


WRONG = [
    ("write_kv_cache", replaced(0, lambda t: t.half()), "k is float16.*float32 and bfloat16"),
    ("write_kv_cache", replaced(1, lambda t: t.bfloat16()), "v is bfloat16; expected float32"),
    ("write_kv_cache", replaced(0, lambda t: t[:, :1]), r"v has shape \[5, 2, 64\].*size 1"),
    ("write_kv_cache", replaced(4, lambda t: t + 1), r"slot_mapping\[4\] is 96.*below 96"),
    ("write_kv_cache", replaced(4, lambda t: t.long()), "slot_mapping is int64; expected int32"),
    (
        "write_kv_cache",
        lambda a: (*a, 0.5, 1.0),
        "k_scale.* 0.5.*; a CPU cache takes no scales.*: expected 1",
    ),
    (
        "write_kv_cache",
        lambda a: (
            *a[:2],
            *[torch.zeros(6, 2, 16, 68, dtype=torch.int8)[:, :, :, i:] for i in (0, 4)],
            a[4],
        ),
        r"v_cache has shape \[6, 2, 16, 64\]; expected size 68",
    ),
    (
        "paged_attention",
        lambda a: (*a[:2], *[torch.zeros(6, 2, 16, 64, dtype=torch.int8)] * 2, *a[4:]),
        "head_dim of an int8 cache is 60; expected a multiple of 16",
    ),
    ("rotary_write_kv_cache", replaced(0, lambda t: t + 1), r"positions\[1\] is 8.*rows 0 to 7"),
    ("rotary_write_kv_cache", replaced(2, lambda t: t[:, :7] + 0), "is 7; expected an even"),
    ("rotary_write_kv_cache", replaced(2, lambda t: t.repeat(1, 2)), "is 128; the limit is 64"),
    ("rotary_write_kv_cache", replaced(6, lambda n: n + 1), r"qkv has shape.*expected size 576"),
    ("copy_blocks", replaced(2, lambda t: t + 3), "names block 6; the cache has 6"),
    ("paged_attention", replaced(5, lambda t: t + 1), r"seq_lens\[1\] is 33.*0 to 32 tokens"),
    ("paged_attention", replaced(1, lambda t: t[:, :3]), "out has shape.*expected size 3"),
    ("paged_attention", replaced(8, lambda n: 0), "sliding_window is 0; expected at least 1"),
    ("paged_attention", replaced(9, lambda cap: -cap), "softcap is -5.*expected a number above 0"),
    ("paged_attention", replaced(7, lambda t: t[:3]), r"alibi_slopes has shape \[3\].*size 4"),
    ("paged_attention", replaced(2, lambda t: t.transpose(0, 1)), "v_cache has shape"),
    ("prefill_attention", replaced(5, lambda t: t.flip(0)), r"query_start_loc\[0:2\] is 5, 2"),
    ("embedding", replaced(2, lambda t: t + 1), r"token_ids\[0\] is 9.*rows 0 to 8"),
    ("embedding", replaced(2, lambda t: t - 1), r"token_ids\[1\] is -1.*rows 0 to 8"),
    ("embedding", replaced(2, lambda t: t.long()), "token_ids is int64; expected int32"),
    ("embedding", replaced(0, lambda t: t[1:]), r"out has shape \[4, 32\].*size 5"),
    ("rms_norm", replaced(2, lambda t: t[::2]), r"weight has shape \[16\].*size 32"),
    ("rms_norm", replaced(1, lambda t: t.T), r"stride 32 in dimension 1; expected 1"),
    ("add_rms_norm", replaced(2, lambda t: t[:4]), r"residual has shape \[4, 32\].*size 5"),
    ("layer_norm", replaced(2, lambda t: t[1:]), r"weight has shape \[31\].*size 32"),
    ("layer_norm", replaced(3, lambda t: t.bfloat16()), "bias is bfloat16; expected float32"),
    ("layer_norm", replaced(0, lambda t: t[1:]), r"out has shape \[4, 32\].*size 5"),
    ("layer_norm", replaced(1, lambda t: t[:, None]), r"x has shape.*expected 2 dimensions"),
    ("add_layer_norm", replaced(2, lambda t: t[:4]), r"residual has shape \[4, 32\].*size 5"),
    ("add_layer_norm", replaced(1, lambda t: t.T), "stride 32 in dimension 1; expected 1"),
    ("accumulate", replaced(0, lambda t: t[:, 1:]), r"total has shape \[5, 31\].*size 32"),
    ("accumulate", replaced(0, lambda t: t.bfloat16()), "total is bfloat16; expected float32"),
    (
        "accumulate",
        replaced(0, lambda t: t.repeat(1, 2)[:, :32]),
        "total has stride 64 in dimension 0; expected 32",
    ),
    ("relu", replaced(0, lambda t: t.half()), "x is float16.*float32 and bfloat16"),
    ("silu", replaced(0, lambda t: t[0]), r"x has shape \[32\]; expected 2 dimensions"),
    ("gelu", replaced(0, lambda t: t.T), "stride 32 in dimension 1; expected 1"),
    ("gelu_tanh", replaced(0, lambda t: t[:, ::2]), "stride 2 in dimension 1; expected 1"),
    ("silu_and_mul", replaced(0, lambda t: t[:, :15]), r"x has shape \[5, 32\].*size 30"),
    ("pack_linear_weight", replaced(0, lambda t: t[:64]), r"packed has shape \[64\].*size 2048"),
    ("pack_linear_weight", replaced(1, lambda t: t.T), "stride 32 in dimension 1; expected 1"),
    ("packed_linear", replaced(2, lambda t: t[32:]), r"packed has shape \[2016\].*size 2048"),
    ("packed_linear", replaced(3, lambda t: t[1:]), r"bias has shape \[39\].*size 40"),
    ("packed_linear", replaced(0, lambda t: t.bfloat16()), "out is bfloat16; expected float32"),
    ("quantized_linear", replaced(2, lambda t: t[32:]), r"packed has shape \[1120\].*size 1152"),
    ("quantized_linear", replaced(2, lambda t: t.int()), "packed is int32; expected uint8"),
    ("quantized_linear", replaced(4, lambda _: 3), r"bits = 3 .*expected 4 or 8 with 0, 1 or 2"),
    ("quantized_linear", replaced(5, lambda _: 48), "group_size is 48; expected a multiple of 32"),
    ("quantize_weight", replaced(4, lambda _: 160), "group_size in 4 bits is 160; the limit"),
    (
        "pack_groups",
        replaced(6, lambda _: 4),
        "layout is 4 with bits = 4 .*; expected 0, in 8 bits",
    ),
    ("pack_groups", replaced(6, lambda _: 1), "layout is 1 with bits = 4 and group_size = 32"),
    ("pack_groups", replaced(1, lambda t: t[..., 1:]), r"numbers has shape .*expected size 16"),
    ("pack_groups", replaced(2, lambda t: t.float()), "scales is float32; expected float16"),
    ("dequantize_blocks", replaced(2, lambda _: 15), "type is 15; expected 13 or 14"),
    ("dequantize_blocks", replaced(2, lambda _: 13), r"blocks has shape .*expected size 176"),
    ("quantized_embedding", replaced(3, lambda _: 39), "is 39; the table has rows 0 to 38"),
    ("add_gated", replaced(2, lambda t: t.repeat(1, 2)), r"gate has shape \[5, 2\].*size 1"),
    ("top_experts", replaced(2, lambda t: t[:, :1]), "a token's experts is 2; the limit is 1"),
    ("top_experts", replaced(1, lambda t: t.double()), "expert_weights is float64; expected fl"),
    ("expert_mlp", replaced(2, lambda t: t + 1), "expert_ids holds 3; there are experts 0 to 2"),
    (
        "expert_mlp",
        replaced(4, lambda t: t[:, 32:].clone()),
        r"gate_up has shape \[3, 992\].*size 1024",
    ),
    ("expert_mlp", replaced(5, lambda t: t[1:]), r"down has shape \[2, 512\].*size 3"),
    ("argmax", replaced(0, lambda t: t.int()), "out is int32; expected int64"),
    ("argmax", replaced(2, lambda t: t[1:]), r"logprobs has shape \[4\].*size 5"),
    ("sample_tokens", replaced(6, lambda t: t.float()), "uniform is float32; expected float64"),
]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "break_it", "message"), WRONG, ids=lambda v: "" if callable(v) else str(v)[:40]
)
def test_wrong_arguments(name: str, break_it: Callable[[tuple], Sequence], message: str) -> None:
    arguments = break_it(_arguments()[name])
    with pytest.raises(RuntimeError, match=f"tpengine::{name}: .*{message}"):
        getattr(torch.ops.tpengine, name).default(*arguments)


OF_ANOTHER_VERSION = """
import sys, torch
torch.library.define("tpengine::relu", "(Tensor(a!) x, Tensor y) -> ()")
torch.ops.load_library(sys.argv[1])
torch.ops.tpengine.relu(torch.ones(1), torch.ones(1))
"""


@needs_kernels
def test_an_old_library_is_named() -> None:
    path = str(library._find_library("libtpengine_cpu.so"))
    done = python("-c", OF_ANOTHER_VERSION, path, code=1)
    assert re.search(r"tpengine::relu: .* 2 arguments; .* 1\. .*older.*`make setup`", done.stderr)
    with pytest.raises(NativeLibraryError, match=r"no function tpengine_new\. .*older"):
        library.cpu_functions("tpengine_", {"new": (None, [])})


@needs_kernels
def test_head_dim_and_block_size_out_of_range_are_refused() -> None:
    def run(block_size: int, head_dim: int) -> None:
        shapes = cache.kv_cache_shapes("cpu", torch.float32, 4, block_size, 1, head_dim)
        q = torch.zeros(1, 1, head_dim)
        torch.ops.tpengine.paged_attention.default(
            q.clone(), q, *(torch.zeros(s) for s in shapes),
            torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1.0, None, None,
        )  # fmt: skip

    run(16, 64)
    for block_size, head_dim, message in (
        (16, 72, "head_dim is 72; expected a multiple of 16 from 16 to 256"),
        (16, 272, "head_dim is 272"),
        (12, 64, "block_size is 12; expected 8, 16 or 32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(block_size, head_dim)


@needs_kernels
def test_choice_of_instruction_set() -> None:
    before = library.cpu_isa()
    assert before in ISAS
    for name in ISAS:
        with use_cpu_isa(name):
            assert library.cpu_isa() == name
    assert library.cpu_isa() == before
    with pytest.raises(
        NativeLibraryError,
        match=re.escape(f"'neon' (TPENGINE_CPU_ISA) cannot be used; choose one of {ISAS[0]}"),
    ):
        library.set_cpu_isa("neon")
    assert library.cpu_isa() == before


def test_unbuilt_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    states = library.IsaState
    isas = {"avx512": states.NOT_HERE, "avx2": states.NOT_BUILT, "generic": states.USABLE}
    monkeypatch.setattr(library, "_cpu_isas", lambda: isas)
    with pytest.raises(
        NativeLibraryError, match=r"'avx2' .* choose one of generic; .* not built: `make set"
    ):
        library.set_cpu_isa("avx2")
    with pytest.raises(NativeLibraryError, match=r"'avx512' .* choose one of generic$"):
        library.set_cpu_isa("avx512")


def test_an_empty_batch_is_no_error() -> None:
    arguments = _arguments()
    empty = torch.zeros(0, 32)
    torch.ops.tpengine.rms_norm.default(empty.clone(), empty, torch.ones(32), 1e-6)
    torch.ops.tpengine.layer_norm.default(empty.clone(), empty, None, None, 1e-5)
    torch.ops.tpengine.accumulate.default(empty.clone(), empty)
    torch.ops.tpengine.relu.default(empty.clone())
    torch.ops.tpengine.argmax.default(torch.zeros(0, dtype=torch.int64), empty)
    out, q, k_cache, v_cache = arguments["paged_attention"][:4]
    torch.ops.tpengine.paged_attention.default(
        out[:0], q[:0], k_cache, v_cache, torch.zeros(0, 2, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32), 0.125, None, None,
    )  # fmt: skip


def test_the_native_library_is_built() -> None:
    """Without it the tests above are skipped, and all other tests run on the reference."""
    assert library.has_cpu_kernels()
    assert "generic" in ISAS
