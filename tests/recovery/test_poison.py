"""Requests that kill every rank that runs them: they fail by name, and nobody else does."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tpengine import SamplingParams
from tpengine.engine.stats import EngineState
from tpengine.messages import StepInput

from .conftest import MakeConfig
from .loop import Client, Job, serve, summary
from .mortal import Fate, mortal_engine

POISON = 990
NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def make_jobs(count: int, poisonous: dict[int, int], **fields: Any) -> tuple[list[Job], Fate]:
    """Jobs of which some, by their number, kill when they have so many output tokens."""
    jobs = []
    for number in range(count):
        first = POISON - number if number in poisonous else 3 + number
        prompt = [first, *(3 + (number * 7 + place) % 900 for place in range(4))]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, **fields)
        jobs.append(Job(prompt, params))
    return jobs, Fate(poison={POISON - number: at for number, at in poisonous.items()})


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
    """Found in as many losses as halving needs, of which two count."""
    config = fake_config(max_num_seqs=64, max_num_batched_tokens=512, max_recoveries=2)
    jobs, fate = make_jobs(64, {40: at})
    answers, executor, engine = serve(config, jobs, fate)
    check(answers, serve(config, jobs)[0], {40: at})
    assert len(executor.losses) <= 2 + 6 + 1
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
    assert len(executor.losses) <= 2 + 2 * (6 + 1)


def test_alone_from_the_start(fake_config: MakeConfig) -> None:
    """Three losses in a row are survived by a request that is not the cause; four are not."""
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


def test_those_that_come_meanwhile_wait_and_finish(fake_config: MakeConfig) -> None:
    """Also poisonous ones, which are found in their turn; and one that is aborted on trial."""
    config = fake_config(max_num_seqs=32, max_recoveries=8)
    poisonous = {1: 0, 9: 2, 12: 1}
    jobs, fate = make_jobs(14, poisonous)
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number in range(8):
        client.add(str(number), jobs[number])
    while len(executor.losses) < 3:  # on trial
        client.step()
    for number in range(8, 14):
        client.add(str(number), jobs[number])
    allowed = engine._recovery._poison.allowed
    assert allowed is not None
    assert len(allowed) < 8
    engine.abort_request("0")
    with engine:
        answers = client.run()
    assert answers.pop("0").reasons == {"abort"}
    check(answers, serve(config, jobs)[0], poisonous)


def test_a_suspect_that_is_aborted_alone_ends_the_trial(fake_config: MakeConfig) -> None:
    config = fake_config()
    jobs, fate = make_jobs(4, {0: 0})
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    while engine._recovery._poison.allowed != {"0"}:
        client.step()
    engine.abort_request("0")
    with engine:
        answers = client.run()
    assert answers["0"].reasons == {"abort"}
    assert all(answers[str(number)].error is None for number in (1, 2, 3))


def test_losses_while_nothing_runs_blame_nobody(fake_config: MakeConfig) -> None:
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
        assert not engine._recovery._poison.has_suspects
    with engine:
        answers = client.run()
    assert summary(answers["0"]) == summary(serve(config, jobs)[0]["0"])


def test_when_every_step_kills_it_gives_up_soon(fake_config: MakeConfig) -> None:
    """It is not the requests then: the search for one does not go on for ever."""
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
def test_accidents_at_every_turn_blame_nobody(fake_config: MakeConfig, num_epochs: int) -> None:
    """What kills so many groups in a row, each at its first step, does not ask who is in it: those
    that were in none of those steps show it, as long as there are any."""
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


def test_accidents_among_others_acquit(fake_config: MakeConfig) -> None:
    """Also where the control has gone well for ten steps, and where all others are in it again."""
    config = fake_config(max_num_seqs=3, max_num_batched_tokens=64, max_recoveries=100)
    jobs, _ = make_jobs(4, {})
    controls: list[int] = []

    def is_lethal(step: StepInput) -> bool:
        blame = engine._recovery._poison
        if len(executor.losses) >= 8:
            return False
        if not blame._control:
            return True
        controls.append(blame._num_control_steps)
        return blame._num_control_steps == 4

    engine, executor = mortal_engine(config, Fate(is_lethal=is_lethal))
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    with engine:
        answers = client.run()
    assert max(controls) == 4
    check(answers, serve(config, jobs)[0], {})


def test_control_ends_with_its_trial(fake_config: MakeConfig) -> None:
    config = fake_config(max_num_seqs=1, max_num_batched_tokens=64)
    jobs, fate = make_jobs(6, {0: 0})
    engine, executor = mortal_engine(config, fate)
    client = Client(engine, executor)
    for number, job in enumerate(jobs):
        client.add(str(number), job)
    blame = engine._recovery._poison
    while not blame._control:
        client.step()
    engine.abort_request("0")
    while engine.health().state is not EngineState.RUNNING:
        client.step()
    client.step()
    assert not blame._control
    assert blame.allowed is None
    with engine:
        answers = client.run()
    assert answers.pop("0").reasons == {"abort"}
    check(answers, serve(config, jobs)[0], {})


def test_random_poisons(fake_config: MakeConfig) -> None:
    """Up to three of them, and an accident now and then."""
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
