"""Requests that kill every rank that runs them: they fail by name, and no other request fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tpengine import LLMEngine, SamplingParams
from tpengine.engine.poison_requests import PoisonSearch
from tpengine.engine.stats import EngineState
from tpengine.messages import StepInput

from .client import Client, Job, serve, summary
from .conftest import MakeConfig
from .mortal import Fate, mortal_engine

POISON = 990
NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def make_jobs(count: int, poisonous: dict[int, int], **fields: Any) -> tuple[list[Job], Fate]:
    """Makes jobs; those in `poisonous`, by number, kill when they have that many output tokens."""
    jobs = []
    for number in range(count):
        first = POISON - number if number in poisonous else 3 + number
        prompt = [first, *(3 + (number * 7 + place) % 900 for place in range(4))]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, **fields)
        jobs.append(Job(prompt, params))
    return jobs, Fate(poison={POISON - number: at for number, at in poisonous.items()})


def search_of(engine: LLMEngine) -> PoisonSearch:
    """Returns the engine's search for poisonous requests: steps between losses do not show it."""
    return engine._recovery._poison


def check(answers: Any, undisturbed: Any, poisonous: dict[int, int]) -> None:
    for name, answer in answers.items():
        if int(name) not in poisonous:
            assert answer.error is None
            assert summary(answer) == summary(undisturbed[name])
            continue
        assert answer.reasons == {"error"}
        assert answer.error is not None
        for word in (f"'{name}'", "rank 1", "pid 4711", "SIGKILL", "step ", "last words"):
            assert word in answer.error
        for one in answer.outputs.values():
            assert len(one.token_ids) <= poisonous[int(name)]
            whole = undisturbed[name].outputs[one.index].token_ids
            assert one.token_ids == whole[: len(one.token_ids)]


@pytest.mark.parametrize("at", [0, 5])
def test_one_among_many(fake_config: MakeConfig, at: int) -> None:
    """It is found in seven losses after the first two; only those two count against the limit."""
    config = fake_config(max_num_seqs=64, max_num_batched_tokens=512, max_recoveries=2)
    jobs, fate = make_jobs(64, {40: at})
    answers, executor, engine = serve(config, jobs, fate)
    check(answers, serve(config, jobs)[0], {40: at})
    assert len(executor.losses) <= 2 + 7
    assert engine.health().num_recoveries == len(executor.losses)


def test_two_among_many(fake_config: MakeConfig) -> None:
    config = fake_config(max_num_seqs=64, max_num_batched_tokens=512, max_recoveries=6)
    poisonous = {3: 0, 50: 7}
    jobs, fate = make_jobs(64, poisonous)
    answers, _, _ = serve(config, jobs, fate)
    check(answers, serve(config, jobs)[0], poisonous)


def test_two_at_the_same_token(fake_config: MakeConfig) -> None:
    config = fake_config(max_num_seqs=64, max_num_batched_tokens=512, max_recoveries=2)
    poisonous = {30: 2, 31: 2}
    jobs, fate = make_jobs(64, poisonous)
    answers, executor, _ = serve(config, jobs, fate)
    check(answers, serve(config, jobs)[0], poisonous)
    assert len(executor.losses) <= 2 + 2 * 7


def test_alone_from_the_start(fake_config: MakeConfig) -> None:
    """A request that runs alone goes on after three losses in a row, and fails after four."""
    config = fake_config()
    jobs, _ = make_jobs(1, {})
    survived, _, _ = serve(config, jobs, Fate(kills=frozenset({2, 3, 4})))
    assert summary(survived["0"]) == summary(serve(config, jobs)[0]["0"])
    jobs, fate = make_jobs(1, {0: 3})
    answers, executor, _ = serve(config, jobs, fate)
    assert len(executor.losses) == 4
    check(answers, serve(config, jobs)[0], {0: 3})


def test_groups_of_sequences(fake_config: MakeConfig) -> None:
    config = fake_config()
    for fields in (
        {"n": 3},
        {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0},
    ):
        jobs, fate = make_jobs(5, {2: 4}, **fields)
        answers, _, _ = serve(config, jobs, fate)
        undisturbed, _, _ = serve(config, jobs)
        for name in "0134":
            assert summary(answers[name]) == summary(undisturbed[name])
        assert answers["2"].reasons == {"error"}


def test_requests_that_come_during_isolation_wait_and_finish(fake_config: MakeConfig) -> None:
    """Poisonous ones among them are found later; one request is aborted in isolation."""
    config = fake_config(max_num_seqs=32, max_recoveries=8)
    poisonous = {1: 0, 9: 2, 12: 1}
    jobs, fate = make_jobs(14, poisonous)
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number in range(8):
        client.add(str(number), jobs[number])
    while len(executor.losses) < 3:  # isolation has begun
        client.step()
    for number in range(8, 14):
        client.add(str(number), jobs[number])
    allowed = search_of(engine).allowed
    assert allowed is not None
    assert len(allowed) < 8
    engine.abort_request("0")
    with engine:
        answers = client.run()
    assert answers.pop("0").reasons == {"abort"}
    check(answers, serve(config, jobs)[0], poisonous)


def test_an_abort_of_the_only_suspect_ends_the_isolation(fake_config: MakeConfig) -> None:
    config = fake_config()
    jobs, fate = make_jobs(4, {0: 0})
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    while search_of(engine).allowed != {"0"}:
        client.step()
    engine.abort_request("0")
    with engine:
        answers = client.run()
    assert answers["0"].reasons == {"abort"}
    assert all(answers[str(number)].error is None for number in (1, 2, 3))


def test_losses_between_steps_make_no_suspects(fake_config: MakeConfig) -> None:
    config = fake_config()
    jobs, _ = make_jobs(1, {})
    engine, executor = mortal_engine(config, Fate())
    client = Client(engine, executor)
    client.add("0", jobs[0])
    client.step()
    for _ in range(8):
        executor.gate.clear()
        executor.lose()
        assert client.step() == []
        executor.gate.set()
        client.step()
        assert not search_of(engine)._suspects
    with engine:
        answers = client.run()
    assert summary(answers["0"]) == summary(serve(config, jobs)[0]["0"])


def test_the_engine_gives_up_soon_if_every_step_kills(fake_config: MakeConfig) -> None:
    """The requests are not the cause then, and the search for one ends."""
    config = fake_config(max_num_seqs=64, max_recoveries=5)
    jobs, _ = make_jobs(32, {})
    engine, executor = mortal_engine(config, Fate(is_lethal=lambda step: True))
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    with engine, pytest.raises(Exception, match="max_recoveries = 5"):
        client.run()
    assert len(executor.losses) <= 2 + 8 + 4


@pytest.mark.parametrize("num_epochs", [6, 12, 18])
def test_accidents_in_every_group_fail_no_request(fake_config: MakeConfig, num_epochs: int) -> None:
    """Each group dies at its first step, with any requests in it. The control, of requests that
    were not in the lost steps, shows that no request is the cause."""
    config = fake_config(max_num_seqs=8, max_num_batched_tokens=64, max_recoveries=100)
    jobs, _ = make_jobs(64, {})
    killed: set[int] = set()

    def is_first(step: StepInput) -> bool:
        new = executor.epoch <= num_epochs and executor.epoch not in killed
        killed.add(executor.epoch)
        return new

    engine, executor = mortal_engine(config, Fate(is_lethal=is_first))
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    with engine:
        answers = client.run()
    assert len(executor.losses) == num_epochs
    check(answers, serve(config, jobs)[0], {})


def test_a_loss_of_the_control_clears_the_suspect(fake_config: MakeConfig) -> None:
    """Also if the control ran for some steps, and if all other requests are in it again."""
    config = fake_config(max_num_seqs=3, max_num_batched_tokens=64, max_recoveries=100)
    jobs, _ = make_jobs(4, {})
    controls: list[int] = []

    def is_lethal(step: StepInput) -> bool:
        search = search_of(engine)
        if len(executor.losses) >= 8:
            return False
        if not search._control:
            return True
        controls.append(search._num_control_steps)
        return search._num_control_steps == 4

    engine, executor = mortal_engine(config, Fate(is_lethal=is_lethal))
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    with engine:
        answers = client.run()
    assert max(controls) == 4
    check(answers, serve(config, jobs)[0], {})


def test_the_control_ends_with_its_isolation(fake_config: MakeConfig) -> None:
    config = fake_config(max_num_seqs=1, max_num_batched_tokens=64)
    jobs, fate = make_jobs(6, {0: 0})
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    search = search_of(engine)
    while not search._control:
        client.step()
    engine.abort_request("0")
    while engine.health().state is not EngineState.RUNNING:
        client.step()
    client.step()
    assert not search._control
    assert search.allowed is None
    with engine:
        answers = client.run()
    assert answers.pop("0").reasons == {"abort"}
    check(answers, serve(config, jobs)[0], {})


def test_random_poisons(fake_config: MakeConfig) -> None:
    """Up to three of them, with one accident."""
    config = fake_config(max_num_seqs=8, max_num_batched_tokens=32)
    found = accidents = 0

    @settings(
        max_examples=60,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        count=st.integers(1, 14),
        poisonous=st.dictionaries(
            st.integers(0, 13), st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=3
        ),
        accident=st.integers(1, 30),
        n=st.sampled_from([1, 1, 2]),
        num_blocks=st.sampled_from([8, 20, 100]),
        seed=st.integers(0, 1000),
    )
    def run(
        count: int, poisonous: dict[int, int], accident: int, n: int, num_blocks: int, seed: int
    ) -> None:
        nonlocal found, accidents
        poisonous = {number % count: at for number, at in poisonous.items()}
        jobs, fate = make_jobs(count, poisonous, n=n)
        undisturbed, _, _ = serve(config, jobs)
        fate.kills, fate.blocks = frozenset({accident}), [(num_blocks, 4)]
        engine, executor = mortal_engine(config, fate)
        client = Client(engine, executor)
        rng = random.Random(seed)
        while len(client.answers) < count:  # a few at a time
            begin = len(client.answers)
            for number in range(begin, min(count, begin + rng.randint(1, count))):
                client.add(str(number), jobs[number])
            client.step()
        with engine:
            answers = client.run()
        check(answers, undisturbed, poisonous)
        found += len(poisonous)
        accidents += len(executor.steps) >= accident

    run()
    assert found > 50
    assert accidents > 25
