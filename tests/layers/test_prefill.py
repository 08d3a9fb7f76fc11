"""Attention of prompts by libraries: the one that supports everything, and which is chosen."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tpengine.errors import ConfigError
from tpengine.layers import gpu_attention
from tpengine.layers.gpu_attention import AttentionRule, SdpaBackend, choose_backend, make_chunks
from tpengine.ops import reference
from tpengine.ops.attention_ops import DecodePlan

CPU = torch.device("cpu")


def shape(
    heads: int = 4,
    kv_heads: int = 2,
    window: int | None = None,
    slopes: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> gpu_attention.PrefillShape:
    return gpu_attention.PrefillShape(heads, kv_heads, 64, dtype, frozenset({None, window}), slopes)


@pytest.mark.parametrize("slice_elements", [1 << 23, 200])
@pytest.mark.parametrize(
    ("slopes", "softcap"), [(False, None), (True, None), (False, 0.5)], ids=str
)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_sdpa_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    window: int | None,
    slopes: bool,
    softcap: float | None,
    slice_elements: int,
) -> None:
    """Rows with and without context, whole and in slices of few queries."""
    monkeypatch.setattr(gpu_attention, "MASK_ELEMENTS", slice_elements)
    gen = torch.Generator().manual_seed(heads)
    query_lens, key_lens, head_dim, block_size = [9, 4, 20], [9, 30, 21], 16, 8
    q = torch.randn(sum(query_lens), heads, head_dim, generator=gen)
    caches = [torch.randn(12, block_size, kv_heads, head_dim, generator=gen) for _ in range(2)]
    table = torch.randperm(12, generator=gen).int().view(3, 4)
    gradient = torch.rand(heads, generator=gen) if slopes else None
    chunks = make_chunks(query_lens, key_lens, CPU)
    expected = torch.empty_like(q)
    reference.prefill_attention(
        expected, q, *caches, table, chunks.query_start, torch.tensor(key_lens), 0.25, gradient,
        window, softcap,
    )  # fmt: skip
    k, v = (
        torch.cat([cache[table[i].long()].flatten(0, 1)[:n] for i, n in enumerate(key_lens)])
        for cache in caches
    )
    actual = SdpaBackend().run(q, k, v, chunks, AttentionRule(0.25, gradient, window, softcap))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_capped_logits_are_not_rounded() -> None:
    """In bfloat16 with logits of some hundreds: what was rounded before the cap would be seen."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 2, 64, generator=gen).bfloat16() for _ in range(3))
    rule = AttentionRule(scale=10.0, softcap=300.0)
    actual = SdpaBackend().run(q, k, v, make_chunks([40], [40], CPU), rule).float()
    exact = reference.attend_sequence(q.float(), k.float(), v.float(), 10.0, None, None, 300.0)
    torch.testing.assert_close(actual, exact, atol=0.03, rtol=0.03)


def test_auto_chooses_the_first_that_works() -> None:
    """On this CPU: xformers is absent, and torch's varlen kernel has no CPU form."""
    capped = replace(shape(window=40), softcap=5.0)
    for case in (shape(), capped, shape(slopes=True), shape(dtype=torch.float32)):
        assert type(choose_backend("auto", case, CPU)) is SdpaBackend


@pytest.mark.parametrize(
    ("wanted", "asked", "words"),
    [
        ("xformers", shape(), "xformers: it is not installed"),
        ("varlen", shape(), "varlen: it fails here"),
        ("varlen", shape(slopes=True), "ALiBi"),
        ("xformers", replace(shape(), softcap=50.0), "no soft cap"),
        ("xformers", shape(dtype=torch.float32), "float16 and bfloat16 only"),
    ],
)
def test_a_forced_backend_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, wanted: str, asked: gpu_attention.PrefillShape, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(ConfigError, match=words) as caught:
        choose_backend(wanted, asked, CPU)
    assert f"attention_backend = '{wanted}'" in str(caught.value)


class TopLeft(SdpaBackend):
    """A library that aligns causal masks with the top left corner."""

    def run(self, q: Any, k: Any, v: Any, chunks: Any, rule: AttentionRule) -> torch.Tensor:
        return super().run(q, k, v, make_chunks(chunks.query_lens, chunks.query_lens, CPU), rule)


def test_a_library_with_wrong_results_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_attention.BACKENDS, "xformers", TopLeft)
    monkeypatch.setitem(gpu_attention.BACKENDS, "varlen", SdpaBackend)
    assert type(choose_backend("auto", shape(), CPU)) is SdpaBackend
    with pytest.raises(ConfigError, match="its results are wrong here"):
        choose_backend("xformers", shape(), CPU)


@pytest.mark.parametrize("backend", ["varlen", "xformers", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_libraries_on_a_gpu(backend: str, window: int | None, heads: int, kv_heads: int) -> None:
    if backend == "xformers":
        pytest.importorskip("xformers")
    asked = shape(heads, kv_heads, window)
    opened = choose_backend(backend, asked, torch.device("cuda", 0))
    assert type(opened) is gpu_attention.BACKENDS[backend]


def test_xformers_is_asked_for_the_right_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks with their lengths, and K and V repeated for a group of heads without a copy."""
    library = MagicMock()
    attend, masks = library.ops.memory_efficient_attention_forward, library.ops.fmha.attn_bias
    attend.side_effect = lambda q, k, v, **_: q.clone()
    for name, module in (("", library), (".ops", library.ops), (".ops.fmha", library.ops.fmha)):
        monkeypatch.setitem(sys.modules, f"xformers{name}", module)
    backend = gpu_attention.XformersBackend()
    q, k = torch.randn(5, 4, 8), torch.randn(9, 2, 8)
    context, none = make_chunks([2, 3], [5, 4], CPU), make_chunks([2, 3], [2, 3], CPU)
    assert torch.equal(backend.run(q, k, k, context, AttentionRule(1.0)), q)
    backend.run(q, k, k, context, AttentionRule(1.0, window=7))
    backend.run(q, k[:5], k[:5], none, AttentionRule(1.0))
    plain, causal = masks.BlockDiagonalMask.from_seqlens, masks.BlockDiagonalCausalMask.from_seqlens
    assert [call.args for call in plain.call_args_list] == [([2, 3], [5, 4])] * 2
    assert [call.args for call in causal.call_args_list] == [([2, 3],)]
    with_context = plain.return_value
    with_context.make_local_attention_from_bottomright.assert_called_once_with(7)
    assert [call.kwargs["attn_bias"] for call in attend.call_args_list] == [
        with_context.make_causal_from_bottomright.return_value,
        with_context.make_local_attention_from_bottomright.return_value,
        causal.return_value,
    ]
    shapes = [(tuple(x.shape), x.stride(3)) for x in attend.call_args_list[0].args[:2]]
    assert shapes[0][0] == (1, 5, 2, 2, 8)
    assert shapes[1] == ((1, 9, 2, 2, 8), 0)


def test_a_plan_is_made_once_a_step_and_window() -> None:
    def plan() -> DecodePlan:
        return DecodePlan(
            torch.zeros(9, dtype=torch.int32),
            torch.zeros(28, 4, dtype=torch.int32),
            torch.zeros(28, 2, 68),
        )

    plans = {None: plan(), 32: plan()}
    lengths = torch.tensor([100, 0, 300], dtype=torch.int32)
    step = gpu_attention.StepPlans(plans, 16)
    first = step.get(lengths, None)
    assert first.item_start.shape[0] == 4
    assert int(first.item_start[-1]) >= 3
    lengths.zero_()
    assert int(step.get(lengths, None).item_start[-1]) == int(first.item_start[-1])
    assert step.get(lengths, 32).items.data_ptr() != first.items.data_ptr()
    last = gpu_attention.StepPlans(plans, 16).get(lengths, None)
    assert int(last.item_start[-1]) == 3  # one empty item a row
    assert sum(plan.num_bytes for plan in plans.values()) == 2 * 4 * (9 + 28 * 4 + 28 * 2 * 68)
