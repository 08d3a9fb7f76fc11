"""A vision tower takes turns with the steps of its rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
from support.patches import on_call

from tpengine.messages import PictureLoad
from tpengine.worker.tower_turns import TowerTurns

CPU = torch.device("cpu")
LAYER_S = 0.03


class Clock:
    """Goes on only when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowTower:
    """Each of its layers takes a while; as many as the picture is high."""

    before_layer: Callable[[], None]

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_layers = 0

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        for _ in range(height):
            self.before_layer()
            self._clock.now += LAYER_S
            self.num_layers += 1
        if width > 1:
            raise ValueError("too wide")
        return torch.full((height, 2), float(pixels[0]))


class Rank:
    """Gives a tower its turns, between steps of a length."""

    def __init__(self, share: float = 0.25) -> None:
        self.clock = Clock()
        self.tower = SlowTower(self.clock)
        self.turns = TowerTurns(self.tower, share, torch.float32, CPU, self.clock)

    def ask(self, name: str, num_layers: int, width: int = 1, num_rows: int | None = None) -> None:
        num_rows = num_layers if num_rows is None else num_rows
        load = PictureLoad(name.encode(), num_rows, num_layers, width, name.encode())
        self.turns.ask(load)

    def give_turn(self, step_s: float = 0.0) -> int:
        """The turn before a step without rows, or after one of so many seconds; returns how many
        layers were computed."""
        before = self.tower.num_layers
        self.clock.now += step_s
        self.turns.begin_turn(is_alone=not step_s)
        assert self.turns.is_over(60.0)
        return self.tower.num_layers - before


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.turns.close()
    assert all(thread.name != "tower" for thread in threading.enumerate())


def test_a_turn_that_has_all_time_lasts_until_all_is_computed() -> None:
    rank = Rank(share=1.0)
    rank.ask("a", 50)
    assert (rank.give_turn(step_s=0.01), rank.turns.take_results().keys()) == (50, {b"a"})
    rank.ask("b", 5)
    assert rank.give_turn() == 4
    assert rank.give_turn(step_s=0.01) == 1
    rank.turns.close()


def test_steps_with_rows_keep_three_quarters_of_their_speed(rank: Rank) -> None:
    rank.ask("a", 1000)
    start, num_steps = rank.clock.now, 200
    layers = [rank.give_turn(step_s=0.02) for _ in range(num_steps)]
    share = num_steps * 0.02 / (rank.clock.now - start)
    assert share == pytest.approx(0.75, abs=0.01)
    assert set(layers) == {0, 1}  # a layer is longer than a step's share: steps pay for it after
    assert rank.give_turn(step_s=3.0) in (33, 34)
    assert rank.give_turn(step_s=0.02) in (0, 1)
    assert not rank.turns.take_results()


def test_a_step_without_rows_gives_a_long_turn(rank: Rank) -> None:
    assert rank.give_turn() == 0
    rank.ask("a", 7)
    rank.ask("b", 2)
    assert (rank.give_turn(), rank.turns.take_results()) == (4, {})
    assert rank.give_turn() == 4
    results = rank.turns.take_results()
    assert results.keys() == {b"a"}
    assert torch.equal(torch.as_tensor(results[b"a"]), torch.full((7, 2), 97.0))
    assert (rank.give_turn(), rank.turns.take_results().keys()) == (1, {b"b"})


def test_time_without_pictures_counts_for_nothing(rank: Rank) -> None:
    rank.clock.now += 1000
    rank.ask("a", 100)
    assert rank.give_turn(step_s=0.03) == 1
    assert rank.give_turn(step_s=0.03) == 0


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"width": 2}, "the model's vision tower cannot take a picture of 2 x 3 pixels"),
        ({"num_rows": 4}, "a picture of 1 x 3 pixels has 3 features, and 4 tokens"),
    ],
)
def test_a_picture_without_features(rank: Rank, args: dict[str, int], problem: str) -> None:
    rank.ask("a", 3, **args)
    rank.ask("b", 1)
    assert rank.give_turn() == 4
    results = rank.turns.take_results()
    assert str(results[b"a"]).startswith(problem)
    assert torch.equal(torch.as_tensor(results[b"b"]), torch.full((1, 2), 98.0))


def test_a_picture_that_is_given_up_is_not_computed(rank: Rank) -> None:
    for name in "abc":
        rank.ask(name, 5)
    rank.turns.give_up(b"c")
    assert rank.give_turn() == 4
    rank.turns.give_up(b"a")  # the tower has begun with it
    rank.turns.give_up(b"b")
    assert (rank.give_turn(), rank.turns.take_results().keys()) == (1, {b"a"})
    assert rank.give_turn() == 0


def test_what_ends_the_thread_is_raised(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = RuntimeError("CUDA error in this operation or one before it")
    monkeypatch.setattr(rank.tower, "features", Mock(side_effect=fault))
    rank.ask("a", 5)
    with pytest.raises(RuntimeError, match="CUDA error"):
        rank.give_turn()


def test_a_turn_that_is_left_ends_before_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another rank may end the worker during a turn."""
    rank, begun, go_on = Rank(share=1.0), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    on_call(monkeypatch, rank.tower, "features", wait)
    rank.ask("a", 1000)
    rank.clock.now += 1
    rank.turns.begin_turn(is_alone=False)
    assert begun.wait(60)
    rank.turns._is_closed = True
    go_on.set()
    rank.turns.close()
    assert rank.tower.num_layers == 0


def test_the_thread_ends_in_the_middle_of_a_picture(rank: Rank) -> None:
    rank.ask("a", 100)
    assert rank.give_turn() == 4
