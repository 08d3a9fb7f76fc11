"""The models that attention on a GPU refuses at start-up, and parts of its ops without a GPU."""

from __future__ import annotations

import pytest
import torch
from support.messages import said

from tpengine.errors import ConfigError, NativeLibraryError
from tpengine.ops import attention_ops as attention
from tpengine.ops import library, reference

from .cases import dense_attention, generator, make_case, nan_like, relative_error

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "cache_dtype", "message"),
    [
        (64, torch.float32, FP8, "fp8 KV cache needs dtype bfloat16 or float16"),
        (72, BF16, FP8, "head_dim=72.*it needs one of 64, 80.*keep the cache in"),
    ],
)
def test_unsupported_attention_says_what_to_change(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attention.check_decode_support(head_dim, dtype, cache_dtype, HOPPER)


def test_fp8_needs_a_card_that_converts_it() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        attention.check_decode_support(128, BF16, FP8, capability)
    for capability in ((8, 0), (8, 6)):
        attention.check_decode_support(128, BF16, BF16, capability)
        words = f"capability 8.{capability[1]}.*needs 8.9 or later; set kv_cache_dtype='auto'"
        with pytest.raises(ConfigError, match=words):
            attention.check_decode_support(128, BF16, FP8, capability)


def test_a_head_dim_without_tensor_cores_warns(caplog: pytest.LogCaptureFixture) -> None:
    with said(caplog) as messages:
        attention.check_decode_support(72, BF16, BF16, HOPPER)
        attention.check_decode_support(72, torch.float32, torch.float32, HOPPER)
        attention.check_decode_support(128, BF16, FP8, HOPPER)
    [message] = messages
    assert "head_dim=72 has no tensor-core attention kernel" in message


def test_a_plan_where_cuda_fails_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        tpengine_cuda_decode_wave = staticmethod(lambda *_: -1)

    monkeypatch.setattr(library, "cuda_library", Library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old")
    with pytest.raises(NativeLibraryError, match=r"GPU 0 .Old, .* 7\.5.*they need compute capab"):
        attention.make_decode_plan(torch.device("cuda", 0), 4, 8, 2, 128, BF16)


@pytest.mark.parametrize(("head_dim", "dtype", "tokens"), [(128, BF16, 256), (128, FP8, 512)])
def test_no_short_parts(head_dim: int, dtype: torch.dtype, tokens: int) -> None:
    assert attention.min_item_tokens(head_dim, dtype) == tokens


@pytest.mark.parametrize("with_plan", [False, True])
def test_reference_attends_to_an_fp8_cache(with_plan: bool) -> None:
    gen = generator(0)
    case = make_case([40, 0, 7], 2, 32, BF16, gen, device_layout="cuda")
    q = case.queries(4, [1, 1, 1], gen)
    k_cache, v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
    case.k = [k.to(FP8).double() * 0.5 for k in case.k]
    case.v = [v.to(FP8).double() * 3.0 for v in case.v]
    out = nan_like(q)
    plan = None
    if with_plan:
        plan = attention.DecodePlan(
            torch.zeros(4, dtype=torch.int32), torch.zeros(9, 4, dtype=torch.int32),
            torch.zeros(9, 4, 36),
        )  # fmt: skip
        attention.plan_decode(plan, case.seq_lens, 16)
        assert plan.item_start[-1] > 0
    reference.paged_attention(
        out, q, k_cache, v_cache, case.block_table, case.seq_lens, 32**-0.5, None, None, None,
        0.5, 3.0, *(plan or ()),
    )  # fmt: skip
    assert relative_error(out, dense_attention(case, q, [1, 1, 1])) < 4e-3
