"""Every op on a GPU, against plain torch on the same inputs, with NaN in every unused slot.

Skips itself where there is no GPU or no CUDA library.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, fields

import pytest
import torch
from torch import Tensor

from tpengine.ops import attention_ops as attention
from tpengine.ops import cache_ops as cache
from tpengine.ops import library, reference
from tpengine.ops import lora_ops as lora
from tpengine.ops.lora_ops import LoRARows, LoRASlots
from tpengine.ops.quantized_ops import QuantizedFormat

from .cases import dense_attention, generator, make_case, nan_like, relative_error
from .cuda_host_library import BOUND
from .lora_cases import GROUPS, PARTS, assert_untouched, rows_of
from .lora_cases import expected as expected_lora
from .lora_cases import make_case as make_lora_case
from .packed_cases import FORMATS, INPUTS
from .packed_cases import make_case as make_packed_case
from .sampling_cases import assert_logprobs, random_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not library.has_cuda_kernels(), reason="the CUDA library is not built"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.7, 1.3
CUDA = torch.device("cuda", 0)
LENGTHS = [1, 0, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 3000]


def _to(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(CUDA) for tensor in tensors]


def _on_gpu(view: Tensor) -> Tensor:
    """The same view of a copy of its whole storage, with the same strides and neighbours."""
    base = view._base if view._base is not None else view
    return base.to(CUDA).as_strided(view.shape, view.stride(), view.storage_offset())


def _op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.tpengine, name).default


@pytest.mark.parametrize("name", library.REFERENCES)
def test_every_op_of_the_gpu_path_has_a_kernel(name: str) -> None:
    if name in (
        "pack_linear_weight",
        "packed_linear",
        "quantize_weight",
        "quantized_linear",
        "quantized_embedding",
        "prefill_attention",
        "embedding",
        "layer_norm",
        "add_layer_norm",
        "accumulate",
        "add_gated",
        "top_experts",
        "expert_mlp",
        "relu",
        "silu",
        "gelu",
        "gelu_tanh",
    ):
        pytest.skip("plain torch on a GPU")
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


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (20, 12)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_cache_write_and_gather(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, is_neox: bool
) -> None:
    gen = generator(head_dim)
    num_tokens, lengths = 50, [20, 0, 30]
    table = torch.randperm(8, generator=gen)[:6].int().view(3, 2)
    slots = [
        int(table[seq, i // 16]) * 16 + i % 16 for seq, n in enumerate(lengths) for i in range(n)
    ]
    table[1] = 2**30
    positions = torch.randint(0, 60, (num_tokens,), generator=gen, dtype=torch.int32)
    angles = torch.randn(60, rotary_dim, generator=gen)
    slot_mapping = torch.tensor(slots, dtype=torch.int32)
    start = torch.tensor([0, 20, 20, 50], dtype=torch.int32)
    for cache_dtype in (dtype, *((FP8,) if dtype != torch.float32 else ())):
        scales = (K_SCALE, V_SCALE) if cache_dtype == FP8 else (1.0, 1.0)
        qkv = torch.randn(num_tokens, 8 * head_dim, generator=gen).to(dtype)
        caches = [torch.full((8, 16, 2, head_dim), float("nan")).to(cache_dtype) for _ in range(2)]
        device_qkv, *device_caches = _to(qkv, *caches)
        # before a slot is written: NaN of another maker may have other bits
        again = [blank.clone() for blank in device_caches]
        arguments = (4, 2, is_neox, *scales)
        cache.rotary_write_kv_cache(
            *_to(positions), device_qkv, *_to(angles, slot_mapping), *device_caches, *arguments
        )
        reference.rotary_write_kv_cache(positions, qkv, angles, slot_mapping, *caches, *arguments)
        assert relative_error(device_qkv.cpu(), qkv) < 1e-3
        k, v = (torch.full((60, 2, head_dim), 7.0, dtype=dtype) for _ in range(2))
        device_k, device_v = _to(k, v)
        cache.gather_kv(device_k, device_v, *device_caches, *_to(table, start), *scales)
        reference.gather_kv(k, v, *caches, table, start, *scales)
        assert relative_error(device_k.cpu(), k) < 1e-2
        assert torch.equal(device_v.cpu(), v)
        heads = device_qkv.view(num_tokens, 8, head_dim)
        cache.write_kv_cache(heads[:, 4:6], heads[:, 6:], *again, slot_mapping.to(CUDA), *scales)
        for x, y in zip(again, device_caches, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_blocks_are_copied_and_swapped() -> None:
    pool = torch.randn(6, 40, 16, 2, 64).to(torch.bfloat16)
    device_pool = pool.to(CUDA)
    pairs = torch.tensor([(0, 5), (0, 6), (19, 1), (3, 18)])
    cache.copy_cache_blocks(device_pool, pairs.to(CUDA))
    reference.copy_cache_blocks(pool, pairs)
    assert torch.equal(device_pool.cpu(), pool)
    cache.copy_blocks(device_pool[0], device_pool[1], pairs.to(CUDA))
    reference.copy_blocks(pool[0], pool[1], pairs)
    assert torch.equal(device_pool.cpu(), pool)
    host = torch.zeros(30, 6, 16, 2, 64, dtype=torch.bfloat16, pin_memory=True)
    staging = torch.empty(4, 6, 16, 2, 64, dtype=torch.bfloat16, device=CUDA)
    out = [(7, 3), (9, 4), (2, 5), (30, 20), (31, 0), (1, 21)]
    cache.swap_out(host, device_pool, out, staging)
    torch.cuda.synchronize()
    for block, target in out:
        assert torch.equal(host[target], pool[:, block])
    cache.swap_in(device_pool, host, [(3, 35), (4, 36), (20, 10)], staging)
    for source, block in ((7, 35), (9, 36), (30, 10)):
        assert torch.equal(device_pool[:, block].cpu(), pool[:, source])


@pytest.mark.parametrize("size", [7, 45, 896, 4096, 9000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_ops(dtype: torch.dtype, size: int) -> None:
    gen = generator(size)
    x, residual = (torch.randn(9, size, generator=gen).to(dtype) for _ in range(2))
    weight, out = torch.randn(size, generator=gen).to(dtype), nan_like(x)
    device_x, device_residual, device_weight, device_out = _to(x, residual, weight, out)
    _op("add_rms_norm")(device_out, device_x, device_residual, device_weight, 1e-5)
    reference.add_rms_norm(out, x, residual, weight, 1e-5)
    assert torch.equal(device_residual.cpu(), residual)
    assert relative_error(device_out.cpu(), out) < max(BOUND[dtype], 1e-5)
    _op("rms_norm")(device_out, device_x, device_weight, 1e-5)
    reference.rms_norm(out, x, weight, 1e-5)
    assert relative_error(device_out.cpu(), out) < max(BOUND[dtype], 1e-5)
    gate = torch.randn(9, 2 * size, generator=gen).to(dtype)
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        _op(name)(device_out, gate.to(CUDA))
        expected = torch.empty(9, size, dtype=torch.float64)
        getattr(reference, name)(expected, gate.double())
        assert relative_error(device_out.cpu(), expected) < BOUND[dtype]


@pytest.mark.parametrize("vocab_size", [7, 1237, 32_000, 151_936])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_chooses_what_the_sorted_reference_chooses(
    dtype: torch.dtype, vocab_size: int
) -> None:
    logits, *parameters = random_case(64, vocab_size, dtype)
    out, logprobs = torch.zeros(64, dtype=torch.int64), torch.zeros(64, device=CUDA)
    device_out = out.to(CUDA)
    _op("sample_tokens")(device_out, *_to(logits, *parameters), logprobs)
    reference.sample_tokens(out, logits, *parameters)
    assert torch.equal(device_out.cpu(), out)
    assert_logprobs(logprobs.cpu(), logits, out)
    _op("argmax")(device_out, logits.to(CUDA), logprobs)
    assert torch.equal(device_out.cpu(), logits.float().argmax(-1))
    assert_logprobs(logprobs.cpu(), logits, device_out.cpu())


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_packed_weights(form: QuantizedFormat) -> None:
    """In shapes that fill a block, and in one whose blocks take four panels each."""
    for outputs, inputs in ((1000, INPUTS), (513 * 32 - 1, 96)):
        case = make_packed_case(form, outputs, inputs)
        weight = case.weight
        device_packed, values = weight.packed.to(CUDA), case.values.to(CUDA)
        for dtype in DTYPES:
            out = torch.empty(96, weight.padded_inputs, dtype=dtype, device=CUDA)
            _op("dequantize_weight")(out, device_packed, 64, outputs, *case.format)
            rounded = values[64:160].float().to(dtype)
            assert relative_error(out[:, :inputs], rounded) < 1e-6
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.randn(33, inputs, generator=generator(1)).to(CUDA, dtype)
            bias = torch.randn(outputs, generator=generator(2)).to(CUDA, dtype)
            for rows in (1, 7, 16, 33):
                out = nan_like(x.new_empty(rows, outputs))
                _op("weight_only_linear")(out, x[:rows], device_packed, bias, *case.format)
                expected = x[:rows].double() @ values.t() + bias.double()
                assert relative_error(out, expected) < BOUND[dtype]


def test_a_row_of_packed_weights_does_not_depend_on_the_others() -> None:
    case = make_packed_case(QuantizedFormat(4, 64), 1000)
    x, packed = torch.randn(32, INPUTS).to(CUDA, torch.bfloat16), case.weight.packed.to(CUDA)
    together = nan_like(x.new_empty(32, 1000))
    _op("weight_only_linear")(together, x, packed, None, *case.format)
    for rows in range(1, 32):
        out = nan_like(together[:rows])
        _op("weight_only_linear")(out, x[-rows:], packed, None, *case.format)
        assert torch.equal(out, together[-rows:])


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
        arguments = [*tensors[:index], change(tensors[index]), *tensors[index + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            _op("weight_only_linear")(*arguments, *case.format)
    out = x.new_empty(32, case.weight.padded_inputs)
    with pytest.raises(RuntimeError, match="first_output is 16 for 32 rows; expected a multiple"):
        _op("dequantize_weight")(out, tensors[2], 16, 40, *case.format)


@pytest.mark.parametrize("inputs", [90, 4096])
def test_adapters(inputs: int) -> None:
    groups = GROUPS[2]
    num_rows = max(row for _, own in groups for row in own) + 2
    for dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        case = make_lora_case((dtype, weight_dtype), num_rows, inputs)
        slots = LoRASlots(*(getattr(case.slots, f.name).to(CUDA) for f in fields(LoRASlots)))
        rows = LoRARows(*(tensor.to(CUDA) for tensor in astuple(rows_of(groups))))
        before = torch.randn(num_rows, sum(PARTS) + 5, generator=generator(1)).to(dtype)
        after = before.to(CUDA)
        lora.add_lora(after[:, : sum(PARTS)], _on_gpu(case.x), slots, rows)
        assert relative_error(after.cpu(), expected_lora(before, case, groups)) < BOUND[dtype]
        assert_untouched(after.cpu(), before, groups)


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
        arguments = [*tensors[:index], change(tensors[index]), *tensors[index + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            attention.paged_attention(*arguments, 0.125)
    for block_size, head_dim in itertools.product((12, 64), (64,)):
        caches = [torch.zeros(2, block_size, 1, head_dim, device=CUDA) for _ in range(2)]
        q = torch.zeros(1, 1, head_dim, device=CUDA)
        with pytest.raises(RuntimeError, match=f"block_size is {block_size}; expected 8, 16 or 32"):
            attention.paged_attention(q.clone(), q, *caches, tensors[4], tensors[5], 1.0)
