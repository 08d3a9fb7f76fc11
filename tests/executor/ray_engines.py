"""Engines whose ranks have processes of their own, and ranks that misbehave on purpose."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from support.engines import greedy

from executor.sabotage import VARIABLE, Sabotage, harm, write
from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.executor.group import Group
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch import processes
from tpengine.executor.launch.actors import RayWorker
from tpengine.host import start_ticks

cloudpickle.register_pickle_by_value(sys.modules["executor"])  # actors cannot import the tests


FOUR_KINDS = [
    greedy(60, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=24),
]
"""Requests whose outputs a lost rank must not change, as bits."""


def rank_engine(folder: Path | str, tp_size: int, **args: Any) -> LLMEngine:
    """An engine in float32 on `tp_size` CPU ranks, which are this process's children, with two
    steps in flight."""
    args = {"dtype": "float32", "device": "cpu", "num_device_blocks_override": 256, **args}
    args = {"executor": "processes", "async_scheduling": True, "disable_log_stats": True, **args}
    return LLMEngine.from_engine_args(EngineArgs(str(folder), tensor_parallel_size=tp_size, **args))


def ray_engine(folder: Path | str, tp_size: int, **args: Any) -> LLMEngine:
    """The same on actors of the session's cluster."""
    return rank_engine(folder, tp_size, executor="ray", **args)


def executor_of(engine: LLMEngine) -> GroupExecutor:
    """The engine's executor."""
    executor = engine._executor
    assert isinstance(executor, GroupExecutor)
    return executor


def kill_rank(engine: LLMEngine, rank: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a rank."""
    os.kill(executor_of(engine).places[rank].pid, number)


def at_step(number: int, act: Callable[[], object]) -> Callable[[], None]:
    """For `after_step` of `serve`: acts once, after this many steps."""
    num_steps = itertools.count(1)

    def after_step() -> None:
        if next(num_steps) == number:
            act()

    return after_step


def is_alive(engine_places: list[Any]) -> list[bool]:
    """For each rank, whether its process is still there."""
    return [start_ticks(place.pid) == place.start_ticks for place in engine_places]


def free_cpus() -> float:
    """CPUs of the cluster that are free."""
    return float(ray.available_resources().get("CPU", 0.0))


def replace_ranks(patch: pytest.MonkeyPatch, actor_class: type[RayWorker]) -> None:
    """Starts actors of this class where the package starts a `RayWorker`.

    The package's own name stays, as an actor's process looks it up there.
    """
    remote = ray.remote

    def replacing(*args: Any, **options: Any) -> Any:
        if args == (RayWorker,):
            args = (actor_class,)
        return remote(*args, **options)

    patch.setattr(ray, "remote", replacing)


@contextmanager
def sabotaged_rank(rank: int | None, sabotage: Sabotage) -> Iterator[list[Any]]:
    """Processes started in this context run `sabotage` in one rank (None: in all), once the
    worker's module is imported; yields a list that gets every group's places."""

    class SabotagedWorker(RayWorker):
        def create(self, *args: Any) -> bool:
            is_kept = super().create(*args)
            harm(self, rank, sabotage)
            return is_kept

    places: list[Any] = []
    start = Group.start

    def noting(self: Group, *args: Any) -> None:
        start(self, *args)
        places.extend(self.places)

    with pytest.MonkeyPatch.context() as patch:
        replace_ranks(patch, SabotagedWorker)
        patch.setattr(processes, "_PROGRAM", "executor.sabotage")
        patch.setenv(VARIABLE, write(rank, sabotage))
        patch.setattr(Group, "start", noting)
        yield places
