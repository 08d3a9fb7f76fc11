"""Engines whose ranks are actors of the session's cluster, and actors that misbehave on purpose."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from tpengine import EngineArgs, LLMEngine
from tpengine.executor.group import Group
from tpengine.executor.launch.actors import RayWorker
from tpengine.executor.launch.ray_executor import RayExecutor
from tpengine.host import start_ticks

cloudpickle.register_pickle_by_value(sys.modules["executor"])  # actors cannot import the tests

Wait = Callable[[Callable[[], bool], float], None]
"""Of the fixture `wait_until`."""


def ray_engine(folder: Path | str, tp_size: int, **args: Any) -> LLMEngine:
    """An engine in float32 on `tp_size` CPU ranks."""
    args = {"dtype": "float32", "device": "cpu", "num_device_blocks_override": 256, **args}
    return LLMEngine.from_engine_args(
        EngineArgs(
            str(folder),
            tensor_parallel_size=tp_size,
            executor="ray",
            disable_log_stats=True,
            **args,
        )
    )


def executor_of(engine: LLMEngine) -> RayExecutor:
    """The engine's executor."""
    executor = engine._executor
    assert isinstance(executor, RayExecutor)
    return executor


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


Sabotage = Callable[[Any], None]
"""Changes the module `tpengine.worker.worker` in the process of one rank."""


@contextmanager
def sabotaged_rank(rank: int | None, sabotage: Sabotage) -> Iterator[list[Any]]:
    """Actors started in this context run `sabotage` in one rank (None: in all), once the worker's
    module is imported; yields a list that gets every group's places."""

    class SabotagedWorker(RayWorker):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            answer = super().call(method, *args, **kwargs)
            if method == "join":
                self.own_rank = args[0]
            if method == "create" and rank in (None, self.own_rank):
                import tpengine.worker.worker as module

                sabotage(module)
            return answer

    places: list[Any] = []
    start = Group.start

    def noting(self: Group, *args: Any) -> None:
        start(self, *args)
        places.extend(self.places)

    with pytest.MonkeyPatch.context() as patch:
        replace_ranks(patch, SabotagedWorker)
        patch.setattr(Group, "start", noting)
        yield places


def missing_rank(module: Any) -> None:
    """A rank's report that another one is missing, without its number."""

    def connect(*_: Any) -> None:
        from tpengine.errors import RendezvousError
        from tpengine.logger import init_logger

        init_logger("tpengine.worker.worker").warning("only this rank is here")
        raise RendezvousError("a rank did not come")

    module.Worker.connect = connect


def killed_with_its_file(module: Any) -> None:
    """Rank 0's end between making the file in shared memory and removing its name."""

    def connect(_: Any, rendezvous: Any) -> None:
        from tpengine.distributed.shared_memory import SegmentFile

        SegmentFile(rendezvous.engine_id, rendezvous.epoch)
        kill_self()

    module.Worker.connect = connect


def in_steps(is_due: Callable[[Any], bool], action: Callable[[], None]) -> Sabotage:
    """Does something when a step of this kind begins."""

    def sabotage(module: Any) -> None:
        execute_model = module.Worker.execute_model

        def sabotaged(self: Any, step: Any) -> Any:
            if is_due(step):
                action()
            return execute_model(self, step)

        module.Worker.execute_model = sabotaged

    return sabotage


def in_step(number: int, action: Callable[[], None]) -> Sabotage:
    """Does something when a step begins."""
    return in_steps(lambda step: step.step == number, action)


def die_of(token_id: int) -> Sabotage:
    """No rank survives a sequence with this token in its prompt."""

    def holds_it(step: Any) -> bool:
        prompts = [new.token_ids[: new.num_prompt_tokens] for new in step.new_sequences]
        return any(token_id in prompt for prompt in prompts)

    return in_steps(holds_it, exit_with_7)


def fail_with_a_line() -> None:
    """An exception of no type of ours, after a line in the log."""
    logging.getLogger("tpengine.worker").warning("the disk makes a noise")
    raise ZeroDivisionError("cannot read block 17")


def die_with_a_word() -> None:
    """The process is gone, with a last word on its standard error."""
    os.write(2, b"these are my last words\n")
    kill_self()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10.0)  # another thread may stop first, and this one go on for a moment


def raise_something() -> None:
    raise ZeroDivisionError("no remainder")


def exit_with_7() -> None:
    os.write(2, b"this is the end\n")
    os._exit(7)


def sleep_long() -> None:
    """Heartbeats go on, the step does not."""
    time.sleep(60.0)


def in_load(action: Callable[[], None]) -> Sabotage:
    """Does something when the weights are about to be loaded."""

    def sabotage(module: Any) -> None:
        load_model = module.load_model

        def sabotaged(*args: Any) -> Any:
            action()
            return load_model(*args)

        module.load_model = sabotaged

    return sabotage
