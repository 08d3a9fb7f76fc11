"""Engines whose ranks are actors of the session's cluster, and actors that misbehave on purpose."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from tpengine import EngineArgs, LLMEngine
from tpengine.executor.group import Group
from tpengine.executor.launch.actors import RayWorker
from tpengine.executor.launch.ray_executor import RayExecutor
from tpengine.host import start_ticks


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


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, in seconds, to the nanosecond."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def idle_cpu_s(
    engines: Sequence[LLMEngine], window_s: float, limit_s: float
) -> list[tuple[float, float]]:
    """CPU seconds that engines at rest spend in a window: for each what its ranks take more than as
    many actors of Ray's that do nothing at all, and what this process takes.

    Others' work that is not over yet only adds to it: of up to three windows the quietest counts,
    the first in which each stays below `limit_s`.
    """

    class Idle:
        def pid(self) -> int:
            return os.getpid()

    ranks = [[place.pid for place in executor_of(engine).places] for engine in engines]
    idlers = [ray.remote(num_cpus=0)(Idle).remote() for _ in ranks[0]]
    bare = ray.get([idler.pid.remote() for idler in idlers], timeout=60.0)
    windows = []
    for _ in range(3):
        time.sleep(0.5)
        everyone = [os.getpid(), *bare, *(pid for pids in ranks for pid in pids)]
        before = {pid: cpu_s(pid) for pid in everyone}
        time.sleep(window_s)
        spent = {pid: cpu_s(pid) - before[pid] for pid in everyone}
        own, nothing = spent[os.getpid()], sum(spent[pid] for pid in bare)
        windows.append([(sum(spent[pid] for pid in pids) - nothing, own) for pids in ranks])
        if all(more < limit_s for more, _ in windows[-1]):
            break
    for idler in idlers:
        ray.kill(idler)
    return min(windows, key=lambda window: max(more for more, _ in window))


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


def fail_load(module: Any) -> None:
    """An exception of no type of ours, after a line in the log."""

    def load_model(*_: Any) -> None:
        logging.getLogger("tpengine.worker").warning("the disk makes a noise")
        raise ZeroDivisionError("cannot read block 17")

    module.load_model = load_model


def die_in_load(module: Any) -> None:
    """The process is gone, with a last word on its standard error."""

    def load_model(*_: Any) -> None:
        os.write(2, b"these are my last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    module.load_model = load_model


def in_step(number: int, action: Callable[[], None]) -> Sabotage:
    """Does something when a step begins."""

    def sabotage(module: Any) -> None:
        execute_model = module.Worker.execute_model

        def sabotaged(self: Any, step: Any) -> Any:
            if step.step == number:
                action()
            return execute_model(self, step)

        module.Worker.execute_model = sabotaged

    return sabotage


def die_of(token_id: int) -> Sabotage:
    """No rank survives a sequence with this token in its prompt."""

    def sabotage(module: Any) -> None:
        execute_model = module.Worker.execute_model

        def sabotaged(self: Any, step: Any) -> Any:
            prompts = [new.token_ids[: new.num_prompt_tokens] for new in step.new_sequences]
            if any(token_id in prompt for prompt in prompts):
                os.write(2, b"that was poison\n")
                os._exit(7)
            return execute_model(self, step)

        module.Worker.execute_model = sabotaged

    return sabotage


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
