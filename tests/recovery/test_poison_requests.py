"""Requests that kill every rank that runs them: they fail by name, and no other request fails."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduling.fake_worker import FakeWorker
from scheduling.loop import Limits, Loop, make_request, plain
from support.random_runs import SAME_EXAMPLES

from tpengine import SamplingParams
from tpengine.engine.poison_requests import PoisonSearch
from tpengine.engine.stats import EngineState
from tpengine.errors import RankLoss
from tpengine.messages import StepInput

from .client import Client, Job, open_client, serve, summary
from .conftest import MakeConfig
from .mortal import Fate, MortalExecutor

POISON = 990
NUM_TOKENS = 12
pytestmark = pytest.mark.usefixtures("quiet")


def make_jobs(count: int, poisonous: dict[int, int], **fields: Any) -> tuple[list[Job], Fate]:
    """Makes jobs; those in `poisonous`, by number, kill when they have that many output tokens."""
    jobs = []
    for number in range(count):
        first = POISON - number if number in poisonous else 3 + number
        prompt = [first, *(3 + (number * 7 + place) % 900 for place in range(4))]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, **fields)
        jobs.append(Job(prompt, params))
    return jobs, Fate(poison={POISON - number: at for number, at in poisonous.items()})


def search_of(client: Client) -> PoisonSearch:
    """Returns the engine's search for poisonous requests: steps between losses do not show it."""
    return client.engine._recovery._poison


def check(answers: Any, undisturbed: Any, poisonous: dict[int, int]) -> None:
    for name, answer in answers.items():
        if int(name) not in poisonous:
            assert answer.error is None
            assert summary(answer) == summary(undisturbed[name])
            continue
        assert answer.reasons == {"error"}
        for word in (f"'{name}'", "rank 1", "pid 4711", "SIGKILL", "step ", "last words"):
            assert word in answer.error
        for completion in answer.outputs.values():
            assert len(completion.token_ids) <= poisonous[int(name)]
            whole = undisturbed[name].outputs[completion.index].token_ids
            assert completion.token_ids == whole[: len(completion.token_ids)]


def finish(
    client: Client, jobs: list[Job], poisonous: dict[int, int] | None = None, aborted: str = ""
) -> None:
    """Serves what is left; all must end as if it were undisturbed, but for these requests."""
    with client.engine:
        answers = client.run()
    assert not aborted or answers.pop(aborted).reasons == {"abort"}
    check(answers, serve(client.executor.config, jobs).answers, poisonous or {})


@pytest.mark.parametrize(
    ("poisonous", "max_recoveries", "max_losses"),
    [({40: 0}, 2, 2 + 7), ({40: 5}, 2, 2 + 7), ({3: 0, 50: 7}, 6, 18), ({30: 2, 31: 2}, 2, 2 + 14)],
    ids=["one at once", "one later", "two", "two at the same token"],
)
def test_among_many(
    fake_config: MakeConfig, poisonous: dict[int, int], max_recoveries: int, max_losses: int
) -> None:
    """One is found in seven losses after the first two; only those two count against the limit."""
    config = fake_config(max_num_seqs=64, max_num_batched_tokens=512, max_recoveries=max_recoveries)
    jobs, fate = make_jobs(64, poisonous)
    served = serve(config, jobs, fate)
    check(served.answers, serve(config, jobs).answers, poisonous)
    num_losses = len(served.executor.losses)
    assert num_losses <= max_losses
    assert served.engine.health().num_recoveries == num_losses


def test_alone_from_the_start(fake_config: MakeConfig) -> None:
    """A request that runs alone goes on after three losses in a row, and fails after four."""
    config = fake_config()
    jobs, _ = make_jobs(1, {})
    survived = serve(config, jobs, Fate(kills=frozenset({2, 3, 4})))
    check(survived.answers, serve(config, jobs).answers, {})
    jobs, fate = make_jobs(1, {0: 3})
    served = serve(config, jobs, fate)
    assert len(served.executor.losses) == 4
    check(served.answers, serve(config, jobs).answers, {0: 3})


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0}]
)
def test_groups_of_sequences(fake_config: MakeConfig, fields: dict[str, Any]) -> None:
    config = fake_config()
    jobs, fate = make_jobs(5, {2: 4}, **fields)
    answers = serve(config, jobs, fate).answers
    assert answers.pop("2").reasons == {"error"}
    check(answers, serve(config, jobs).answers, {})


def test_requests_that_come_during_isolation_wait_and_finish(fake_config: MakeConfig) -> None:
    """Poisonous ones among them are found later; one request is aborted in isolation."""
    poisonous = {1: 0, 9: 2, 12: 1}
    jobs, fate = make_jobs(14, poisonous)
    client = open_client(fake_config(max_num_seqs=32, max_recoveries=8), jobs[:8], fate)
    while len(client.executor.losses) < 3:  # isolation has begun
        client.step()
    for number in range(8, 14):
        client.add(str(number), jobs[number])
    allowed = search_of(client).allowed
    assert len(allowed) < 8
    client.engine.abort_request("0")
    finish(client, jobs, poisonous, aborted="0")


def test_an_abort_of_the_only_suspect_ends_the_isolation(fake_config: MakeConfig) -> None:
    jobs, fate = make_jobs(4, {0: 0})
    client = open_client(fake_config(), jobs, fate)
    while search_of(client).allowed != {"0"}:
        client.step()
    client.engine.abort_request("0")
    finish(client, jobs, aborted="0")


@pytest.mark.parametrize("when", ["between steps", "just before a step", "after an answer"])
def test_losses_outside_a_step_make_no_suspects(
    fake_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The engine learns of the second and the third only from the step that it sends next."""
    jobs, _ = make_jobs(3, {})
    client = open_client(fake_config(), jobs)
    executor = client.executor
    client.step()
    for _ in range(8):
        with monkeypatch.context() as patch:
            if when == "after an answer":
                executor.lose("execute_model", executor.steps[-1][1])
            else:
                executor.lose()
            if when != "between steps":
                patch.setattr(MortalExecutor, "loss", None)
            assert client.step() == []
        assert client.engine.health().state is EngineState.RECOVERING
        assert not search_of(client).suspects
        client.recover()
    finish(client, jobs)


def test_the_engine_gives_up_soon_if_every_step_kills(fake_config: MakeConfig) -> None:
    """The requests are not the cause then, and the search for one ends."""
    config = fake_config(max_num_seqs=64, max_recoveries=5)
    client = open_client(config, make_jobs(32, {})[0], Fate(is_lethal=lambda step: True))
    with client.engine, pytest.raises(Exception, match="max_recoveries = 5"):
        client.run()
    assert len(client.executor.losses) <= 2 + 8 + 4


@pytest.mark.parametrize("num_epochs", [6, 12, 18])
def test_accidents_in_every_group_fail_no_request(fake_config: MakeConfig, num_epochs: int) -> None:
    """Each group dies at its first step, with any requests in it. The control, of requests that
    were not in the lost steps, shows that no request is the cause."""
    config = fake_config(max_num_seqs=8, max_num_batched_tokens=64, max_recoveries=100)
    jobs, _ = make_jobs(64, {})
    killed: set[int] = set()

    def is_first(step: StepInput) -> bool:
        epoch = client.executor.epoch
        new = epoch <= num_epochs and epoch not in killed
        killed.add(epoch)
        return new

    client = open_client(config, jobs, Fate(is_lethal=is_first))
    finish(client, jobs)
    assert len(client.executor.losses) == num_epochs


def test_a_loss_of_the_control_clears_the_suspect(fake_config: MakeConfig) -> None:
    """Also if the control ran for some steps, and if all other requests are in it again."""
    config = fake_config(max_num_seqs=3, max_num_batched_tokens=64, max_recoveries=100)
    jobs, _ = make_jobs(4, {})
    num_steps = 0  # of the control that runs
    longest = 0

    def is_lethal(step: StepInput) -> bool:
        nonlocal num_steps, longest
        if len(client.executor.losses) >= 8:
            return False
        num_steps = num_steps + 1 if search_of(client).control else 0
        longest = max(longest, num_steps)
        return num_steps in (0, 5)

    client = open_client(config, jobs, Fate(is_lethal=is_lethal))
    finish(client, jobs)
    assert longest == 5


def test_the_control_ends_with_its_isolation(fake_config: MakeConfig) -> None:
    jobs, fate = make_jobs(6, {0: 0})
    client = open_client(fake_config(max_num_seqs=1, max_num_batched_tokens=64), jobs, fate)
    search = search_of(client)
    while not search.control:
        client.step()
    client.engine.abort_request("0")
    client.recover()
    client.step()
    assert not search.control
    assert search.allowed is None
    finish(client, jobs, aborted="0")


def test_random_poisons(fake_config: MakeConfig) -> None:
    """Up to three of them, with one accident."""
    config = fake_config(max_num_seqs=8, max_num_batched_tokens=32)
    num_poisonous = accidents = 0

    @settings(SAME_EXAMPLES, max_examples=60, phases=[Phase.generate])
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
        nonlocal num_poisonous, accidents
        poisonous = {number % count: at for number, at in poisonous.items()}
        jobs, fate = make_jobs(count, poisonous, n=n)
        fate.kills, fate.blocks = frozenset({accident}), [(num_blocks, 4)]
        client = open_client(config, [], fate)
        rng = random.Random(seed)
        while len(client.answers) < count:  # a few at a time
            begin = len(client.answers)
            for number in range(begin, min(count, begin + rng.randint(1, count))):
                client.add(str(number), jobs[number])
            client.step()
        finish(client, jobs, poisonous)
        num_poisonous += len(poisonous)
        accidents += len(client.executor.steps) >= accident

    run()
    assert num_poisonous > 50
    assert accidents > 25


def test_a_request_whose_picture_loses_the_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no rows in most steps that compute the features."""
    monkeypatch.setattr(FakeWorker, "_computed_pictures", lambda *_: {})
    loop, search = Loop(Limits(picture_rows=20, num_blocks=400)), PoisonSearch()
    requests = [loop.add(make_request(i, 3, plain(300), pictures="a" * (i == 2))) for i in range(4)]
    for _ in range(200):
        loop.restrict(search.allowed and sorted(search.allowed))
        output = loop._plan()
        if not output.awaiting or any(row in requests[2].sequences for row in output.rows):
            loop._answer()
            search.note_step()
            search.note_progress()
            continue
        loss = RankLoss(0, "", 1, output.step_input.step, "execute_model", "")
        unfinished = loop.scheduler.unfinished_requests()
        culprit, _ = search.note_loss(loss, [output], unfinished)
        loop.lose(400)
        if culprit is not None:
            break
    assert culprit is requests[2]
