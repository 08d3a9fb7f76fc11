"""`kill -9` of random ranks with 64 requests in flight: everybody gets what they would have got.

`TPENGINE_TEST_KILLS` is the number of kills of the long run; default: 100.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from executor.ray_engines import executor_of, sabotaged_rank
from executor.sabotage import die_of
from support.gguf_files import write_gguf
from support.waiting import wait_until

from recovery.client import Job
from recovery.on_ray.crowd import MAX_OUTPUT, MIN_MARGIN, NUM_REQUESTS, Crowd, crowd_engine
from recovery.on_ray.killer import PHASES, Killer, killer
from recovery.on_ray.processes import actors
from tpengine import SamplingParams
from tpengine.engine.stats import EngineState

NUM_KILLS = int(os.environ.get("TPENGINE_TEST_KILLS", "100"))
ONE_OF_EACH = ["decode", "loading", "prefill", "recovery", "swap", "idle"]
KILL_S = 60.0
"""Each, and what is recovered from it, on a busy machine."""


def serve_and_kill(crowd: Crowd, hunter: Killer, timeout_s: float) -> None:
    """Until all targets were hit and everybody was served."""
    engine, executor = crowd.engine, executor_of(crowd.engine)
    deadline = time.monotonic() + timeout_s
    while (target := hunter.target) is not None:
        assert time.monotonic() < deadline, f"{target} is still to be hit; hit: {hunter.hits}"
        crowd.fill()
        running = engine.health().state is EngineState.RUNNING
        if target == "idle" and running and executor.loss is None:
            hunter.kill_idle()
            while executor.loss is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        crowd.step()
    crowd.finish(timeout_s)


def check(crowd: Crowd, hunter: Killer, targets: list[str]) -> None:
    """The kills were what they should be, and each led to a group of its own."""
    hits = Counter(hunter.hits)
    print(f"\n{len(hunter.killed)} kills hit {dict(hits)}; {crowd.num_finished} requests served")
    assert set(targets) <= hits.keys()
    assert hits.total() >= len(targets)
    assert set(hunter.in_flight) == {NUM_REQUESTS}
    assert len(hunter.losses) == len(hunter.killed)
    for loss, pid in zip(hunter.losses, hunter.killed, strict=True):
        assert f"pid {pid}" in loss.place
        assert "killed by signal 9 (SIGKILL)" in loss.cause
    epochs = [group.epoch for group in hunter.groups]
    assert epochs == list(range(1, len(hunter.killed) + 2))
    assert crowd.engine.health().epoch == epochs[-1]


def run(model: Path, targets: list[str], spare_workers: int, seed: int, **args: str) -> None:
    before = actors()
    with crowd_engine(model, spare_workers=spare_workers, **args) as engine:
        crowd = Crowd(engine)
        assert crowd.serve_undisturbed() > MIN_MARGIN
        with killer(engine, targets, seed) as hunter:
            serve_and_kill(crowd, hunter, KILL_S * len(targets))
            check(crowd, hunter, targets)
        crowd.count_blocks()
        assert len(actors().keys() - before) <= 2 + 2 * spare_workers
    wait_until(lambda: actors().keys() <= before.keys())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("executor", "targets"),
    [("processes", ["swap", "recovery"]), pytest.param("ray", ONE_OF_EACH, marks=pytest.mark.soak)],
)
def test_one_in_each_phase(folder: Path, executor: str, targets: list[str]) -> None:
    run(folder, targets, 0, 1, executor=executor)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_file_on_transformers_code(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", metadata={"tokenizer.ggml.eos_token_id": 2})
    args = {"model_impl": "transformers", "tokenizer": str(folder)}
    run(path, ONE_OF_EACH, 1, 1, **args)


@pytest.mark.soak
@pytest.mark.timeout(KILL_S * NUM_KILLS + 300)
@pytest.mark.parametrize("spare_workers", [0, 1])
def test_many(folder: Path, spare_workers: int) -> None:
    """At random, half of them with a spare for one of the two ranks and without Ray."""
    rng = random.Random(f"targets of {spare_workers}")
    targets = [*PHASES, *rng.choices(PHASES, k=(NUM_KILLS + 1) // 2 - len(PHASES))]
    rng.shuffle(targets)
    executor = ("ray", "processes")[spare_workers]
    run(folder, targets, spare_workers, 100 + spare_workers, executor=executor)


@pytest.mark.soak  # tests/recovery/test_poison_requests.py has ranks that cost nothing
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "args",
    [
        {"max_num_seqs": 8},
        {"max_num_seqs": 256, "num_device_blocks_override": 400, "max_num_batched_tokens": 4096},
    ],
    ids=["few run", "all run"],
)
def test_a_request_that_ends_every_rank(folder: Path, args: dict[str, int]) -> None:
    """It fails with an error that names the rank, how that ended and its last log line; all others
    end as without it."""
    poison = 3  # a token that no other prompt holds
    params = SamplingParams(temperature=0.0, max_tokens=MAX_OUTPUT)
    with (
        sabotaged_rank(None, die_of(poison)),
        crowd_engine(folder, spare_workers=2, **args) as engine,
    ):
        crowd = Crowd(engine)
        crowd.serve_undisturbed()
        crowd.fill(NUM_REQUESTS // 2)
        crowd.add("poison", Job([5, poison, 6], params))
        crowd.fill(NUM_REQUESTS - 1)
        crowd.finish(10 * KILL_S)
        assert crowd.num_finished == NUM_REQUESTS - 1
        answer = crowd.answers["poison"]
        assert answer.reasons == {"error"}
        for word in ("'poison'", "rank ", "pid ", "exit code 7", "step ", "this is the end"):
            assert word in str(answer.error)
        assert engine.num_free_blocks == engine.num_total_blocks
