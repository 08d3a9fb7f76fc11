"""What the CUDA decode kernel takes of a block's shared memory, on cards that have less of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tpengine.ops.attention_ops import TENSOR_CORE_HEAD_DIMS

from .cuda_host_library import load_host, needs_compiler, set_schedule
from .test_cuda_host_attention import KINDS, Problem, check

pytestmark = needs_compiler

KB = 1024
CARDS = {"8.6, 8.9, 12.0": 99 * KB, "8.0": 163 * KB, "9.0": 227 * KB}
"""By compute capability: bytes that a block may have (CUDA's programming guide)."""
CACHES = {"bfloat16": 0, "float16": 1, "fp8": 2}
OLD_CARD = 64 * KB
"""Of compute capability 7.5."""


def shape(cache: str, head_dim: int, group: int, limit: int) -> tuple[int, int]:
    """Bytes and stages; no bytes: there is no kernel."""
    stages = ctypes.c_int()
    bytes_ = load_host("decode_shapes").decode_shape(
        CACHES[cache], head_dim, group, limit, ctypes.byref(stages)
    )
    return bytes_, stages.value


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("cache", CACHES)
def test_every_configuration_fits_every_card(cache: str, card: str) -> None:
    """The deepest ring that fits, of each head dim and either number of head tiles."""
    limit = CARDS[card]
    compiled = [dim for dim in range(1, 300) if shape(cache, dim, 1, limit)[0]]
    assert compiled == list(TENSOR_CORE_HEAD_DIMS)
    for head_dim in compiled:
        width = head_dim * (1 if cache == "fp8" else 2)
        stage = 4 * 2 * 16 * ((width // 16 | 1) * 16)  # warps, K and V, tokens, padded rows
        for group in (1, 8, 9, 16):
            num_bytes, stages = shape(cache, head_dim, group, limit)
            assert num_bytes <= limit
            assert num_bytes >= stages * stage
            deepest = 2 if head_dim > 128 and cache != "fp8" else 3
            assert stages == min(deepest, limit // stage)


@pytest.mark.parametrize("cache", CACHES)
def test_no_kernel_where_not_even_one_stage_fits(cache: str) -> None:
    """The caller then takes the kernel without tensor cores, or refuses."""
    assert shape(cache, 256, 16, OLD_CARD) == (0, 0)
    assert shape(cache, 64, 1, OLD_CARD)[0] > 0


@pytest.fixture
def small_card() -> Iterator[ctypes.CDLL]:
    library = load_host("attention")
    library.decode_mma.restype = ctypes.c_bool
    library.set_card(CARDS["8.6, 8.9, 12.0"])
    yield library
    library.set_card(CARDS["9.0"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "options"),
    [(8, 2, 128, {}), (12, 1, 128, {"window": 70}), (4, 1, 256, {"alibi": True}), (12, 1, 256, {})],
)
def test_fewer_stages_agree_with_dense_float64(
    small_card: ctypes.CDLL, kind: str, num_heads: int, num_kv_heads: int, head_dim: int,
    options: dict[str, int],
) -> None:  # fmt: skip
    dtype = torch.float16 if "float16" in kind.split() else torch.bfloat16
    problem = Problem(
        [1, 0, 17, 180, 600], num_heads, num_kv_heads, head_dim, 16, dtype,
        fp8=kind.startswith("fp8"), **options,
    )  # fmt: skip
    for seed, wave in ((1, 12), (2, None)):  # both kinds of copies
        set_schedule(small_card, seed)
        check(problem, problem.run(small_card, wave=wave))
    assert small_card.last_error() == 0


def test_a_launch_beyond_the_card_is_refused_by_the_stand_in(small_card: ctypes.CDLL) -> None:
    """Otherwise the tests above could not fail: the kernel asks for more than this card has."""
    small_card.set_card(OLD_CARD)
    problem = Problem([20], 2, 1, 256, 16, torch.bfloat16)
    with pytest.raises(AssertionError):
        problem.run(small_card)


@pytest.mark.parametrize(
    ("card", "head_dim", "blocks"), [("9.0", 128, 2), ("9.0", 64, 4), ("8.6, 8.9, 12.0", 128, 1)]
)
def test_the_plan_counts_the_blocks_that_the_launch_gets(
    small_card: ctypes.CDLL, card: str, head_dim: int, blocks: int
) -> None:
    """With all of a multiprocessor's memory as shared memory, and with as many stages as fit."""
    small_card.set_card(CARDS[card])
    assert small_card.blocks_at_once(CACHES["bfloat16"], head_dim, 4) == blocks
