"""Ranks end with their driver, and share a cluster with others."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from support.engines import complete, greedy, make_engine, run
from support.models import ModelShop
from support.patches import on_call
from support.programs import err_of_interrupted, python
from support.waiting import wait_until
from support.zoo import ZOO

from executor.driver_process import driver_process
from executor.ray_engines import executor_of, free_cpus, rank_engine, ray_engine
from tpengine import LLMEngine, SamplingParams
from tpengine.executor.launch.actors import Agents
from tpengine.executor.watch import Exchange
from tpengine.host import start_ticks

PROMPT = [5, 6, 7]
NUM_TOKENS = 24
PROMPTS = (PROMPT, [300, 8, 9, 10, 11], list(range(20, 70)))
PARAMS = (
    greedy(NUM_TOKENS),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    greedy(NUM_TOKENS, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[LLMEngine]:
    with ray_engine(folder, 2, placement_timeout_s=60.0) as engine:
        yield engine


def ids_of(engine: Any) -> list[int]:
    return list(complete(engine, PROMPT, greedy(32)).token_ids)


def test_killed_driver_leaves_nothing(
    folder: Path, ray_address: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In the middle of steps, with some lines in its log, and none per rank; a new engine starts at
    once, that which the next tests use."""
    log = tmp_path / "log"
    program = "driver.py", folder, ray_address, 2, "for ever"
    with log.open("w") as file, driver_process(*program, stderr=file) as driver:
        ranks = driver.hear()
        assert len(ranks) == 2
        assert all(start_ticks(pid) == started for pid, started in ranks)
        time.sleep(0.3)
        assert driver.process.poll() is None
        driver.end()
    wait_until(lambda: not any(start_ticks(pid) == started for pid, started in ranks))
    said = [line for line in log.read_text().splitlines() if line.startswith("INFO ")]
    assert len(said) <= 7, said
    assert any(re.search("rank 0 on node .*; rank 1 on node", line) for line in said)
    ids_of(request.getfixturevalue("two_ranks"))


def test_joins_the_group_that_the_driver_runs_in(folder: Path) -> None:
    """A driver that is an actor in a group of bundles gets no other group, and none too few; and no
    spares: Ray would give a rank's bundle, which looks free when a spare has taken over, to others.
    """
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1, "memory": 1 << 20}])
    assert group.wait(10.0)

    def drive(folder: str, tp_size: int) -> tuple[str, int]:
        from tpengine import EngineArgs, LLMEngine, SamplingParams
        from tpengine.errors import PlacementError
        from tpengine.executor.spares import Spares

        fills: list[Any] = []
        Spares._fill = lambda *args: fills.append(args)  # type: ignore[method-assign]
        args = {"executor": "ray", "spare_workers": 1, "dtype": "float32", "device": "cpu"}
        args |= {"num_device_blocks_override": 256, "disable_log_stats": True}
        engine_args = EngineArgs(folder, tensor_parallel_size=tp_size, **args)
        try:
            engine = LLMEngine.from_engine_args(engine_args)
        except PlacementError as error:
            return str(error), 0
        engine.add_request("one", None, SamplingParams(max_tokens=4), prompt_token_ids=[5, 6, 7])
        while engine.has_unfinished_requests():
            engine.step()
        count = num_groups()
        engine.shutdown()
        return f"ok, {len(fills)} spares", count

    def num_groups() -> int:
        table = ray.util.placement_group_table().values()
        return sum(group["state"] == "CREATED" for group in table)

    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True, placement_group_bundle_index=0
    )
    remote = ray.remote(num_cpus=0, scheduling_strategy=strategy, max_retries=0)(drive)
    there = num_groups()
    try:
        assert ray.get(remote.remote(str(folder), 1), timeout=60.0) == ("ok, 0 spares", there)
        message, _ = ray.get(remote.remote(str(folder), 4), timeout=60.0)
        assert "wanted 4 x {CPU: 1}, but the placement group" in message
        assert "has 2 such bundles" in message
    finally:
        ray.util.remove_placement_group(group)


def test_engines(folder: Path, two_ranks: LLMEngine, ray_address: str, models: ModelShop) -> None:
    """Their steps in turn: the same request ids, other models, a request that one of them aborts,
    and a third engine in another process, whose Ray is shut down under it. One ends before the
    other."""
    folders = [folder, models.folder(ZOO["d256-2to1-3-layers"])]
    expected = []
    for path in folders:
        with make_engine(path, max_num_batched_tokens=64) as local:
            expected.append(alone(local))
    assert expected[0] != expected[1]
    with (
        driver_process("driver.py", folder, ray_address, 1, "then without ray") as driver,
        rank_engine(folders[1], 2) as second,
    ):
        driver.hear()  # its ranks are there
        assert serve_in_turn([two_ranks, second]) == expected
        assert driver.hear()[:NUM_TOKENS] == expected[0][0]
        message, is_initialized = driver.hear()
        assert "Ray was shut down under the engine" in message
        assert not is_initialized, "it started another Ray to go on in"
        assert driver.process.wait(60.0) == 0
    assert alone(two_ranks) == expected[0]


def alone(engine: LLMEngine) -> list[list[int]]:
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [list(complete(engine, prompt, params).token_ids) for prompt, params in pairs]


def serve_in_turn(engines: list[LLMEngine]) -> list[list[list[int]]]:
    for engine in engines:
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(i), None, params, prompt_token_ids=list(prompt))
    engines[0].add_request("aborted", None, greedy(200), prompt_token_ids=[1, 2, 3])
    answers: list[dict[str, list[int]]] = [{}, {}]
    turns = 0
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, ids in zip(engines, answers, strict=True):
            for output in engine.step():
                ids[output.request_id] = list(output.outputs[0].token_ids)
        turns += 1
        if turns == 5:
            engines[0].abort_request("aborted")
        assert turns < 500
    assert 0 < len(answers[0].pop("aborted")) < 10
    for engine in engines:
        assert engine.num_free_blocks == engine.num_total_blocks
    return [[ids[str(i)] for i in range(len(PROMPTS))] for ids in answers]


def test_interrupted_shutdown_is_finished_by_the_next(
    folder: Path, two_ranks: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice: while the workers clean up, and while they are ended."""

    def held_cpus() -> float:
        """Without the file's other engine; what is given back Ray tells a bit later."""
        return float(ray.cluster_resources()["CPU"]) - free_cpus() - 2

    wait_until(lambda: held_cpus() == 0)
    engine = ray_engine(folder, 1)
    wait_until(lambda: held_cpus() == 1)
    [place] = executor_of(engine).places
    call, tell = Exchange.call, Agents.tell

    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(Exchange, "call", call)
        raise KeyboardInterrupt

    def interrupt_again(*_: Any) -> None:
        monkeypatch.setattr(Agents, "tell", tell)
        raise KeyboardInterrupt

    monkeypatch.setattr(Exchange, "call", interrupt)
    monkeypatch.setattr(Agents, "tell", interrupt_again)
    with pytest.raises(KeyboardInterrupt):
        engine.shutdown()
    assert Exchange.call is call
    assert Agents.tell is tell
    engine.shutdown()
    wait_until(lambda: start_ticks(place.pid) != place.start_ticks)
    wait_until(lambda: held_cpus() == 0)
    engine.shutdown()


def test_sigterm_to_the_command(ray_address: str) -> None:
    """Ray's own handler would print its stack, and end it with another code."""
    options = ["--executor", "ray", "--device", "cpu", "--cpu-kv-cache-space", "0.1"]
    endless = ["--ray-address", ray_address, "--max-tokens", "9999", "--ignore-eos"]
    command = ["generate", *200 * ["A"], *options, *endless]
    assert "SIGTERM" not in err_of_interrupted(command, "A", signal.SIGTERM)


def test_interrupt_in_a_step_leaves_the_engine_usable(
    two_ranks: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(two_ranks)
    two_ranks.add_request("two", None, greedy(32), prompt_token_ids=PROMPT)

    def interrupt(_: Any) -> None:
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    steps = on_call(monkeypatch, executor_of(two_ranks), "send_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(two_ranks)
    assert len(steps) == 3
    assert list(run(two_ranks)[-1].outputs[0].token_ids) == expected


@pytest.mark.check
def test_example_driver(folder: Path, ray_address: str) -> None:
    """What `ray submit` runs, on one machine."""
    root = Path(__file__).parent.parent.parent
    command = [root / "examples" / "ray_driver.py", "--ray-address", ray_address]
    options = ["--tensor-parallel-size", "2", "--device", "cpu", "--max-tokens", "8"]
    done = python(*command, *options, "--cpu-kv-cache-space", "0.1")
    lines = [line for line in done.stdout.splitlines() if " -> " in line]
    assert len(lines) == 4
    assert lines[0].startswith("'Hello, my name is' -> ' Mara.")
    said = [line for line in done.stderr.splitlines() if line.startswith("INFO ")]
    assert len(said) <= 6, said  # and none per rank
    assert any(re.search("rank 0 on node .*; rank 1 on node", line) for line in said)
