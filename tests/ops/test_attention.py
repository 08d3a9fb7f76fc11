from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from support.matrix import matrix

from tpengine.ops import attention_ops as attention

from .cases import (
    ATTENTION_BOUND,
    CACHES,
    EMULATED,
    ISAS,
    PagedCase,
    backend,
    dense_attention,
    generator,
    make_case,
    nan_like,
    relative_error,
    threads,
)

# (num_heads, num_kv_heads, head_dim, block_size): every ratio, head size and block size once
SHAPES = [
    (4, 4, 64, 16),
    (8, 2, 80, 8),
    (6, 1, 96, 32),
    (14, 2, 112, 16),
    (12, 3, 128, 16),
    (6, 1, 256, 8),
    (3, 3, 16, 32),
    (50, 1, 48, 16),
    (7, 1, 192, 16),
]
# linear bias, window, soft cap; logits have a standard deviation of 1
OPTIONS = [
    (False, None, None), (True, None, None), (False, 20, None), (True, 1, None),
    (False, None, 0.7), (True, 20, 3.0),
]  # fmt: skip
NAMES = [(name, *d) for name, d in itertools.product(("reference", *reversed(ISAS)), CACHES)]
NAMES.append((EMULATED, torch.bfloat16, torch.bfloat16))  # the others go by vectors
IN_INT8 = [names for names in NAMES if names[-1] == torch.int8]
# in int8, which has its own operands only, a shape of each block size
PROBLEMS = [
    pytest.param(*problem.values[0], problem.values[1], marks=problem.marks)
    for problem in (
        *matrix([names for names in NAMES if names not in IN_INT8], SHAPES),
        *matrix(IN_INT8, SHAPES[1:4]),
    )
]
KERNELS = [names for names in NAMES if names[0] != "reference"]


def _slopes(num_heads: int, use_alibi: bool) -> torch.Tensor | None:
    return torch.logspace(-3, 0, num_heads) if use_alibi else None


@functools.cache
def _problem(
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    lengths: tuple[int, ...],
    counts: tuple,
) -> tuple[PagedCase, torch.Tensor, list[torch.Tensor]]:
    """A case, its queries, and the answer for each of OPTIONS."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    gen = generator(num_heads * head_dim)
    dtype, cache_dtype = dtypes
    case = make_case(
        list(lengths), num_kv_heads, head_dim, dtype, gen, block_size, cache_dtype=cache_dtype
    )
    q = case.queries(num_heads, list(counts), gen)
    expected = [
        dense_attention(case, q, list(counts), _slopes(num_heads, use_alibi), *rest)
        for use_alibi, *rest in OPTIONS
    ]
    return case, q, expected


def _attend(
    attend: Callable[..., None],
    case: PagedCase,
    q: torch.Tensor,
    *rest: object,
    rows: slice = slice(None),
) -> torch.Tensor:
    """Attention of the sequences `rows`; `rest` begins with their lengths, for a prompt after the
    places where the queries of each begin."""
    out = nan_like(q)
    tensors = [torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for x in rest]
    attend(out, q, case.k_cache, case.v_cache, case.block_table[rows], *tensors)
    return out


@pytest.mark.parametrize(("name", "dtype", "cache_dtype", "shape"), PROBLEMS, ids=str)
def test_decode_agrees_with_dense_float64(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype, shape: tuple
) -> None:
    block_size = shape[3]
    lengths = (1, block_size - 1, block_size, block_size + 1, 0, 2, 77, 255, 256, 257)
    case, q, expected = _problem(shape, (dtype, cache_dtype), lengths, (1,) * len(lengths))
    for (use_alibi, *limits), answer in zip(OPTIONS, expected, strict=True):
        rest = (shape[2] ** -0.5, _slopes(shape[0], use_alibi), *limits)
        with backend(name) as op:
            out = _attend(op("paged_attention"), case, q, case.seq_lens, *rest)
        assert relative_error(out, answer) < ATTENTION_BOUND[dtype]
        assert not out[4].any(), "a sequence of length 0 gives zeros"


@pytest.mark.parametrize(("name", "dtype", "cache_dtype", "shape"), PROBLEMS, ids=str)
def test_prefill_agrees_with_dense_float64(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype, shape: tuple
) -> None:
    block_size = shape[3]
    # whole prompts, chunks over cached context, single queries, and a sequence without queries
    lengths = (1, block_size, block_size + 1, 65, 33, 20, 280)
    counts = (1, block_size, block_size + 1, 7, 1, 0, 30)
    case, q, expected = _problem(shape, (dtype, cache_dtype), lengths, counts)
    starts = [0, *itertools.accumulate(counts)]
    for (use_alibi, *limits), answer in zip(OPTIONS, expected, strict=True):
        rest = (shape[2] ** -0.5, _slopes(shape[0], use_alibi), *limits)
        with backend(name) as op:
            out = _attend(op("prefill_attention"), case, q, starts, case.seq_lens, *rest)
        assert relative_error(out, answer) < ATTENTION_BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), NAMES, ids=str)
def test_long_context_over_several_partitions(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    gen = generator(1)
    lengths = [1023, 1024, 1025, 2100]
    case = make_case(lengths, 1, 64, dtype, gen, cache_dtype=cache_dtype)
    counts = [1] * len(lengths)
    q = case.queries(6, counts, gen)
    for rest in ((None, None), (1500, 1.0)):
        with backend(name) as op:
            out = _attend(op("paged_attention"), case, q, case.seq_lens, 0.125, None, *rest)
        expected = dense_attention(case, q, counts, None, *rest)
        assert relative_error(out, expected) < ATTENTION_BOUND[dtype]


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), KERNELS, ids=str)
def test_a_sequence_is_the_same_alone_and_in_a_crowd(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """The same bits with other neighbours, other threads, and other chunks of the prompt."""
    gen = generator(3)
    lengths = [2300, 40, 1030, 300, 17, 1, 512]
    case = make_case(lengths, 2, 64, dtype, gen, cache_dtype=cache_dtype)
    q = case.queries(14, [1] * len(lengths), gen)
    decode = functools.partial(_attend, attention.paged_attention, case)
    prefill = functools.partial(_attend, attention.prefill_attention, case)
    with backend(name):
        for window in (None, 1100):
            rest = (0.125, None, window)
            expected = decode(q, case.seq_lens, *rest)
            with threads(4):
                assert torch.equal(decode(q, case.seq_lens, *rest), expected)
            for row in range(len(lengths)):
                rows = slice(row, row + 1)
                own = (case.seq_lens[rows], *rest)
                alone = decode(q[rows], *own, rows=rows)
                with threads(4):  # more threads than kv heads: the context is split
                    four = decode(q[rows], *own, rows=rows)
                chunk = prefill(q[rows], [0, 1], *own, rows=rows)
                for out in (alone, four, chunk):
                    assert torch.equal(out, expected[rows])


@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_chunks_of_a_prompt_give_what_the_whole_gives(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None
) -> None:
    gen = generator(4)
    length = 1100
    case = make_case([length], 1, 64, dtype, gen, cache_dtype=cache_dtype)
    q = case.queries(3, [length], gen)

    def chunk(first: int, last: int) -> torch.Tensor:
        rest = ([0, last - first], [last], 0.125, None, window)
        return _attend(attention.prefill_attention, case, q[first:last], *rest)

    with backend(name), threads(3):
        whole = chunk(0, length)
        for first, last in ((0, 13), (13, 14), (14, 271), (271, 1030), (1030, 1100)):
            assert torch.equal(chunk(first, last), whole[first:last])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("name", "dtype", "cache_dtype"), KERNELS, ids=str)
def test_queries_that_see_later_keys(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None
) -> None:
    """As in a picture of Gemma 3; also behind cached context, and over a partition's border."""
    lengths, counts, gen = [1100, 70, 20], [600, 30, 20], generator(8)
    case = make_case(lengths, 2, 64, dtype, gen, cache_dtype=cache_dtype)
    q = case.queries(6, counts, gen)
    starts = [0, *itertools.accumulate(counts)]
    own = [n - m + 1 + i for n, m in zip(lengths, counts, strict=True) for i in range(m)]
    ends = torch.tensor(own, dtype=torch.int32)
    for first, last in ((3, 40), (500, 560), (602, 620), (640, 650)):
        ends[first:last] = ends[last - 1]
    rest = (0.125, None, window, None, 1.0, 1.0)
    answers = []
    for backend_name in (name, "reference"):
        with backend(backend_name) as op:
            attend = op("prefill_attention")
            answers += [
                _attend(attend, case, q, starts, case.seq_lens, *rest, key_ends)
                for key_ends in (ends, None, own)
            ]
    seeing, causal, same, expected, *_ = answers
    assert relative_error(seeing, expected) < ATTENTION_BOUND[dtype]
    assert torch.equal(causal, same)
    assert relative_error(causal, expected) > 0.01


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([2, 1, 4, 4], r"key_ends\[1\] is 1; expected 2 to 4"),
        ([2, 2, 5, 4], "is 5; expected 3 to 4"),
    ],
)
def test_key_ends_out_of_order_are_refused(ends: list[int], words: str) -> None:
    gen = generator(9)
    case = make_case([4], 1, 16, torch.float32, gen)
    q = case.queries(1, [4], gen)
    rest = (0.25, None, None, None, 1.0, 1.0, ends)
    with pytest.raises(RuntimeError, match=words):
        _attend(attention.prefill_attention, case, q, [0, 4], case.seq_lens, *rest)


@pytest.mark.parametrize("name", ISAS)
def test_padding_rows_are_left_alone(name: str) -> None:
    gen = generator(5)
    case = make_case([9], 2, 64, torch.bfloat16, gen)
    q = case.queries(4, [9], gen)
    padded = torch.cat([q, nan_like(q[:3])])
    out, starts = torch.full_like(padded, 7.0), torch.tensor([0, 9], dtype=torch.int32)
    caches = case.k_cache, case.v_cache, case.block_table
    with backend(name):
        attention.prefill_attention(out, padded, *caches, starts, case.seq_lens, 0.125)
    assert (out[9:] == 7.0).all()
    assert relative_error(out[:9], dense_attention(case, q, [9])) < 4e-3


@pytest.mark.parametrize("name", ISAS)
def test_large_logits_stay_finite(name: str) -> None:
    gen = generator(6)
    case = make_case([100], 1, 64, torch.float32, gen)
    q = case.queries(2, [1], gen) * 1e4
    with backend(name):
        out = _attend(attention.paged_attention, case, q, case.seq_lens, 1.0)
    best = (case.k[0][:, 0].double() @ q[0].double().T).argmax(0)
    expected = case.v[0][best, 0][None]
    assert math.isfinite(float(out.sum()))
    assert relative_error(out, expected) < 1e-5
