"""A lost rank is replaced alone: only unanswered steps are computed again, and every output is as
without the loss, as bits."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import ModelShop
from support.waiting import wait_until
from support.zoo import PLAIN, ZOO

from executor.ray_engines import executor_of, sabotaged_rank
from executor.sabotage import in_step, kill_self
from tpengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from tpengine.executor.group_executor import GroupExecutor

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


def test_memory_of_others_is_not_used(
    folder: Path, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A new rank finds that what it was given is not its own; then all ranks start again."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, **FIELDS)
    with LLMEngine.from_engine_args(args) as engine:
        expected, executor = serve(engine, prompts, {}), executor_of(engine)
        memory: list[int] = executor.home._memory  # type: ignore[attr-defined]
        changes: dict[str, Callable[[], None]] = {
            "engine is": lambda: setattr(executor, "_engine_id", "another"),
            "epoch is": lambda: setattr(executor, "_first_epoch", 9),
            "rank is 0, and not 1": memory.reverse,
            "number of bytes of blocks": lambda: setattr(executor, "_num_blocks", (17, 0)),
        }
        for change in changes.values():

            def kill(pids: list[int], change: Callable[[], None] = change) -> None:
                change()
                os.kill(pids[1], signal.SIGKILL)

            assert serve(engine, prompts, {8: kill}) == expected
        assert resumed(engine) == [False] * len(changes)
    refusals = [x.getMessage() for x in caplog.records if "which was lost, is not" in x.msg]
    for what, refusal in zip(changes, refusals, strict=True):
        assert f"has left is not used: its {what}" in refusal


def test_a_step_that_is_lost_again_is_not_sent_a_third_time(
    folder: Path, prompts: list[list[int]]
) -> None:
    """Rank 1 kills itself whenever it gets step 20."""
    args = EngineArgs(str(folder), tensor_parallel_size=2, **FIELDS)
    kills_itself = in_step(20, kill_self)
    with sabotaged_rank(1, kills_itself), LLMEngine.from_engine_args(args) as engine:
        serve(engine, prompts, {})
        assert resumed(engine) == [True, False]
