"""A request that ends every rank fails by its name; other losses fail no request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from executor.ray_engines import executor_of, sabotaged_rank
from executor.sabotage import die_of

from recovery.on_ray.crowd import MAX_OUTPUT, NUM_REQUESTS, Crowd, crowd_engine
from recovery.on_ray.processes import actors
from tpengine import LLMEngine, SamplingParams
from tpengine.engine.stats import EngineState

pytestmark = pytest.mark.soak  # tests/recovery/test_poison_requests.py has ranks that cost nothing
POISON = 3
"""A token that no other prompt holds."""
SOON_S = 40.0
"""Ten times what it takes to name a stopped rank on an idle machine."""
PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    """An engine whose ranks die of the poison, with a spare process for each rank."""
    args = {"spare_workers": 2, "max_num_seqs": 8}
    with sabotaged_rank(None, die_of(POISON)), crowd_engine(folder, **args) as engine:
        yield engine


@pytest.fixture(scope="module")
def crowd(engine: LLMEngine) -> Crowd:
    found = Crowd(engine)
    found.serve_undisturbed()
    return found


@pytest.fixture(autouse=True)
def _blocks_come_back(engine: LLMEngine) -> Iterator[None]:
    yield
    assert engine.num_free_blocks == engine.num_total_blocks
    assert engine.health().state is EngineState.RUNNING


def test_a_stopped_rank(engine: LLMEngine, crowd: Crowd) -> None:
    """The loss names it with its stack; it is replaced, and its process ends."""
    crowd.fill()
    for _ in range(20):
        crowd.step()
    place = executor_of(engine).places[1]
    start = time.monotonic()
    os.kill(place.pid, signal.SIGSTOP)
    while engine.health().state is EngineState.RUNNING:
        crowd.step()
    assert time.monotonic() - start < SOON_S
    while engine.health().state is not EngineState.RUNNING:
        crowd.step()
    crowd.finish(PATIENCE_S)
    (record,) = engine.recoveries
    assert f"pid {place.pid}" in record.loss.place
    assert "frozen: its process is stopped" in record.loss.cause
    assert "_serve (" in record.loss.stack
    assert record.ready_s < 2 * SOON_S
    assert place.pid not in actors()
    assert "T" not in actors().values()


def serve_with_poison(crowd: Crowd) -> None:
    """The poison ends with an error that names the rank, how the rank ended and its last log line;
    all others end as without it."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_OUTPUT)
    crowd.fill(NUM_REQUESTS // 2)
    crowd.engine.add_request("poison", None, params, prompt_token_ids=[5, POISON, 6])
    poison = crowd.follow("poison")
    crowd.fill(NUM_REQUESTS - 1)
    finished = crowd.num_finished
    crowd.finish(PATIENCE_S)
    assert crowd.num_finished - finished == NUM_REQUESTS - 1
    assert poison.reasons == {"error"}
    assert poison.error is not None
    for word in ("'poison'", "rank ", "pid ", "exit code 7", "step ", "this is the end"):
        assert word in poison.error


@pytest.mark.timeout(600)
def test_one_poison_among_many(engine: LLMEngine, crowd: Crowd) -> None:
    recoveries = engine.health().num_recoveries
    serve_with_poison(crowd)
    assert engine.health().num_recoveries - recoveries <= 2 + 3 + 2


def test_one_poison_among_all_that_run(folder: Path) -> None:
    """The same if all requests are in the lost step."""
    blocks = {"num_device_blocks_override": 400, "max_num_batched_tokens": 4096}
    with (
        sabotaged_rank(None, die_of(POISON)),
        crowd_engine(folder, max_num_seqs=256, **blocks) as engine,
    ):
        crowd = Crowd(engine)
        crowd.serve_undisturbed()
        serve_with_poison(crowd)
