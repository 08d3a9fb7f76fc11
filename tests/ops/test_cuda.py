"""What only a GPU shows of its ops: decode attention with all of its shapes, graphs, and refusals.

The other kernels are tried on a card by the tests that have them on the CPU stand-in.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tpengine.ops import attention_ops as attention
from tpengine.ops import library, reference
from tpengine.ops.quantized_ops import QuantizedFormat

from .cases import GPU, dense_attention, generator, make_case, nan_like, relative_error, replaced
from .cuda_host_ops import BOUND, FP8
from .packed_cases import INPUTS
from .packed_cases import make_case as make_packed_case

pytestmark = GPU
K_SCALE, V_SCALE = 0.7, 1.3
CUDA = torch.device("cuda", 0)
LENGTHS = [1, 0, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 3000]
WITHOUT_KERNEL = {
    "accumulate", "add_gated", "add_layer_norm", "dequantize_blocks", "embedding", "expert_mlp",
    "gelu", "gelu_tanh", "layer_norm", "pack_linear_weight", "packed_linear", "prefill_attention",
    "quantize_weight", "quantized_embedding", "quantized_linear", "relu", "silu", "top_experts",
}  # fmt: skip
"""Ops that are plain torch on a GPU."""


def _to(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(CUDA) for tensor in tensors]


def _on_gpu(view: Tensor) -> Tensor:
    """The same view of a copy of its whole storage, with the same strides and neighbours."""
    base = view._base if view._base is not None else view
    return base.to(CUDA).as_strided(view.shape, view.stride(), view.storage_offset())


def _op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.tpengine, name).default


@pytest.mark.parametrize("name", sorted({*library.REFERENCES} - WITHOUT_KERNEL))
def test_every_op_of_the_gpu_path_has_a_kernel(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tpengine::{name}", "CUDA")


OPTIONS = [(False, None, None), (True, None, None), (False, 100, None), (True, 100, 0.7)]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 12, 20])
def test_decode(kind: str, head_dim: int, group: int) -> None:
    block_size = (8, 16, 32)[(head_dim // 16 + group) % 3]
    dtype = torch.bfloat16 if kind == "fp8" else getattr(torch, kind)
    gen = generator(head_dim * group)
    case = make_case(LENGTHS, 2, head_dim, dtype, gen, block_size, device_layout="cuda")
    q = case.queries(2 * group, [1] * len(LENGTHS), gen)
    caches, scales = (case.k_cache, case.v_cache), (1.0, 1.0)
    if kind == "fp8":
        caches, scales = tuple(c.to(FP8) for c in caches), (K_SCALE, V_SCALE)
        case.k = [k.to(FP8).double() * K_SCALE for k in case.k]
        case.v = [v.to(FP8).double() * V_SCALE for v in case.v]
    # Plain arithmetic on the GPU, because float64 on the host would take minutes.
    case.k, case.v, q = _to(*case.k), _to(*case.v), _on_gpu(q)
    k_cache, v_cache, table, seq_lens = _to(*caches, case.block_table, case.seq_lens)
    plan = attention.make_decode_plan(CUDA, 40, 2 * group, 2, head_dim, caches[0].dtype)
    plan = plan.for_rows(len(LENGTHS))
    for use_alibi, window, softcap in OPTIONS:
        slopes = torch.logspace(-3, 0, 2 * group, device=CUDA) if use_alibi else None
        expected = dense_attention(case, q, [1] * len(LENGTHS), slopes, window, softcap)
        for with_plan in (False, True):
            out = nan_like(q)
            if with_plan:
                plan.partials.fill_(float("nan"))
                attention.plan_decode(plan, seq_lens, 64, window)
            attention.paged_attention(
                out, q, k_cache, v_cache, table, seq_lens, head_dim**-0.5, slopes, window,
                softcap, *scales, *(plan if with_plan else ()),
            )  # fmt: skip
            bound = 4e-3 if kind == "fp8" else max(BOUND[dtype], 1e-5)
            assert relative_error(out, expected) < bound


def test_plan_agrees_with_the_reference() -> None:
    for lengths, window in ((LENGTHS, None), ([100_000, *[1500] * 63], None), (LENGTHS, 500)):
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        for wave in (1, 33, 132):
            start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
            items = torch.zeros(len(lengths) + 2 * wave, 4, dtype=torch.int32)
            device_start, device_items = _to(start, items)
            _op("plan_decode")(device_start, device_items, seq_lens.to(CUDA), 256, window)
            reference.plan_decode(start, items, seq_lens, 256, window)
            assert torch.equal(device_start.cpu(), start)
            assert torch.equal(device_items.cpu(), items)


def test_decode_in_a_graph_and_on_a_side_stream() -> None:
    """Lengths change between replays, because no part of a plan is on the host."""
    gen = generator(0)
    case = make_case([700] * 4, 2, 128, torch.bfloat16, gen, device_layout="cuda")
    q = case.queries(8, [1] * 4, gen).contiguous()
    device_q, k_cache, v_cache, table, seq_lens = _to(
        q, case.k_cache, case.v_cache, case.block_table, case.seq_lens
    )
    plan = attention.make_decode_plan(CUDA, 4, 8, 2, 128, torch.bfloat16)
    out = torch.empty_like(device_q)

    def step() -> None:
        attention.plan_decode(plan, seq_lens, 64)
        attention.paged_attention(
            out, device_q, k_cache, v_cache, table, seq_lens, 128**-0.5, **plan._asdict()
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([700, 700, 700, 700], [1, 0, 300, 699], [0, 0, 0, 5]):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        case.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        case.block_size = 16
        answer = dense_attention(case, q, [1] * 4)
        torch.cuda.synchronize()
        assert relative_error(out.cpu(), answer) < 4e-3


def test_two_runs_are_the_same_bits() -> None:
    gen = generator(1)
    case = make_case([2000, 31], 1, 64, torch.bfloat16, gen, device_layout="cuda")
    q, *rest = _to(
        case.queries(6, [1, 1], gen), case.k_cache, case.v_cache, case.block_table, case.seq_lens
    )
    plan = attention.make_decode_plan(CUDA, 2, 6, 1, 64, torch.bfloat16)
    answers = []
    for _ in range(2):
        out = nan_like(q)
        attention.plan_decode(plan, rest[3], 64)
        attention.paged_attention(out, q, *rest, 0.125, **plan._asdict())
        answers.append(out)
    assert torch.equal(*answers)


def test_packed_weights_refuse_wrong_use() -> None:
    case = make_packed_case(QuantizedFormat(4, 32), 40)
    x = torch.zeros(2, INPUTS, device=CUDA, dtype=torch.bfloat16)
    tensors = [x.new_empty(2, 40), x, case.weight.packed.to(CUDA), x.new_zeros(40)]
    wrong = [
        (0, lambda t: t.half(), "out is float16; expected bfloat16"),
        (1, lambda t: t[:, 1:], "expected rows of a multiple of 8 inputs, aligned to 16 bytes"),
        (2, lambda t: t[16:], r"packed has shape \[\d+\]; expected size"),
        (3, lambda t: t[1:], r"bias has shape \[39\]; expected size 40"),
    ]
    for index, change, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            _op("weight_only_linear")(*replaced(index, change)(tensors), *case.weight.format)
    out = x.new_empty(32, case.weight.padded_inputs)
    with pytest.raises(RuntimeError, match="first_output is 16 for 32 rows; expected a multiple"):
        _op("dequantize_weight")(out, tensors[2], 16, 40, *case.weight.format)


def test_wrong_use_says_what_to_do() -> None:
    case = make_case([20], 1, 64, torch.bfloat16, generator(0), device_layout="cuda")
    q = case.queries(2, [1], generator(0))
    tensors = _to(nan_like(q), q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    wrong = [
        (0, lambda t: t.float(), "out is float32; expected bfloat16"),
        (2, lambda t: t.half(), "k_cache is float16; expected bfloat16"),
        (4, lambda t: t.long(), "block_table is int64; expected int32"),
        (5, lambda t: t[:0], "seq_lens has shape"),
    ]
    for index, change, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            attention.paged_attention(*replaced(index, change)(tensors), 0.125)
    for block_size, head_dim in itertools.product((12, 64), (64,)):
        caches = [torch.zeros(2, block_size, 1, head_dim, device=CUDA) for _ in range(2)]
        q = torch.zeros(1, 1, head_dim, device=CUDA)
        with pytest.raises(RuntimeError, match=f"block_size is {block_size}; expected 8, 16 or 32"):
            attention.paged_attention(q.clone(), q, *caches, tensors[4], tensors[5], 1.0)
