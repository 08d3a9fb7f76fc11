"""A lost rank is replaced alone: only unanswered steps are computed again, and every output is as
without the loss, as bits."""

from __future__ import annotations

import functools
import gc
import os
import platform
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from support.engines import bits, greedy
from support.leftovers import nothing_left
from support.models import ModelShop
from support.patches import on_call
from support.waiting import PATIENCE_S, wait_until
from support.zoo import PLAIN, ZOO

from executor.moments import Orders, install
from executor.ray_engines import FOUR_KINDS, executor_of, is_alive, kill_rank, sabotaged_rank
from executor.sabotage import in_step, kill_self
from tpengine import EngineArgs, LLMEngine, RequestOutput
from tpengine.errors import EngineDeadError
from tpengine.executor import group_executor
from tpengine.executor.group import Group
from tpengine.executor.launch import processes, ray_home
from tpengine.executor.launch.actors import ActorSpare, Agents
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.launch.processes import ProcessHome
from tpengine.executor.launch.template import Template
from tpengine.executor.watch import FENCE_S, HEARTBEAT_S, RankWatch
from tpengine.host import LOOPBACK

FIELDS = {
    "dtype": "float32",
    "device": "cpu",
    "executor": "processes",
    "max_recoveries": 10_000,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "num_device_blocks_override": 18,
    "preemption_mode": "swap",
    "swap_space": 0.05,
}
LENGTHS = (60, 7, 19, 33)
Kill = Callable[[list[int]], None]
"""Gets the processes of the ranks, in rank order."""


class Served:
    """An engine whose ranks are lost, and the requests that it serves again and again.

    Attributes:
        expected: what each request gets without a loss.
    """

    def __init__(self, engine: LLMEngine, prompts: list[list[int]]) -> None:
        self.engine, self.prompts = engine, prompts
        self.executor: Any = executor_of(engine)
        self.expected = self.serve({})

    def serve(self, kills: dict[int, Kill]) -> list[Any]:
        """What each request gets.

        Args:
            kills: what happens, by the number of steps that were answered before it.
        """
        engine, last = self.engine, dict[str, RequestOutput]()
        due, first_step = dict(kills), engine.counters.num_steps
        for number, (prompt, params) in enumerate(zip(self.prompts, FOUR_KINDS, strict=True)):
            engine.add_request(str(number), None, params, prompt_token_ids=prompt)
        while engine.has_unfinished_requests():
            with suppress(KeyboardInterrupt):
                is_running = engine.health().state.value == "running"
                if due and is_running and engine.counters.num_steps - first_step >= min(due):
                    due.pop(min(due))([place.pid for place in self.executor.places])
                last |= {output.request_id: output for output in engine.step()}
        assert not due, "the requests have ended before"
        assert engine.num_free_blocks == engine.num_total_blocks
        return [bits(last[str(number)]) for number in range(len(self.prompts))]

    def check(self, kills: dict[int, Kill]) -> None:
        """Each request gets what it gets without these losses."""
        assert self.serve(kills) == self.expected

    def kill(self, rank: int) -> None:
        kill_rank(self.engine, rank)

    @property
    def resumed(self) -> list[bool]:
        """Of each recovery, whether only the lost rank was replaced."""
        return [record.is_resumed for record in self.engine.recoveries]

    def held(self) -> tuple[int, int, list[int]]:
        """Descriptors and children of this process, and descriptors of the ranks."""
        gc.collect()  # what earlier tests have left
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        pids = [place.pid for place in self.executor.places]
        of_ranks = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        return len(os.listdir("/proc/self/fd")), len(children), of_ranks


@functools.cache
def prompts_of(models: ModelShop, spec: Any) -> list[list[int]]:
    return models.oracle(models.folder(spec)).prompts(LENGTHS, seed=3)


@contextmanager
def serving(
    models: ModelShop, spec: Any = PLAIN, tp_size: int = 2, **args: Any
) -> Iterator[Served]:
    """An engine of `FIELDS`, unless told otherwise."""
    fields = FIELDS | {"tensor_parallel_size": tp_size} | args
    with LLMEngine.from_engine_args(EngineArgs(str(models.folder(spec)), **fields)) as engine:
        yield Served(engine, prompts_of(models, spec))


def send(number: int, *ranks: int) -> Kill:
    """Sends a signal to these ranks."""

    def kill(pids: list[int]) -> None:
        for rank in ranks:
            os.kill(pids[rank], number)

    return kill


DRAFTS = {"speculative_model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 3}
FORMS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "2": (PLAIN, 2, {}),
    "1": (PLAIN, 1, {}),
    "2x2": (ZOO["d256-2to1-3-layers"], 2, {"pipeline_parallel_size": 2}),
    "4-int8": (PLAIN, 4, {"kv_cache_dtype": "int8", "quantization": "int4"}),
    "drafts": (PLAIN, 2, DRAFTS),
    "1x3": (ZOO["d256-2to1-3-layers"], 1, {"pipeline_parallel_size": 3}),
}
"""Model, ranks that share its layers, and other arguments."""
SERVING = ("swap", "copy", "write", "recorded", "answer", "step")
"""Moments of steps, see `moments.install`."""
OF_SEVERAL = ("between", "collective")
"""Moments of steps of ranks that share layers."""
RESUMING = ("init_device", "load_model", "write", "init_cache_engine", "batch", "step")
"""Moments while a lost rank is replaced, for a second loss; `write`: while a step is recorded."""
BESIDE = ("template", "fork", "interrupt")
"""What happens to others than ranks while a lost one is replaced."""


Moments = tuple[str, ...]
"""One, or a second one while a lost rank is replaced."""


class Campaign:
    """Losses, one after another, while an engine serves.

    Args:
        moments: of the losses, in this order.
        orders: that the ranks obey.
    """

    def __init__(
        self, engine: LLMEngine, moments: Iterable[Moments], orders: Orders, seed: int
    ) -> None:
        self._engine, self._executor = engine, executor_of(engine)
        self.left = deque(moments)
        self._orders = orders
        self._rng = random.Random(seed)
        self._now: Moments = ()
        self._num_before = -1
        self._beside = ""

    def strike(self, pids: list[int]) -> None:
        """Between two steps: names the next moment, if the one before has come, and its ranks are
        replaced."""
        is_ready = self._executor._mirror.num_steps and not self._engine._recovery._poison.suspects
        if self.left and is_ready and not self._is_awaited:
            self._now, self._num_before = self.left.popleft(), len(self._engine.recoveries)
            of_ranks = [moment for moment in self._now if moment not in BESIDE]
            self._beside = "".join(self._now[len(of_ranks) :])
            most = 1 if self._now == ("write",) else 3  # only prompts write so, in few steps
            passes = [self._rng.randint(0, most)] if len(self._now) == 1 else [0, 0]
            ranks = self._rng.choices(range(len(pids)), k=len(of_ranks))
            self._orders.give(list(zip(ranks, of_ranks, passes, strict=False)))

    @property
    def _is_awaited(self) -> bool:
        is_over = len(self._engine.recoveries) > self._num_before
        return bool(self._orders.num_left or self._beside or not is_over)

    def end_round(self) -> None:
        """When no request is left: a moment that has not come is for the next round."""
        if self._is_awaited:
            self.left.append(self._now)
            self._num_before, self._beside = -1, ""
            self._orders.give([])

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Patches the driver's code, so that `_beside` happens while a rank is replaced."""

        def before(owner: Any, name: str, what: str, act: Callable[..., None]) -> None:
            def act_once(target: Any, *_: Any) -> None:
                if self._beside == what:
                    self._beside = ""
                    act(target)

            on_call(patch, owner, name, act_once)

        def kill(*children: Any) -> None:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)

        before(ProcessHome, "prepare", "template", lambda home: kill(*home.spares.usable()))
        before(Template, "_receive", "fork", kill)
        before(Group, "join", "interrupt", lambda _: signal.raise_signal(signal.SIGINT))
        patch.setattr(processes, "_RENEW_S", 0.0)


def cases() -> Iterator[Any]:
    """Forms, and how often each pair of moments comes; 0: each moment once, without a second."""
    for form in FORMS:
        if form in ("2", "1", "2x2"):
            yield pytest.param(form, 0, id=form)
            yield pytest.param(form, 1, id=f"{form}-twice", marks=pytest.mark.check)
        yield pytest.param(form, 8, id=f"{form}-long", marks=pytest.mark.soak)


class Obedient(NamedTuple):
    """Orders that ranks obey, and the places of these ranks."""

    orders: Orders
    places: list[Any]


@pytest.fixture
def obedient(tmp_path: Path) -> Iterator[Obedient]:
    """Ranks that kill themselves, or hang, at moments that a test names."""
    orders = Orders.make(tmp_path / "orders")
    with sabotaged_rank(None, partial(install, str(tmp_path / "orders"))) as places:
        yield Obedient(orders, places)


@pytest.mark.parametrize(("form", "num_cycles"), [*cases()])
def test_losses_at_any_moment(
    models: ModelShop, obedient: Obedient, monkeypatch: Any, form: str, num_cycles: int
) -> None:
    """No request is lost, no output changes, and nothing is left over."""
    spec, tp_size, args = FORMS[form]
    several = OF_SEVERAL if tp_size > 1 else ()
    moments: list[Moments] = [(moment,) for moment in (*SERVING, *several)]
    if num_cycles:
        moments += [("step", second) for second in (*RESUMING, *BESIDE)]
        moments *= num_cycles
    with serving(models, spec, tp_size, **args) as served:
        assert served.engine.counters.num_preemptions, "no block was swapped"
        before, campaign = served.held(), Campaign(served.engine, moments, obedient.orders, seed=11)
        campaign.watch(monkeypatch)
        for _ in range(len(moments) + 5):
            served.check(dict.fromkeys(range(1, 39), campaign.strike))
            campaign.end_round()
            wait_until(lambda: served.held() == before, what="something is left")
            if not campaign.left:
                break
        assert not campaign.left, "these moments do not come"
        others = sum(moment[-1] in RESUMING for moment in moments if len(moment) > 1)
        assert served.resumed.count(True) >= len(moments) - others


def test_a_stopped_rank_is_replaced(models: ModelShop) -> None:
    with serving(models) as served:
        before = served.held()
        served.check({9: send(signal.SIGSTOP, 0)})
        served.check({12: send(signal.SIGKILL, 1)})
        assert served.resumed == [True, True]
        assert served.held() == before


def test_a_loss_while_idle(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request comes after so many heartbeats that a rank without them has ended itself."""
    beats: list[list[int]] = []
    on_call(monkeypatch, RankWatch, "_send_heartbeats", lambda _, ranks: beats.append(list(ranks)))
    with serving(models) as served:
        served.kill(1)
        wait_until(lambda: served.executor.loss is not None, what="no loss is found")
        beats.clear()
        num_beats, [other, _] = FENCE_S / HEARTBEAT_S + 3, served.executor.places
        wait_until(lambda: beats.count([0]) >= num_beats or not any(is_alive([other])))
        served.check({})
        assert served.resumed == [True]


def test_aborts_and_new_requests_while_a_rank_is_replaced(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new rank is held back until one request is aborted and another one has come."""
    with serving(models) as served:
        engine, goes_on = served.engine, threading.Event()

        def hold(_: Group) -> None:
            assert goes_on.wait(PATIENCE_S)

        def add(number: int) -> None:
            prompt = served.prompts[number]
            engine.add_request(str(number), None, greedy(40), prompt_token_ids=prompt)

        def run() -> dict[str, Any]:
            done: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                done |= {output.request_id: output.outputs[0] for output in engine.step()}
            return {name: (out.token_ids, out.cumulative_logprob) for name, out in done.items()}

        for number in (0, 2, 3):
            add(number)
        expected = run()
        on_call(monkeypatch, Group, "join", hold)
        for number in (0, 1, 2):
            add(number)
        first_step = engine.counters.num_steps
        while engine.counters.num_steps < first_step + 8:
            engine.step()
        served.kill(1)
        while engine.health().state.value == "running":
            engine.step()
        engine.abort_request("1")
        add(3)
        for _ in range(3):
            engine.step()
        assert engine.health().state.value == "recovering"
        goes_on.set()
        outputs = run()
        assert {name: outputs[name] for name in expected} == expected
        assert served.resumed == [True]
        assert engine.num_free_blocks == engine.num_total_blocks


@pytest.mark.parametrize("phase", ["start", "load_model"])
def test_a_second_ctrl_c_while_a_rank_is_replaced(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The threads that replace the rank, and then the group, are interrupted: the engine is dead,
    and nothing is left of it."""

    def kill(pids: list[int]) -> None:
        monkeypatch.setattr(Group, phase, Mock(side_effect=KeyboardInterrupt))
        os.kill(pids[0], signal.SIGKILL)

    with nothing_left(), serving(models) as served, pytest.raises(EngineDeadError):
        served.serve({9: kill})


@pytest.mark.parametrize(
    "holder", ["driver", pytest.param("actor", marks=pytest.mark.check)], ids=["driver", "actor"]
)
def test_ranks_of_ray(
    ray_address: str, models: ModelShop, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """A killed one is replaced by a spare, a stopped one by a new actor; the other stays. Their
    memory is held by the driver, or by an actor, as on another node; in the end by no process."""
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 15):
        pytest.skip("this kernel does not tell how a process of Ray ended (Linux 6.15 does)")
    if holder == "actor":
        monkeypatch.setattr(ray_home, "Agents", lambda _: Agents("another node"))
        monkeypatch.setattr(ray_home, "channel_address", lambda *_: LOOPBACK)
    with serving(models, executor="ray", spare_workers=1) as served:
        executor, first = served.executor, served.executor.places
        spares, agents = executor.home.spares, executor.home.agents
        agent = agents.ask(first[0].node_id, "ping")
        memory = files_of_ranks(agent)
        assert len(memory) == 2
        assert [files_of_ranks(place.pid) for place in first] == [[name] for name in memory]
        wait_until(lambda: any(map(ActorSpare.is_prepared, spares._spares)), what="no spare")
        [spare] = spares.usable()
        served.check({9: send(signal.SIGKILL, 1)})
        assert [place.pid for place in executor.places] == [first[0].pid, spare.answer().pid]
        spares.close()
        served.check({12: send(signal.SIGSTOP, 0)})
        assert executor.places[1].pid == spare.answer().pid
        assert files_of_ranks(agent) == memory
        served.serve({8: send(signal.SIGSEGV, 1)})
        assert served.resumed == [True, True, False]
        ended = [place.process for place in (*first, *executor.places)]
    wait_until(lambda: not any(map(NodeAgent.state, ended)), what="ranks are left")
    wait_until(lambda: not files_of_ranks(agent), what="memory is left")


def files_of_ranks(pid: int) -> list[str]:
    """Names of the memory of ranks that a process has open; none: it is gone."""
    names = []
    with suppress(FileNotFoundError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                names.append(os.readlink(file))
    return sorted({name for name in names if name.startswith("/memfd:tpengine rank")})


def test_a_loss_before_a_step_is_sent(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch finds it after the engine has looked, so that the step cannot be sent."""
    with serving(models) as served:
        executor, due = served.executor, served.engine.counters.num_steps + 9

        def lose(step: Any) -> None:
            if step.step == due:
                served.kill(1)
                wait_until(lambda: executor.loss is not None, 30.0, "no loss is found")

        on_call(monkeypatch, executor, "send_step", lose)
        served.check({})
        assert served.resumed == [True]


def test_a_new_rank_that_hangs(
    models: ModelShop, obedient: Obedient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends heartbeats and answers nothing, so that only its share of `recovery_timeout` ends
    it. In its place comes a new group, which computes the requests again."""
    orders, places = obedient
    monkeypatch.setattr(group_executor, "_SHARE", 0.15)
    with serving(models, recovery_timeout=50.0) as served:
        before = served.held()
        for moment in ("load_model", "batch"):

            def kill(pids: list[int], moment: str = moment) -> None:
                orders.give([(1, f"hang {moment}", 0)])
                os.kill(pids[1], signal.SIGKILL)

            served.check({9: kill})
            assert orders.num_left == 0, f"no rank hangs in {moment}"
        assert served.resumed == [False, False]
        assert served.held() == before
        ranks = {place.pid for place in served.executor.places}
        assert not any(NodeAgent.state(p.process) for p in places if p.pid not in ranks)


@pytest.mark.parametrize(
    ("keep_kv", "kill", "is_resumed"),
    [
        ("safe", send(signal.SIGSEGV, 1), False),
        ("always", send(signal.SIGSEGV, 1), True),
        ("never", send(signal.SIGKILL, 1), False),
        ("safe", send(signal.SIGKILL, 0, 1), None),
    ],
    ids=["fault", "fault-always", "never", "both"],
)
def test_memory_that_is_not_trusted(
    models: ModelShop, keep_kv: str, kill: Kill, is_resumed: bool | None
) -> None:
    """None: both ways are right, as the second rank may be about to end when the first is found."""
    with serving(models, keep_kv=keep_kv) as served:
        tokens = [[ids for ids, *_ in outputs] for outputs in served.serve({8: kill})]
        assert tokens == [[ids for ids, *_ in outputs] for outputs in served.expected]
        assert is_resumed is None or served.resumed == [is_resumed]


def test_memory_of_others_is_not_used(models: ModelShop, caplog: pytest.LogCaptureFixture) -> None:
    """A new rank finds that what it was given is not its own; then all ranks start again."""
    with serving(models) as served:
        executor, memory = served.executor, served.executor.home.agents._memory
        changes: dict[str, Callable[[], None]] = {
            "engine is": lambda: setattr(executor, "_engine_id", "another"),
            "epoch is": lambda: setattr(executor._group, "first_epoch", 9),
            "rank is 0, and not 1": lambda: memory.update({0: memory[1], 1: memory[0]}),
            "number of bytes of blocks": lambda: setattr(executor, "_num_blocks", (17, 0)),
        }
        for change in changes.values():

            def kill(pids: list[int], change: Callable[[], None] = change) -> None:
                change()
                os.kill(pids[1], signal.SIGKILL)

            served.check({8: kill})
        assert served.resumed == [False] * len(changes)
    refusals = [x.getMessage() for x in caplog.records if "which was lost, is not" in x.msg]
    for what, refusal in zip(changes, refusals, strict=True):
        assert f"what is kept is not used: its {what}" in refusal


def test_a_step_that_is_lost_again_is_not_sent_a_third_time(models: ModelShop) -> None:
    """Rank 1 kills itself whenever it gets step 20."""
    with sabotaged_rank(1, in_step(20, kill_self)), serving(models) as served:
        assert served.resumed == [True, False]
