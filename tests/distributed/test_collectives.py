"""Sums, concatenations and broadcasts between real processes."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.matrix import matrix

from distributed.ranks import Rank, Ranks, connect
from tpengine.distributed.collectives import share_a_card
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import Meeting
from tpengine.distributed.shared_memory import CAPACITY_BYTES
from tpengine.errors import CollectiveError, EngineError
from tpengine.messages import Rendezvous
from tpengine.ops.recording import Recording
from tpengine.worker.gpu import graphs as cuda_graph

KINDS = ("gloo", "shared memory")
NUM_RANKS = (2, 4)
DTYPES = (torch.bfloat16, torch.float32, torch.int64)
LARGE = CAPACITY_BYTES // 4 * 2 + 5
"""Elements: more than one chunk in either dtype, and an odd number."""
SIZES = (1, 2, 15, 16, 4097, LARGE)

each_kind = pytest.mark.parametrize("kind", KINDS)
each_size = pytest.mark.parametrize("num_ranks", NUM_RANKS)


def parts_of(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's tensor, the same in every process, of large and small numbers, so that the order
    of a sum matters."""
    generator = torch.Generator().manual_seed(sum(shape) + num_ranks)
    parts = []
    for _ in range(num_ranks):
        scale = 10.0 ** torch.randint(-2, 3, shape, generator=generator)
        parts.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return parts


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def careless_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sums in the reverse order, and rounds to the dtype at every step."""
    total = parts[-1]
    for part in parts[-2::-1]:
        total = total + part
    return total


def check_sums(state: Rank, kind: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        parts = parts_of(state.size, (size,), dtype)
        expected = sum_in_order(parts)  # before a rank's part is overwritten
        assert torch.equal(state[kind].all_reduce(parts[state.rank]), expected), size


@pytest.mark.parametrize(
    ("num_ranks", "kind", "dtype"), matrix(NUM_RANKS, KINDS, DTYPES[:2]), ids=str
)
def test_sum_order(kind: str, num_ranks: int, dtype: torch.dtype, groups: dict[int, Ranks]) -> None:
    """All kinds of groups give the same bits on all ranks: those of a sum in rank order, in
    float32, rounded once."""
    if num_ranks > 2:  # otherwise this test could not fail
        parts = parts_of(num_ranks, (4097,), dtype)
        assert not torch.equal(sum_in_order(parts), careless_sum(parts))
    groups[num_ranks].run(check_sums, kind, dtype)


def sum_special(state: Rank, kind: str) -> torch.Tensor:
    values = torch.tensor([float("inf"), float("nan"), -0.0, 3e38, 1e-40] * 9)
    return state[kind].all_reduce(values.bfloat16())


@each_kind
def test_sum_of_special_values(kind: str, groups: dict[int, Ranks]) -> None:
    for result in groups[2].run(sum_special, kind):
        infinite, nan, zero, over, _ = result.view(9, 5).float().unbind(1)
        assert torch.isinf(infinite).all()
        assert torch.isnan(nan).all()
        assert (zero == 0).all()
        assert (over == float("inf")).all()


def check_gathers(state: Rank, kind: str, dtype: torch.dtype) -> None:
    # Chunks of the last shape end within rows; a row of the shape before is longer than a chunk.
    for shape in [(1, 1), (3, 7), (0, 5), (2, CAPACITY_BYTES // 2 + 3), (700, 1001)]:
        parts = [part.to(dtype) for part in parts_of(state.size, shape, torch.float32)]
        # A strided view, like a slice of activations.
        own = parts[state.rank].repeat_interleave(2, dim=1)[:, ::2]
        expected = torch.cat(parts, dim=-1)
        assert torch.equal(state[kind].all_gather(own), expected), shape
        at_first = state[kind].gather(own)
        assert (at_first is None) == (state.rank > 0)
        assert at_first is None or torch.equal(at_first, expected), shape


@pytest.mark.parametrize(("kind", "num_ranks", "dtype"), matrix(KINDS, NUM_RANKS, DTYPES), ids=str)
def test_gather(kind: str, num_ranks: int, dtype: torch.dtype, groups: dict[int, Ranks]) -> None:
    groups[num_ranks].run(check_gathers, kind, dtype)


def check_broadcasts(state: Rank, kind: str) -> None:
    for size in (1, 33, CAPACITY_BYTES // 8 + 3):
        own = torch.arange(size) + 100 * state.rank
        assert torch.equal(state[kind].broadcast(own), torch.arange(size)), size


@each_kind
@each_size
def test_broadcast(kind: str, num_ranks: int, groups: dict[int, Ranks]) -> None:
    groups[num_ranks].run(check_broadcasts, kind)


def check_recorded(state: Rank, rows: int, num_rows: int) -> None:
    """Calls that are noted for `rows` rows and run with fewer, on new inputs each time."""
    group, recording = state["shared memory"], Recording(rows)
    own = torch.zeros(rows, 300)
    inputs = [own.clone() for _ in range(4)]
    with recording.noting():
        outputs = [group.all_reduce(inputs[0]), group.all_gather(inputs[1])]
        outputs += [group.broadcast(inputs[2]), group.gather(inputs[3])]
        with pytest.raises(RuntimeError, match=rf"shape \[300\]; expected {rows} rows"):
            group.all_reduce(inputs[0][0])
    assert recording.num_calls == 4
    for _ in range(3):
        own += torch.rand(rows, 300, generator=torch.Generator().manual_seed(state.rank))
        for x in inputs:
            x.copy_(own)
        run = own[:num_rows].clone()
        expected = [group.all_gather(run), group.broadcast(run.clone()), group.gather(run)]
        expected.insert(0, group.all_reduce(run))
        recording.run(num_rows)
        for output, wanted in zip(outputs, expected, strict=True):
            assert (output is None) == (wanted is None)
            assert output is None or torch.equal(output[:num_rows], wanted)
        assert torch.equal(inputs[0][num_rows:], own[num_rows:])


@each_size
def test_recorded_operations(num_ranks: int, groups: dict[int, Ranks]) -> None:
    groups[num_ranks].run(check_recorded, 7, 3)
    groups[num_ranks].run(check_recorded, 1100, 1000)  # several chunks, divided sums


def random_operations(state: Rank, kind: str, seed: int, count: int) -> None:
    """Each value identifies its rank and operation, and ranks are slow in turn, so that a slot that
    is used too early or too late gives a wrong value."""
    same = random.Random(seed)
    own = random.Random(seed + 1 + state.rank)
    group, size = state[kind], state.size
    for number in range(count):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.002)
        columns = same.choice([1, 5, 300])
        x = torch.full((2, columns), float(number * size + state.rank))
        expected = [float(number * size + rank) for rank in range(size)]
        operation = same.choice(["all_reduce", "all_gather", "gather", "gather", "broadcast"])
        result = getattr(group, operation)(x)
        if operation == "all_reduce":
            assert (result == sum(expected)).all(), number
        elif operation == "broadcast":
            assert (result == expected[0]).all(), number
        elif result is not None:
            wanted = torch.tensor(expected).repeat_interleave(columns)
            assert torch.equal(result, wanted.expand(2, -1)), (operation, number)


@each_size
def test_random_operations(num_ranks: int, groups: dict[int, Ranks]) -> None:
    groups[num_ranks].run(random_operations, "shared memory", 7, 600)


def interleave(state: Rank) -> list[float]:
    results = []
    for number in range(20):
        for scale, name in ((1.0, "shared memory"), (10.0, "second")):
            value = torch.full((3,), scale * (number + state.rank))
            results.append(float(state[name].all_reduce(value)[0]))
    return results


def test_two_groups_in_one_process(groups: dict[int, Ranks]) -> None:
    """Two engines do not affect each other."""
    groups[2].connect(name="second", kind="shared memory")
    expected = [scale * (2 * number + 1) for number in range(20) for scale in (1.0, 10.0)]
    assert groups[2].run(interleave) == [expected, expected]


def disagree(state: Rank, kind: str) -> None:
    if state.rank == 0:
        state[kind].all_reduce(torch.ones(8))
    else:
        state[kind].all_reduce(torch.ones(9))


def test_other_operation_is_told(two: Ranks) -> None:
    two.connect()
    for outcome in two.outcomes(disagree, "shared memory"):
        assert isinstance(outcome, CollectiveError)
        assert "another operation" in str(outcome) or "left the group because of" in str(outcome)


def check_through_the_host(state: Rank, rendezvous: Rendezvous) -> None:
    connect(state, "gloo through the host", "host", rendezvous)
    group, parts = state["host"], parts_of(2, (3, 5), torch.bfloat16)
    own = parts[state.rank]
    assert torch.equal(group.all_reduce(own), sum_in_order(parts))
    assert torch.equal(group.all_gather(own), torch.cat(parts, dim=-1))
    gathered = group.gather(own)
    assert (gathered is None) == (state.rank > 0)
    assert gathered is None or torch.equal(gathered, torch.cat(parts, dim=-1))
    assert torch.equal(group.broadcast(own), parts[0])
    assert not group.can_be_recorded
    can = [group.all_can(rank != state.rank, own.device) for rank in (0, 1, 2)]
    assert can == [False, False, True]
    group.close()


def test_ranks_that_share_a_card_exchange_through_the_host(two: Ranks) -> None:
    two.run(check_through_the_host, two.rendezvous("host"))


def compare_cards(state: Rank, rendezvous: Rendezvous, cards: list[str]) -> bool:
    meeting = Meeting(state.rank, rendezvous, state.stores.get("cards"))
    return share_a_card(meeting, cards[state.rank])


@pytest.mark.parametrize(("cards", "expected"), [(["a", "b", "c"], False), (["a", "b", "a"], True)])
def test_cards_are_compared(three: Ranks, cards: list[str], expected: bool) -> None:
    assert three.run(compare_cards, three.rendezvous("cards"), cards) == [expected] * 3


@pytest.mark.parametrize("size", [1, 2])
def test_the_wait_for_a_device_is_bounded(size: int) -> None:
    answers = iter([False, False, True])
    ParallelState(tp_size=size, timeout_s=5.0).wait_for(lambda: next(answers), "a step")
    assert next(answers, None) is None
    with pytest.raises(EngineError, match=r"rank 0 has not finished a step within 0\.05 s") as late:
        ParallelState(tp_size=size, timeout_s=0.05).wait_for(lambda: False, "a step")
    assert isinstance(late.value, CollectiveError) == (size > 1)


def test_graphs_are_recorded_at_all_ranks_or_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    cpu = torch.device("cpu")
    monkeypatch.setattr(cuda_graph.logger, "warning", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(cuda_graph, "has_cuda_kernels", lambda: True)

    def agree(can_be_recorded: bool, can: float) -> bool:
        """With another rank that answers `can`."""
        group: Any = Mock(can_be_recorded=can_be_recorded, all_reduce=lambda x: x + can)
        return cuda_graph.agree_on_graphs(ParallelState(1, 2, group), cpu)

    assert agree(True, 1.0)
    assert cuda_graph.agree_on_graphs(ParallelState(), cpu)
    assert lines == []
    assert not agree(True, 0.0)
    assert not agree(False, 1.0)
    monkeypatch.setattr(cuda_graph, "has_cuda_kernels", lambda: False)
    assert not cuda_graph.agree_on_graphs(ParallelState(), cpu)
    why = ("another rank cannot record them", "its ranks exchange tensors", "library is not loaded")
    assert [line.endswith(end) for line, end in zip(lines, why, strict=True)] == [True] * 3
