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
from executor.ray_engines import Wait, executor_of
from support.gguf_files import write_gguf

from recovery.on_ray.crowd import MIN_MARGIN, NUM_REQUESTS, Crowd, crowd_engine
from recovery.on_ray.killer import PHASES, Killer, killer
from recovery.on_ray.processes import actors
from tpengine.engine.stats import EngineState

NUM_KILLS = int(os.environ.get("TPENGINE_TEST_KILLS", "100"))
ONE_OF_EACH = ["decode", "loading", "prefill", "recovery", "swap", "idle"]
END_S = 30.0
KILL_S = 60.0
"""Each, and what is recovered from it, on a busy machine."""


def serve_and_kill(crowd: Crowd, found: Killer, timeout_s: float) -> None:
    """Until all targets were hit and everybody was served."""
    engine, executor = crowd.engine, executor_of(crowd.engine)
    deadline = time.monotonic() + timeout_s
    while (target := found.target) is not None:
        assert time.monotonic() < deadline, f"{target} is still to be hit; hit: {found.hits}"
        crowd.fill()
        running = engine.health().state is EngineState.RUNNING
        if target == "idle" and running and executor.loss is None:
            found.kill_idle()
            while executor.loss is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        crowd.step()
    crowd.finish(timeout_s)


def check(crowd: Crowd, found: Killer, targets: list[str]) -> None:
    """The kills were what they should be, and each led to a group of its own."""
    hits = Counter(found.hits)
    print(f"\n{len(found.killed)} kills hit {dict(hits)}; {crowd.num_finished} requests served")
    assert set(PHASES) <= hits.keys()
    assert hits.total() >= len(targets)
    assert set(found.in_flight) == {NUM_REQUESTS}
    assert len(found.losses) == len(found.killed)
    for loss, pid in zip(found.losses, found.killed, strict=True):
        assert f"pid {pid}" in loss.place
        assert "killed by signal 9 (SIGKILL)" in loss.cause
    epochs = [group.epoch for group in found.groups]
    assert epochs == list(range(1, len(found.killed) + 2))
    assert crowd.engine.health().epoch == epochs[-1]


def run(
    model: Path, targets: list[str], spare_workers: int, seed: int, wait_until: Wait, **args: str
) -> None:
    before = actors()
    with crowd_engine(model, spare_workers=spare_workers, **args) as engine:
        crowd = Crowd(engine)
        assert crowd.serve_undisturbed() > MIN_MARGIN
        with killer(engine, targets, seed) as found:
            serve_and_kill(crowd, found, KILL_S * len(targets))
            check(crowd, found, targets)
        crowd.count_blocks()
        assert len(actors().keys() - before) <= 2 + 2 * spare_workers
    wait_until(lambda: actors().keys() <= before.keys(), END_S)


@pytest.mark.timeout(600)
def test_one_in_each_phase(folder: Path, wait_until: Wait) -> None:
    run(folder, ONE_OF_EACH, 0, 1, wait_until)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_file_on_transformers_code(folder: Path, tmp_path: Path, wait_until: Wait) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 2}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    args = {"model_impl": "transformers", "tokenizer": str(folder)}
    run(path, ONE_OF_EACH, 1, 1, wait_until, **args)


@pytest.mark.soak
@pytest.mark.timeout(KILL_S * NUM_KILLS + 300)
@pytest.mark.parametrize("spare_workers", [0, 1])
def test_many(folder: Path, spare_workers: int, wait_until: Wait) -> None:
    """At random, half of them with a spare for one of the two ranks and without Ray."""
    rng = random.Random(f"targets of {spare_workers}")
    targets = [*PHASES, *rng.choices(PHASES, k=(NUM_KILLS + 1) // 2 - len(PHASES))]
    rng.shuffle(targets)
    executor = ("ray", "processes")[spare_workers]
    run(folder, targets, spare_workers, 100 + spare_workers, wait_until, executor=executor)
