"""A group goes on with fewer ranks while there is no room for all, and gets them back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from executor.ray_engines import executor_of, kill_rank, rank_engine
from support.leftovers import nothing_left
from support.models import ModelShop
from support.namespaces import children_of
from support.patches import on_call
from support.waiting import PATIENCE_S, wait_until
from support.zoo import PLAIN

from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.engine import group_size
from tpengine.errors import EngineDeadError, PlacementError
from tpengine.executor.group import Group
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch import processes

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


class Room:
    """On the machine: for this many ranks.

    Attributes:
        seems: that a look for room finds more.
    """

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.seems = count, False
        start = processes.RankProcess

        def start_rank(name: str, *args: Any) -> Any:
            number = name.removeprefix("rank ")
            if not (int(number) < self.count if number.isdecimal() else self.seems):
                raise PlacementError(f"there is no room for {name}")
            return start(name, *args)

        patch.setattr(processes, "RankProcess", start_rank)
        patch.setattr(group_size, "_SHARE_PER_SIZE", 0.0)
        patch.setattr(group_size, "_FIRST_LOOK_S", 0.0)


class Served:
    """Requests of an engine, whose looks for room are awaited after each step."""

    def __init__(self, engine: LLMEngine, prompts: list[list[int]]) -> None:
        self.engine, self.prompts = engine, prompts
        self.outputs: dict[int, tuple[int, ...]] = {}
        self._num_wanted = engine.health().num_ranks_wanted
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), None, PARAMS, prompt_token_ids=prompt)

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[int(output.request_id)] = tuple(output.outputs[0].token_ids)
        if (look := self.engine._recovery._size.look) is not None:
            assert wait([look], PATIENCE_S).done

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails with `what` if something does not become true in time."""
        ends_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_at, f"{what}: {self.engine.health()}"
            self.step()

    def step_with(self, num_ranks: int) -> None:
        """Until a group of this size has done a few steps."""
        engine = self.engine

        def runs() -> bool:
            health = engine.health()
            return (health.num_ranks, health.state.value) == (num_ranks, "running")

        self.step_until(runs, f"{num_ranks} ranks do not run")
        for _ in range(4):
            self.step()
        stats = engine.stats()
        assert (stats.num_ranks, stats.num_ranks_wanted) == (num_ranks, self._num_wanted)
        assert len(stats.devices) == len(executor_of(engine).places) == num_ranks
        assert engine.has_unfinished_requests(), "the requests have ended before"


@contextmanager
def engine_of(models: ModelShop, size: int, **args: Any) -> Iterator[Served]:
    """An engine with running requests, whose outputs are those of transformers in the end."""
    folder = models.folder(PLAIN)
    prompts = models.oracle(folder).prompts((40, 7, 19), seed=3)
    with rank_engine(folder, size, min_ranks=1, **args) as engine:
        num_others = len(children_of(os.getpid())) - size
        served = Served(engine, prompts)
        served.step_with(size)
        yield served
        served.step_until(lambda: not engine.has_unfinished_requests(), "the requests do not end")
        assert engine.num_free_blocks == engine.num_total_blocks
        num_children = engine.health().num_ranks + num_others
        wait_until(lambda: len(children_of(os.getpid())) == num_children, what="some are left")
    answers = models.oracle(folder).answers(prompts)
    assert [served.outputs[number] for number in range(3)] == [x.token_ids for x in answers]


lose = partial(kill_rank, rank=-1)


@pytest.mark.parametrize("sizes", [[2, 1], [4, 2, 1], [4, 1]], ids=str)
def test_no_room_for_lost_ranks(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, caplog: Any, sizes: list[int]
) -> None:
    """Requests go on with fewer ranks, and later with all again."""
    room = Room(monkeypatch, sizes[0])
    with engine_of(models, sizes[0]) as served:
        for size in sizes[1:]:
            room.count = size
            lose(served.engine)
            served.step_with(size)
        room.count, room.seems = sizes[0], True
        served.step_with(sizes[0])
        records = served.engine.recoveries
        assert [record.is_resumed for record in records] == [False] * len(sizes)
        num_recoveries = served.engine.health().num_recoveries
        assert num_recoveries == len(sizes) - 1, "growing counts as a recovery"
    lack = f"{sizes[0] // 2} of {sizes[0]} ranks"
    assert f"The next attempt with {lack} follows in 0 s" in caplog.text
    assert f"the group is rebuilt with {sizes[-1]} of {sizes[0]} ranks: epoch" in caplog.text
    assert f"there is room for all {sizes[0]} ranks again: 3 requests will wait" in caplog.text


def test_room_that_only_seems_to_be_there(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that was to grow is made anew in its size, once and again; a loss of its only rank
    is replaced alone."""
    room = Room(monkeypatch, 2)
    with engine_of(models, 2) as served:
        engine = served.engine
        room.count = 1
        lose(engine)
        served.step_with(1)
        room.seems = True
        epoch = engine.health().epoch

        def has_grown() -> bool:
            progress = engine.health().recovery
            assert progress is None or progress.loss is None, "growing counts as a loss"
            return engine.health().epoch >= epoch + 2

        served.step_until(has_grown, "the group does not grow")
        room.seems = False
        served.step_with(1)
        lose(engine)
        served.step_until(
            lambda: engine.recoveries[-1].is_resumed, "the lost rank is not replaced alone"
        )
        served.step_with(1)
        assert len(engine._recovery._loss_times) == 2, "growing counts as a loss"


Act = Callable[[LLMEngine], object]


@contextmanager
def growing(models: ModelShop, patch: Any, owner: type, name: str, act: Act) -> Iterator[Served]:
    """A group that was lost, and gets all its ranks again.

    Args:
        act: what the thread that makes the group of all ranks does before its first such call.
    """
    room, begun = Room(patch, 2), threading.Event()
    with engine_of(models, 2) as served:
        room.count = 1
        lose(served.engine)
        served.step_with(1)

        def act_once(*_: Any) -> None:
            if not begun.is_set():
                begun.set()
                act(served.engine)

        on_call(patch, owner, name, act_once)
        room.count, room.seems = 2, True
        served.step_until(begun.is_set, "the group does not grow")
        yield served


@pytest.mark.parametrize(
    ("owner", "name", "attempts"),
    [
        (processes.ProcessHome, "replace", [1]),  # a rank of the smaller group, which ends then
        (Group, "join", [2, 1]),
        (Group, "load_model", [2, 1]),
        (GroupExecutor, "init_cache_engine", [2, 1]),
    ],
)
def test_a_loss_while_the_group_grows(
    models: ModelShop, monkeypatch: Any, owner: type, name: str, attempts: list[int]
) -> None:
    """Requests go on in the smaller group until the next one with all ranks is ready."""
    with growing(models, monkeypatch, owner, name, lose) as served:
        served.step_with(2)
        _, *growth = served.engine.recoveries
        assert [record.num_attempts for record in growth] == attempts
        assert served.engine.health().num_recoveries == 1, "growing counts as a recovery"


def test_an_abort_while_the_group_grows(models: ModelShop, monkeypatch: Any) -> None:
    """It is reported at once, and the same request can come again."""
    goes_on = threading.Event()

    def hold(_: LLMEngine) -> None:
        assert goes_on.wait(PATIENCE_S)

    with growing(models, monkeypatch, Group, "load_model", hold) as served:
        engine = served.engine
        engine.abort_request("1")
        [output] = engine.step()
        assert (output.request_id, output.outputs[0].finish_reason) == ("1", "abort")
        engine.add_request("1", None, PARAMS, prompt_token_ids=served.prompts[1])
        goes_on.set()
        served.step_with(2)


def test_a_shutdown_while_the_group_grows(models: ModelShop, monkeypatch: Any) -> None:
    """The thread that makes the group ends, a step says so, and nothing is left."""

    def hold(engine: LLMEngine) -> None:
        wait_until(executor_of(engine)._is_cancelled.is_set)

    with (
        nothing_left(),
        pytest.raises(EngineDeadError, match="shut down"),
        growing(models, monkeypatch, Group, "load_model", hold) as served,
    ):
        served.engine.shutdown()


def test_fewer_ranks_without_memory(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of one rank, whose blocks have twice the bytes, does not hold a sequence: both
    numbers are tried again until there is room for two ranks."""
    args = {"max_model_len": 128, "swap_space": 0, "num_device_blocks_override": None}
    with rank_engine(models.folder(PLAIN), 2) as engine:
        block_bytes = engine.stats().ledgers[0].block_bytes
    room = Room(monkeypatch, 2)
    with engine_of(models, 2, cpu_kv_cache_space=9.5 * block_bytes / 2**30, **args) as served:
        engine = served.engine
        assert engine.num_total_blocks == 9
        room.count = 1
        lose(engine)
        num_ranks: list[int] = []

        def is_tried_again() -> bool:
            num_ranks.append(engine.health().num_ranks)
            return num_ranks[-2:] == [1, 2]

        served.step_until(is_tried_again, "both numbers are not tried again")
        room.count = 2
        served.step_with(2)


def test_a_search_from_before_a_loss(models: ModelShop) -> None:
    """Its result ends no group: room is looked for anew. A rank that is replaced alone does not
    put the next search off."""
    args = EngineArgs(str(models.folder(PLAIN)), tensor_parallel_size=2, min_ranks=1)
    searches: list[Future[bool]] = []

    def search(num_more: int) -> Future[bool]:
        assert num_more == 1
        searches.append(Future())
        return searches[-1]

    size = group_size.GroupSize(args.create_engine_config("cpu"), search)
    size.note_loss(0.0)
    size.change(1000.0, is_hopeless=False)
    size.note_ready(1000.0)
    assert not size.grow(2000.0)
    assert size.look is searches[0]
    size.note_loss(2001.0)
    searches[0].set_result(True)
    assert not size.grow(2002.0)
    assert not size.grow(2002.0)
    assert size.look is searches[1]
    searches[1].set_result(True)
    assert size.grow(2003.0)
    assert size.num_ranks == 2
