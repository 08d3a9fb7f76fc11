"""Mixtures of experts: every instruction set against float64, and independence of the batch."""

from __future__ import annotations

import pytest
import torch

from tpengine.ops.expert_ops import pack_experts
from tpengine.ops.huge_pages import HugePageArena

from .cases import BACKENDS, DTYPES, ISAS, backend, generator, nan_like, relative_error, threads

BOUND = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
ROUTES = {  # experts of each token, out of five
    "one token": [[3, 0, 1]],
    "all to one": [[4]] * 30,
    "some to none": [[1, 3], [3, 1], [1, 0]] * 5,
    "uneven": [[2, i % 5 if i % 5 != 2 else 0] for i in range(40)],
    "no tokens": [],
}
NUM_EXPERTS = 5
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _case(route: list[list[int]], dtype: torch.dtype, hidden: int = 70, inner: int = 48) -> Case:
    """x, ids, weights, gate_up, down. The weights of experts without tokens are NaN."""
    gen = generator(len(route))
    ids = torch.tensor(route, dtype=torch.int32).view(len(route), -1 if route else 2)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=gen) / hidden**0.5
    down = torch.randn(NUM_EXPERTS, hidden, inner, generator=gen)
    unused = [e for e in range(NUM_EXPERTS) if not (ids == e).any()]
    gate_up[unused] = down[unused] = torch.nan
    x = torch.randn(len(ids), hidden, generator=gen)
    return x.to(dtype), ids, torch.rand(ids.shape, generator=gen), gate_up.to(dtype), down.to(dtype)


def _packed(case: Case) -> Case:
    x, ids, weights, gate_up, down = case
    arena = HugePageArena()
    return x, ids, weights, pack_experts(gate_up, arena), pack_experts(down, arena)


def _expected(case: Case) -> torch.Tensor:
    x, ids, weights, gate_up, down = (tensor.double() for tensor in case)
    out = torch.zeros_like(x)
    for token, experts in enumerate(ids.long().tolist()):
        for choice, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            answer = down[expert] @ (torch.nn.functional.silu(gate) * up)
            out[token] += weights[token, choice] * answer
    return out


@pytest.mark.parametrize("name", ["dense", *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", ROUTES.values(), ids=list(ROUTES))
def test_equals_sums_in_float64(name: str, dtype: torch.dtype, route: list[list[int]]) -> None:
    case = _case(route, dtype)
    x, *rest = case if name == "dense" else _packed(case)
    hidden = x.shape[1]
    wide = torch.full((len(x), hidden + 6), torch.nan, dtype=dtype)
    wide[:, :hidden] = x
    out = nan_like(torch.empty(len(x), hidden + 5, dtype=dtype))
    with backend("reference" if name == "dense" else name) as op:
        op("expert_mlp")(out[:, :hidden], wide[:, :hidden], *rest)
    assert relative_error(out[:, :hidden], _expected(case)) < BOUND[dtype]
    assert out[:, hidden:].isnan().all(), "wrote beyond the last output"


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_alone_and_beside_nan(name: str, dtype: torch.dtype) -> None:
    x, ids, weights, *experts = _packed(_case(ROUTES["uneven"], dtype, 320, 160))
    x[3] = torch.nan
    with backend(name) as op:
        whole = torch.empty_like(x)
        with threads(2):
            op("expert_mlp")(whole, x, ids, weights, *experts)
        for rows in (slice(0, 1), slice(2, 19), slice(39, 40)):
            part = torch.empty_like(x[rows])
            op("expert_mlp")(part, x[rows], ids[rows], weights[rows], *experts)
            torch.testing.assert_close(part, whole[rows], rtol=0, atol=0, equal_nan=True)
    assert whole[3].isnan().all()
    assert whole.isnan().sum() == x.shape[1]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_top_experts(name: str, dtype: torch.dtype, normalize: bool) -> None:
    wide = torch.randn(300, 60, generator=generator(0)).to(dtype) * 4
    logits = wide[:, :57]
    logits[2, :] = logits[2, :].sort().values  # the best come last
    logits[7, 9] = torch.nan
    ids, weights = torch.full((300, 6), -1, dtype=torch.int32), torch.full((300, 6), torch.nan)
    with backend(name) as op, threads(2):
        op("top_experts")(ids, weights, logits, normalize)
    assert weights[7].isnan().all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 57
    expected = logits.double().softmax(-1).nan_to_num(0.0)
    values = expected.topk(6).values
    chosen = expected.gather(-1, ids.long())
    rows = torch.arange(300) != 7
    torch.testing.assert_close(chosen[rows], values[rows])  # of equal experts any may be chosen
    assert all(len(set(row)) == 6 for row in ids[rows].tolist())
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(weights[rows].double(), chosen[rows], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_gated(name: str, dtype: torch.dtype) -> None:
    gen = generator(1)
    total, x, gate = (torch.randn(9, size, generator=gen).to(dtype) for size in (37, 37, 3))
    expected = total.double() + gate[:, 1:2].double().sigmoid() * x.double()
    with backend(name) as op:
        op("add_gated")(total, x, gate[:, 1:2])
    assert relative_error(total, expected) < BOUND[dtype]
