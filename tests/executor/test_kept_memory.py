"""A lost rank is replaced alone: only unanswered steps are computed again, and every output is as
without the loss, as bits."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import ModelShop
from support.waiting import wait_until
from support.zoo import PLAIN, ZOO

from executor.ray_engines import sabotaged_rank
from executor.sabotage import in_step, kill_self
from tpengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch import actors, ray_home
from tpengine.executor.launch.actors import ActorSpare, Agents
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.host import LOOPBACK

FIELDS = {
    "dtype": "float32",
    "device": "cpu",
    "executor": "processes",
    "max_recoveries": 100,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "num_device_blocks_override": 18,
    "preemption_mode": "swap",
    "swap_space": 0.05,
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=24),
]
LENGTHS = (60, 7, 19, 33)
Kill = Callable[[list[int]], None]
"""Gets the processes of the ranks, in rank order."""


def serve(engine: LLMEngine, prompts: list[list[int]], kills: dict[int, Kill]) -> list[Any]:
    """What each request gets.

    Args:
        kills: what happens, by the number of steps that were answered before it.
    """
    last: dict[str, RequestOutput] = {}
    due, first_step = dict(kills), engine.counters.num_steps
    executor = engine._executor
    assert isinstance(executor, GroupExecutor)
    for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        engine.add_request(str(number), None, params, prompt_token_ids=prompt)
    while engine.has_unfinished_requests():
        is_running = engine.health().state.value == "running"
        if due and is_running and engine.counters.num_steps - first_step >= min(due):
            due.pop(min(due))([place.pid for place in executor.places])
        last |= {output.request_id: output for output in engine.step()}
    assert not due, "the requests have ended before"
    assert engine.num_free_blocks == engine.num_total_blocks
    return [
        [(o.token_ids, o.cumulative_logprob, o.logprobs) for o in last[str(i)].outputs]
        for i in range(len(prompts))
    ]


def send(number: int, *ranks: int) -> Kill:
    """Sends a signal to these ranks."""

    def kill(pids: list[int]) -> None:
        for rank in ranks:
            os.kill(pids[rank], number)

    return kill


def at_random(pids: list[int], rng: random.Random) -> None:
    os.kill(rng.choice(pids), signal.SIGKILL)


def resumed(engine: LLMEngine) -> list[bool]:
    """Of each recovery, whether only the lost rank was replaced."""
    return [record.is_resumed for record in engine.recoveries]


@pytest.fixture(scope="module")
def folder(models: ModelShop) -> Path:
    return models.folder(PLAIN)


@pytest.fixture(scope="module")
def prompts(models: ModelShop, folder: Path) -> list[list[int]]:
    return models.oracle(folder).prompts(LENGTHS, seed=3)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (PLAIN, {"tensor_parallel_size": 2}),
        (PLAIN, {"tensor_parallel_size": 1}),
        (ZOO["d256-2to1-3-layers"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        pytest.param(
            PLAIN,
            {"tensor_parallel_size": 4, "kv_cache_dtype": "int8", "quantization": "int4"},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            PLAIN,
            {"tensor_parallel_size": 2, "speculative_model": "[ngram]"}
            | {"num_speculative_tokens": 3, "ngram_prompt_lookup_max": 3},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ZOO["d256-2to1-3-layers"], {"pipeline_parallel_size": 3}, marks=pytest.mark.soak
        ),
    ],
    ids=["2", "1", "2x2", "4-int8", "drafts", "1x3"],
)
def test_outputs_are_as_without_losses(models: ModelShop, model: Any, args: dict[str, Any]) -> None:
    """Ranks are killed in prompts, swaps, copies of blocks, beams and decode steps."""
    folder, rng = models.folder(model), random.Random(11)
    prompts = models.oracle(folder).prompts(LENGTHS, seed=3)
    with LLMEngine.from_engine_args(EngineArgs(str(folder), **FIELDS, **args)) as engine:
        expected = serve(engine, prompts, {})
        assert engine.counters.num_preemptions, "no block was swapped"
        kills = dict.fromkeys(range(2, 40, 3), partial(at_random, rng=rng))
        assert serve(engine, prompts, kills) == expected
        assert resumed(engine) == [True] * len(kills)


def test_a_stopped_rank_is_replaced(folder: Path, prompts: list[list[int]]) -> None:
    args = EngineArgs(str(folder), tensor_parallel_size=2, **FIELDS)
    with LLMEngine.from_engine_args(args) as engine:
        expected = serve(engine, prompts, {})
        before = held(engine)
        assert serve(engine, prompts, {9: send(signal.SIGSTOP, 0)}) == expected
        assert serve(engine, prompts, {12: send(signal.SIGKILL, 1)}) == expected
        assert resumed(engine) == [True, True]
        assert held(engine) == before


@pytest.mark.parametrize(
    "holder", ["driver", pytest.param("actor", marks=pytest.mark.check)], ids=["driver", "actor"]
)
def test_ranks_of_ray(
    ray_address: str,
    folder: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    holder: str,
) -> None:
    """A killed one is replaced by a spare, a stopped one by a new actor; the other stays. Their
    memory is held by the driver, or by an actor, as on another node; in the end by no process."""
    if holder == "actor":
        monkeypatch.setattr(ray_home, "Agents", lambda _: Agents("another node"))
        monkeypatch.setattr(actors, "channel_address", lambda *_: LOOPBACK)
    fields = FIELDS | {"executor": "ray", "spare_workers": 1}
    args = EngineArgs(str(folder), tensor_parallel_size=2, **fields)
    with LLMEngine.from_engine_args(args) as engine:
        executor: Any = engine._executor
        spares, agents = executor.home.spares, executor.home._agents
        expected, first = serve(engine, prompts, {}), executor.places
        agent = agents.ask(first[0].node_id, "ping")
        memory = files_of_ranks(agent)
        assert len(memory) == 2
        assert [files_of_ranks(place.pid) for place in first] == [[name] for name in memory]
        wait_until(lambda: any(map(ActorSpare.is_prepared, spares._spares)), what="no spare")
        [spare] = spares.usable()
        assert serve(engine, prompts, {9: send(signal.SIGKILL, 1)}) == expected
        assert [place.pid for place in executor.places] == [first[0].pid, spare.answer().pid]
        spares.close()
        assert serve(engine, prompts, {12: send(signal.SIGSTOP, 0)}) == expected
        assert executor.places[1].pid == spare.answer().pid
        assert files_of_ranks(agent) == memory
        serve(engine, prompts, {8: send(signal.SIGSEGV, 1)})
        assert resumed(engine) == [True, True, False]
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


def test_a_loss_before_a_step_is_sent(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch finds it after the engine has looked, so that the step cannot be sent."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, **FIELDS)
    with LLMEngine.from_engine_args(args) as engine:
        expected = serve(engine, prompts, {})
        executor: Any = engine._executor
        send_step, due = executor.send_step, engine.counters.num_steps + 9

        def send_late(step: Any) -> None:
            if step.step == due:
                os.kill(executor.places[1].pid, signal.SIGKILL)
                wait_until(lambda: executor.loss is not None, 30.0, "no loss is found")
            send_step(step)

        monkeypatch.setattr(executor, "send_step", send_late)
        assert serve(engine, prompts, {}) == expected
        assert resumed(engine) == [True]


def held(engine: LLMEngine) -> tuple[int, int, list[int]]:
    """Descriptors and children of this process, and descriptors of the ranks."""
    executor = engine._executor
    assert isinstance(executor, GroupExecutor)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pids = [place.pid for place in executor.places]
    of_ranks = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    return len(os.listdir("/proc/self/fd")), len(children), of_ranks


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
    folder: Path, prompts: list[list[int]], keep_kv: str, kill: Kill, is_resumed: bool | None
) -> None:
    """None: both ways are right, as the second rank may be about to end when the first is found."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, keep_kv=keep_kv, **FIELDS)
    with LLMEngine.from_engine_args(args) as engine:
        expected = serve(engine, prompts, {})
        tokens = [[ids for ids, *_ in outputs] for outputs in serve(engine, prompts, {8: kill})]
        assert tokens == [[ids for ids, *_ in outputs] for outputs in expected]
        assert is_resumed is None or resumed(engine) == [is_resumed]


def test_a_step_that_is_lost_again_is_not_sent_a_third_time(
    folder: Path, prompts: list[list[int]]
) -> None:
    """Rank 1 kills itself whenever it gets step 20."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, **FIELDS)
    kills_itself = in_step(20, kill_self)
    with sabotaged_rank(1, kills_itself), LLMEngine.from_engine_args(args) as engine:
        serve(engine, prompts, {})
        assert resumed(engine) == [True, False]
