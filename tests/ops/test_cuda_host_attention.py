"""The CUDA decode attention's own source on the CPU stand-in, against float64.

What this cannot show: a wrong belief about a register layout that kernel and stand-in share,
memory ordering of a real GPU, and speed.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.matrix import matrix, only
from torch import Tensor

from tpengine.ops import reference
from tpengine.ops.attention_ops import TENSOR_CORE_HEAD_DIMS

from .cases import dense_attention, generator, make_case, needs_compiler, relative_error
from .cuda_host_library import FAR_BLOCKS, far_pointer, load_host, pointer, set_schedule, struct
from .cuda_host_ops import BOUND, FP8

pytestmark = needs_compiler

NO_WINDOW = 2**31 - 1
PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
K_SCALE, V_SCALE = 0.7, 1.3


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    library = load_host("attention")
    library.decode_mma.restype = ctypes.c_bool
    return library


class Problem:
    """A batch with its float64 answer; unused parts of caches and outputs are NaN."""

    def __init__(
        self, lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int,
        block_size: int, dtype: torch.dtype, *, fp8: bool = False, window: int | None = None,
        alibi: bool = False, softcap: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        gen = generator(seed)
        case = make_case(
            lengths, num_kv_heads, head_dim, dtype, gen, block_size, device_layout="cuda"
        )
        self.q = case.queries(num_heads, [1] * len(lengths), gen)
        self.window = NO_WINDOW if window is None else window
        self.slopes = torch.logspace(-3, 0, num_heads) if alibi else None
        self.k_cache, self.v_cache = case.k_cache, case.v_cache
        self.scale, self.v_scale = head_dim**-0.5, 1.0
        if fp8:
            self.k_cache, self.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
            self.scale, self.v_scale = self.scale * K_SCALE, V_SCALE
            case.k = [k.to(FP8).double() * K_SCALE for k in case.k]
            case.v = [v.to(FP8).double() * V_SCALE for v in case.v]
        self.fp8, self.case, self.dtype = fp8, case, dtype
        self.softcap = softcap or 0.0
        self.expected = dense_attention(
            case, self.q, [1] * len(lengths), self.slopes, window, softcap
        )

    def plan(self, library: ctypes.CDLL, wave: int, min_chunks: int) -> tuple[Tensor, Tensor]:
        """The borders and items of a plan, which are those of the reference."""
        seq_lens = self.case.seq_lens
        start = torch.full((len(seq_lens) + 1,), -7, dtype=torch.int32)
        items = torch.full((len(seq_lens) + 2 * wave, 4), -7, dtype=torch.int32)
        args = struct("PlanArgs")(
            pointer(start), pointer(items), pointer(seq_lens), len(seq_lens), wave, min_chunks,
            self.window,
        )  # fmt: skip
        library.plan_decode(ctypes.byref(args))
        expected = torch.full_like(start, -7), torch.full_like(items, -7)
        window = None if self.window == NO_WINDOW else self.window
        reference.plan_decode(*expected, seq_lens, 16 * min_chunks, window)
        assert torch.equal(start, expected[0])
        assert torch.equal(items, expected[1])
        return start, items

    def run(
        self,
        library: ctypes.CDLL,
        *,
        wave: int | None = None,
        plain: bool = False,
        is_far: bool = False,
    ) -> Tensor:
        case, num_seqs = self.case, len(self.case.seq_lens)
        num_heads, head_dim = self.q.shape[1:]
        out = torch.full((num_seqs, num_heads, head_dim), float("nan"), dtype=self.dtype)
        start = items = partials = None
        if wave is not None:
            start, items = self.plan(library, wave, 2)
            partials = torch.full((len(items), num_heads, head_dim + 4), float("nan"))
        table, caches = case.block_table, [pointer(self.k_cache), pointer(self.v_cache)]
        if is_far:
            table = table + FAR_BLOCKS
            caches = [far_pointer(self.k_cache), far_pointer(self.v_cache)]
        args = struct("DecodeArgs")(
            pointer(out), pointer(self.q), *caches, pointer(table), pointer(case.seq_lens),
            pointer(self.slopes), pointer(start), pointer(items), pointer(partials),
            out.stride(0), out.stride(1),
            self.q.stride(0), self.q.stride(1), table.stride(0), num_seqs, num_heads,
            self.k_cache.shape[2], head_dim, case.block_size, self.window,
            self.dtype == torch.float16, self.scale, self.v_scale, self.softcap,
        )  # fmt: skip
        max_items = num_seqs if items is None else len(items)
        if plain:
            library.decode_plain(PLAIN_DTYPES.index(self.dtype), ctypes.byref(args), max_items)
        else:
            cache = 2 if self.fp8 else (torch.bfloat16, torch.float16).index(self.dtype)
            assert library.decode_mma(cache, ctypes.byref(args), max_items)
        return out


def check(problem: Problem, out: Tensor) -> None:
    """Checks that an output is near the float64 answer, and zero for an empty sequence."""
    error = relative_error(out, problem.expected)
    assert error < max(BOUND[problem.dtype], 4e-3 if problem.fp8 else 0.0)
    assert not out[problem.case.seq_lens == 0].any(), "a sequence of length 0 gives zeros"


KINDS = ("bfloat16", "float16", "fp8", "fp8 of float16")
LENGTHS = [1, 0, 17, 180]
CASES = {  # num_heads, num_kv_heads, head_dim, block_size, options, wave of the plan
    "one item per row": (8, 2, 128, 16, {}, None),
    "split": (8, 2, 128, 16, {}, 12),
    "one query head": (2, 2, 64, 8, {}, 9),
    "two head tiles": (12, 1, 64, 32, {}, 20),
    "two groups of heads": (20, 1, 64, 16, {}, None),
    "window": (4, 2, 64, 16, {"window": 70}, 9),
    "window of one": (4, 2, 64, 8, {"window": 1}, None),
    "alibi": (4, 2, 64, 16, {"alibi": True}, 6),
    "odd rows": (4, 2, 80, 8, {"window": 33, "alibi": True}, 11),
    "wide": (4, 1, 256, 16, {}, 5),
    "soft cap": (4, 2, 80, 8, {"window": 70, "alibi": True, "softcap": 0.7}, 9),
}


def problem_of(kind: str, lengths: list[int], *sizes: int, **options: Any) -> Problem:
    """Of one of `KINDS`; sizes: the first four of a case."""
    dtype = torch.float16 if "float16" in kind.split() else torch.bfloat16
    return Problem(lengths, *sizes, dtype, fp8=kind.startswith("fp8"), **options)


@pytest.mark.parametrize(("name", "kind"), matrix(list(CASES), KINDS))
def test_decode_agrees_with_dense_float64(kernels: ctypes.CDLL, name: str, kind: str) -> None:
    *sizes, options, wave = CASES[name]
    problem = problem_of(kind, LENGTHS, *sizes, **options)
    # Both kinds of copies, here and there; and once round-robin.
    set_schedule(kernels, list(CASES).index(name) + KINDS.index(kind))
    check(problem, problem.run(kernels, wave=wave))


def test_more_pages_than_a_register_window(kernels: ctypes.CDLL) -> None:
    """A warp holds the pages of 16 chunks, 1024 tokens of the block, and loads the next ones."""
    for seed, length in ((2, 1024), (3, 1025), (4, 2300)):
        set_schedule(kernels, seed)
        problem = Problem([length], 2, 1, 64, 8, torch.bfloat16)
        check(problem, problem.run(kernels))


@pytest.mark.parametrize("seed", only(range(6), range(10)))
def test_random_cases(kernels: ctypes.CDLL, seed: int) -> None:
    rnd = random.Random(seed)
    head_dim = rnd.choice([64, 64, 80, 128, 256])
    num_kv_heads = rnd.choice([1, 2])
    block_size = rnd.choice([8, 16, 32])
    near = [block_size - 1, block_size, block_size + 1, 15, 16, 17, 63, 64, 65]
    lengths = [rnd.choice([0, 1, *near, rnd.randrange(1, 250)]) for _ in range(rnd.randrange(1, 5))]
    problem = Problem(
        lengths, rnd.choice([1, 2, 3, 4, 7, 8, 9, 16, 17]) * num_kv_heads, num_kv_heads, head_dim,
        block_size, rnd.choice([torch.bfloat16, torch.float16]), fp8=rnd.random() < 0.5,
        window=rnd.choice([None, None, rnd.randrange(1, 150)]), alibi=rnd.random() < 0.2,
        seed=seed,
    )  # fmt: skip
    wave = rnd.choice([None, 1, 3, 12, 40])
    for offset in (0, 1):
        set_schedule(kernels, 2 * seed + offset)
        check(problem, problem.run(kernels, wave=wave))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_plain_kernel(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    for seed, (shape, options, wave) in enumerate((
        ((6, 1, 64, 16), {}, None),
        ((4, 4, 20, 8), {"alibi": True}, 7),
        ((7, 1, 256, 32), {"window": 40, "softcap": 0.7}, 20),
    )):  # fmt: skip
        set_schedule(kernels, seed)
        problem = Problem([1, 31, 33, 0, 170], *shape, dtype, **options)
        check(problem, problem.run(kernels, wave=wave, plain=True))


def test_long_context_in_fp8_loses_no_accumulation(kernels: ctypes.CDLL) -> None:
    """Values with a mean, whose running sum would drift in a narrow accumulator, and a needle."""
    gen = generator(7)
    length, head_dim = 6000, 64
    problem = Problem([1], 1, 1, head_dim, 32, torch.bfloat16, fp8=True)
    blocks = -(-length // 32)
    k = torch.randn(blocks * 32, 1, head_dim, generator=gen) * 0.3
    v = (torch.randn(blocks * 32, 1, head_dim, generator=gen) * 0.3 + 1).to(FP8)
    q = problem.q
    k[4321] = q[0].float() * 2  # the needle
    k = k.to(FP8)
    problem.case.block_table = torch.randperm(blocks, generator=gen).int()[None]
    problem.case.seq_lens = torch.tensor([length], dtype=torch.int32)
    k_cache, v_cache = torch.empty_like(k).view(torch.uint8), torch.empty_like(v).view(torch.uint8)
    table = problem.case.block_table[0].long()
    k_cache.view(blocks, -1)[table] = k.view(torch.uint8).view(blocks, -1)
    v_cache.view(blocks, -1)[table] = v.view(torch.uint8).view(blocks, -1)
    problem.k_cache = k_cache.view(FP8).view(blocks, 32, 1, head_dim)
    problem.v_cache = v_cache.view(FP8).view(blocks, 32, 1, head_dim)
    logits = (k[:length, 0].double() @ q[0, 0].double()) * problem.scale
    weights = torch.softmax(logits, 0)
    assert weights[4321] > 10 * weights.mean()
    problem.expected = (weights[:, None] * v[:length, 0].double()).sum(0)[None, None] * V_SCALE
    set_schedule(kernels, 1)
    for wave in (None, 40):
        check(problem, problem.run(kernels, wave=wave))


def plan_problem(lengths: list[int], window: int | None = None) -> Problem:
    """A problem for plans alone, without caches of these lengths."""
    problem = Problem([1], 1, 1, 64, 16, torch.bfloat16, window=window)
    problem.case.seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return problem


def _check_plan(problem: Problem, start: Tensor, items: Tensor, wave: int) -> None:
    lengths = problem.case.seq_lens.tolist()
    borders, rows = start.tolist(), items.tolist()
    assert borders[0] == 0
    assert borders[-1] <= len(rows)
    padded = lengths.count(0)
    if len(lengths) - padded < wave:
        assert borders[-1] - padded <= wave
    assert all(row == [-7] * 4 for row in rows[borders[-1] :]), "written beyond the list"
    for row, length in enumerate(lengths):
        mine = rows[borders[row] : borders[row + 1]]
        assert mine
        assert all(item[0] & 0x7FFFFFFF == row and item[3] == length for item in mine)
        assert all((item[0] < 0) == (len(mine) > 1) for item in mine)
        first = max(0, length - problem.window) // 16
        assert (mine[0][1], mine[-1][2]) == (first, -(-length // 16))
        assert all(a[2] == b[1] for a, b in itertools.pairwise(mine))
        assert length == 0 or all(item[2] > item[1] for item in mine)


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_complete_and_balanced(kernels: ctypes.CDLL, seed: int) -> None:
    rnd = random.Random(seed)
    set_schedule(kernels, seed)
    lengths = [rnd.choice([0, 1, 16, 17, rnd.randrange(3000)]) for _ in range(rnd.randrange(1, 40))]
    if seed == 7:
        lengths = [rnd.randrange(100) for _ in range(300)]  # more rows than the block has threads
    problem = plan_problem(lengths, rnd.choice([None, 500]))
    for wave in (1, 7, 33, 200):
        start, items = problem.plan(kernels, wave, 4)
        _check_plan(problem, start, items, wave)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "plain"])
def test_offsets_beyond_32_bits(kernels: ctypes.CDLL, kind: str) -> None:
    dtype = torch.float32 if kind == "plain" else torch.bfloat16
    problem = Problem([40, 0, 17], 4, 2, 64, 16, dtype, fp8=kind == "fp8")
    for wave in (None, 40):
        check(problem, problem.run(kernels, wave=wave, plain=kind == "plain", is_far=True))


def test_a_plan_of_short_items_fits_into_its_list(kernels: ctypes.CDLL) -> None:
    """As many rows as a wave has items, and 5/8 of the mean share just under two chunks."""
    set_schedule(kernels, 0)
    problem = plan_problem([48] * 28 + [64] * 4)
    start, items = problem.plan(kernels, 32, 1)
    _check_plan(problem, start, items, 32)


def test_even_rows_stay_whole_and_one_long_row_is_cut(kernels: ctypes.CDLL) -> None:
    set_schedule(kernels, 0)
    start, _ = plan_problem([4096] * 64).plan(kernels, 33, 16)
    assert start.tolist() == list(range(65))
    start, items = plan_problem([100_000, *[1500] * 63]).plan(kernels, 100, 16)
    assert 20 < start[1] <= 37
    spans = (items[: start[-1], 2] - items[: start[-1], 1]).tolist()
    assert max(spans) * 16 < 5200


@pytest.mark.parametrize("lengths", [[50_000], [3000, 70, 900], [4096] * 20], ids=len)
def test_padded_rows_change_no_plan(kernels: ctypes.CDLL, lengths: list[int]) -> None:
    """A graph's batch is padded with rows of length 0: as many as a wave has items, and more."""
    whole, padded = plan_problem(lengths), plan_problem([*lengths, *[0] * 63])
    num_seqs = len(lengths)
    for wave in (16, 33):
        set_schedule(kernels, wave)
        start, items = whole.plan(kernels, wave, 4)
        padded_start, padded_items = padded.plan(kernels, wave, 4)
        _check_plan(padded, padded_start, padded_items, wave)
        assert torch.equal(padded_start[: num_seqs + 1], start)
        assert torch.equal(padded_items[: start[-1]], items[: start[-1]])


def test_padded_rows_give_zeros_and_read_nothing(kernels: ctypes.CDLL) -> None:
    """Their block tables name blocks that do not exist."""
    set_schedule(kernels, 2)
    problem = Problem([700, *[0] * 30], 4, 2, 64, 16, torch.bfloat16)
    problem.case.block_table[1:] = 2**30
    check(problem, problem.run(kernels, wave=12))


# What the kernel takes of a block's shared memory, on cards that have less of it.

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
def small_card(kernels: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    kernels.set_card(CARDS["8.6, 8.9, 12.0"])
    yield kernels
    kernels.set_card(CARDS["9.0"])


FEWER = ((8, 2, 128, {}), (12, 1, 128, {"window": 70}), (4, 1, 256, {"alibi": True}))


@pytest.mark.parametrize(("kind", "case"), matrix(KINDS, [*FEWER, (12, 1, 256, {})]), ids=str)
def test_fewer_stages_agree_with_dense_float64(
    small_card: ctypes.CDLL, kind: str, case: tuple[Any, ...]
) -> None:
    *sizes, options = case
    problem = problem_of(kind, [1, 0, 17, 180, 600], *sizes, 16, **options)
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
