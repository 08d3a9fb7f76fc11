"""`kill -9` of random ranks at seeded moments of phases that are aimed at."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from executor.ray_engines import executor_of
from support.patches import on_call

from tpengine import LLMEngine
from tpengine.errors import RankLoss
from tpengine.executor.group import Group
from tpengine.host import start_ticks
from tpengine.messages import StepInput

IN_STEPS = ("prefill", "decode", "swap")
PHASES = ("loading", *IN_STEPS, "idle", "recovery")
OTHER_PHASES = ("create", "open_rendezvous", "connect", "init_device", "init_cache_engine")
"""Of a rebuild, besides the load of the weights, by the calls that the ranks get."""
MAX_COUNTDOWN = 5
"""Steps of the phase that may pass before one is hit."""
MAX_DELAY_S = 4e-3
"""A step or a call of the tiny model takes about that; some take less, so after each miss the kill
comes sooner."""


def kind_of(step: StepInput) -> str:
    """Which phase of serving a step belongs to."""
    if step.block_moves.swap_outs or step.block_moves.swap_ins:
        return "swap"
    return "prefill" if max(step.num_scheduled_tokens) > 1 else "decode"


class Killer:
    """Kills one rank after another, each in the phase whose turn it is.

    Where a kill hit is not what it aimed at but what the engine found: a target stays until it has
    been hit. One that lies in a rebuild has a step killed first.

    Attributes:
        groups: all groups of ranks that there have been.
        killed: pid of each rank, in order.
        in_flight: requests that were unfinished at each kill.
    """

    def __init__(self, engine: LLMEngine, targets: Iterable[str], seed: int) -> None:
        self._engine = engine
        self._executor = executor_of(engine)
        self._targets = deque(targets)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._countdown = 0
        self._phase = ""
        self._kinds: dict[tuple[int, int], str] = {}
        group = self._executor._group
        self.groups: list[Group] = [group]
        self.killed: list[int] = []
        self.in_flight: list[int] = []
        self._next()

    @property
    def target(self) -> str | None:
        """The phase that is aimed at; None: nothing is, as all were hit."""
        with self._lock:
            self._settle()
            return self._targets[0] if self._targets else None

    @property
    def losses(self) -> list[RankLoss]:
        """What the engine found, in order."""
        return [group.loss for group in self.groups if group.loss is not None]

    @property
    def hits(self) -> list[str]:
        """The phase of each."""
        return [self._phase_of(loss) for loss in self.losses]

    def kill_idle(self) -> None:
        """While no step runs."""
        with self._lock:
            self._fire(0.0)

    def on_step(self, step: StepInput) -> None:
        """Before each step."""
        with self._lock:
            kind = self._kinds[self._executor.epoch, step.step] = kind_of(step)
            self._settle()
            if not self._targets or self._targets[0] == "idle" or self._is_flying:
                return
            target = self._targets[0]
            if target in IN_STEPS and kind != target:
                return
            self._countdown -= 1
            if self._countdown < 0:
                self._fire(self._rng.uniform(0.0, self._max_delay_s))

    def on_call(self, group: Group, phase: str, *_: object, **__: object) -> None:
        """Before each call of a group's start; in the thread that rebuilds."""
        with self._lock:
            if group not in self.groups:
                self.groups.append(group)
            self._settle()
            if not self._targets or self._is_flying or not group.places:
                return
            wanted = {"loading": "load_model", "recovery": self._phase}.get(self._targets[0])
            if phase == wanted:
                self._fire(self._rng.uniform(0.0, self._max_delay_s))

    @property
    def _is_flying(self) -> bool:
        """Whether a kill's loss is not known yet."""
        return len(self.killed) > len(self.losses)

    def _settle(self) -> None:
        if self._targets and not self._is_flying and self._targets[0] in self.hits[self._known :]:
            self._targets.popleft()
            self._next()
        elif not self._is_flying and len(self.losses) > self._known:
            self._known = len(self.losses)
            self._max_delay_s /= 4
            self._phase = self._rng.choice(OTHER_PHASES)

    def _next(self) -> None:
        self._known = len(self.losses)
        self._countdown = self._rng.randint(0, MAX_COUNTDOWN)
        self._phase = self._rng.choice(OTHER_PHASES)
        self._max_delay_s = MAX_DELAY_S

    def _fire(self, delay_s: float) -> None:
        place = self._rng.choice(self.groups[-1].places)
        self.killed.append(place.pid)
        self.in_flight.append(self._engine.get_num_unfinished_requests())

        def kill() -> None:
            if start_ticks(place.pid) == place.start_ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)

        timer = threading.Timer(delay_s, kill)
        timer.daemon = True
        timer.start()

    def _phase_of(self, loss: RankLoss) -> str:
        if loss.phase == "execute_model":
            return self._kinds[loss.epoch, loss.step]
        return {"load_model": "loading", "idle": "idle"}.get(loss.phase, "recovery")


@contextmanager
def killer(engine: LLMEngine, targets: Iterable[str], seed: int) -> Iterator[Killer]:
    """Kills ranks of this engine while the context lasts."""
    hunter = Killer(engine, targets, seed)
    with pytest.MonkeyPatch.context() as patch:
        on_call(patch, executor_of(engine), "send_step", hunter.on_step)
        on_call(patch, Group, "call_each", hunter.on_call)
        yield hunter
