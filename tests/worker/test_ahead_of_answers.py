"""Steps that a worker launches on ids that are still on their way to the host, as on a GPU, run on
the CPU: tokens stay the same, whatever the driver finds in the answers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recovery.client import Job, serve, summary
from recovery.mortal import Fate, RealGroup
from support.engines import generate, greedy, ids, make_engine, open_llm, outputs_of, run
from support.gpu_walk import GpuWalk, walk_the_gpus_way
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs, SamplingParams
from tpengine.worker import model_runner


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    return walk_the_gpus_way(monkeypatch)


def test_a_request_that_joins_and_one_that_is_aborted(models: ModelShop, walk: GpuWalk) -> None:
    """A prompt joins, a request is aborted, and another one gets its slot while a sample for the
    first is on its way."""
    folder, oracle, prompts = models.problem(PLAIN, (5, 40, 17, 1), seed=4)
    engine = make_engine(folder, max_num_seqs=3)
    for number in (0, 1):
        engine.add_request(str(number), None, greedy(30), prompt_token_ids=prompts[number])
    outputs = [output for _ in range(6) for output in engine.step()]
    assert walk.whole > 3
    before = walk.ahead
    engine.add_request("2", None, greedy(30), prompt_token_ids=prompts[2])
    outputs += [output for _ in range(3) for output in engine.step()]
    assert walk.ahead >= before + 2 * 3, "the others did not continue ahead"
    engine.abort_request("1")
    engine.add_request("3", None, greedy(30), prompt_token_ids=prompts[3])  # of one token
    outputs += run(engine)
    engine.shutdown()
    final = {output.request_id: output.outputs[0].token_ids for output in outputs}
    answers = [final[str(number)] for number in range(4)]
    assert [len(answers[number]) for number in (0, 2, 3)] == [30] * 3
    oracle.assert_likeliest(prompts, answers)


def test_ends_that_are_not_known_in_advance(models: ModelShop, walk: GpuWalk) -> None:
    """Stop strings, end tokens and stop tokens: the surplus token is dropped."""
    folder = models.folder(PLAIN, tokenizer=True)
    prompts = models.oracle(folder).prompts((5, 40, 17, 9), seed=4)
    alone: list[list[int]] = []
    with open_llm(folder, async_scheduling=False) as llm:
        whole = generate(llm, prompts, greedy(40))
        params = [
            replace(greedy(40), stop=[whole[0].outputs[0].text[9:12]]),
            replace(greedy(40), stop_token_ids=[ids(whole)[1][17]]),
            greedy(40),
            SamplingParams(temperature=1.0, seed=5, max_tokens=40, repetition_penalty=1.3),
        ]
        alone = ids(generate(llm, prompts, params))
        assert walk.early == 0
    assert ids(outputs_of(folder, prompts, params)) == alone
    assert [len(answer) < 40 for answer in alone[:3]] == [True, True, False]
    assert walk.ahead > 50


def test_groups_and_beams(models: ModelShop, walk: GpuWalk) -> None:
    """Sequences of a group run ahead like others. Beams do not: the driver chooses their ids."""
    folder = models.folder(PLAIN)
    prompts = models.oracle(folder).prompts((5, 40, 17), seed=4)
    params = [
        SamplingParams(n=3, seed=1, max_tokens=24, ignore_eos=True, logprobs=1),
        greedy(30),
        SamplingParams(n=1, best_of=2, seed=2, max_tokens=20, ignore_eos=True),
    ]
    beams = SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=16)

    def told(outputs: Any) -> list[Any]:
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    with open_llm(folder, async_scheduling=False) as llm:
        expected = told(generate(llm, prompts, params))
        best = told(generate(llm, prompts[:2], [beams, greedy(16)]))
    with open_llm(folder) as llm:
        assert told(generate(llm, prompts, params)) == expected
        assert walk.ahead > 50
        assert told(generate(llm, prompts[:2], [beams, greedy(16)])) == best
        before = walk.ahead
        assert told(generate(llm, prompts[:1], beams)) == best[:1]
    assert walk.ahead == before


def test_ranks_that_are_lost_with_steps_in_flight(models: ModelShop, walk: GpuWalk) -> None:
    folder = str(models.folder(PLAIN, tokenizer=True))
    args = EngineArgs(folder, dtype="float32", max_model_len=128, max_recoveries=100)
    config = args.create_engine_config("cpu")
    generator = torch.Generator().manual_seed(3)
    jobs = [
        Job(torch.randint(4, 512, (length,), generator=generator).tolist(), params)
        for length, params in (
            (33, greedy(40)),
            (5, SamplingParams(temperature=1.1, seed=4, max_tokens=40, ignore_eos=True)),
            (20, SamplingParams(n=2, temperature=1.0, max_tokens=40, ignore_eos=True)),
        )
    ]
    answers = []
    for kills in (frozenset[int](), frozenset({3, 9, 10, 25})):
        served = serve(config, jobs, Fate(kills, blocks=[(200, 0)]), RealGroup)
        answers.append([summary(answer) for answer in served.answers.values()])
    assert answers[0] == answers[1]
    assert len(served.executor.losses) == 4
    assert walk.ahead > 200


def test_times_of_the_model_do_not_overlap(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is launched while the device computes another begins when that one is done."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(model_runner, "time", clock)
    engine = make_engine(models.folder(PLAIN), max_num_seqs=2)
    engine.add_request("one", None, greedy(9), prompt_token_ids=[5, 6, 7])
    first = next(ticks)
    run(engine)
    engine.shutdown()
    assert walk.early > 5
    assert 0 < engine.counters.step_seconds["model"] <= next(ticks) - first
