"""Steps that a worker begins before the driver asks, run on the CPU: tokens stay the same, even if
the driver then asks for something else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from recovery.client import Job, serve, summary
from recovery.mortal import Fate, RealGroup
from support.engines import generate, greedy, ids, make_engine, open_llm, run
from support.gpu_walk import GpuWalk, walk_the_gpus_way
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs, SamplingParams
from tpengine.messages import Fork, NewSequence, SamplingRules, StepInput
from tpengine.worker.gpu import run_ahead
from tpengine.worker.gpu.run_ahead import BegunStep, RunAhead, divide

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 129, 300)
MAX_MODEL_LEN = 512


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    return walk_the_gpus_way(monkeypatch)


def begun(*slots: int) -> BegunStep:
    return BegunStep(list(slots), torch.zeros(len(slots), 1), lambda: True)


def decodes(*slots: int, **changes: Any) -> StepInput:
    return StepInput(7, list(slots), [1] * len(slots), **changes)


CHANGES: dict[str, Any] = {
    "freed_slots": [1],
    "new_sequences": [NewSequence(1, [5], 1, 0, [4], SamplingRules(), 0, 0, [])],
    "forks": [Fork(3, 1, 1)],
    "token_overrides": [(1, 77)],
    "replaced_block_ids": [(1, 0, 5)],
}
"""Of slot 1, whose row is then computed again."""
DIVISIONS = {  # the step, the slots that were begun, those left to compute, where each row is
    "as expected": (decodes(3, 1, 2, new_block_ids=[(1, [9])]), (3, 1, 2), [], None),
    "in another order and fewer": (decodes(2, 3, freed_slots=[1]), (3, 1, 2), [], [2, 0]),
    "new": (StepInput(7, [2, 5, 3, 4], [1, 1, 2, 3]), (3, 2), [5, 3, 4], [1, 2, 3, 4, 5, 6, 7]),
    **{k: (decodes(3, 1, **{k: v}), (3, 1), [1], [0, 2]) for k, v in CHANGES.items()},
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_which_rows_are_left_to_compute(name: str) -> None:
    step, slots, left_slots, source = DIVISIONS[name]
    counts = dict(zip(step.slots, step.num_scheduled_tokens, strict=True))
    left = divide(step, begun(*slots))
    assert left.slots == left_slots
    assert left.num_scheduled_tokens == [counts[slot] for slot in left_slots]
    assert (None if left.source is None else left.source.tolist()) == source


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_as_transformers(models: ModelShop, walk: GpuWalk, enforce_eager: bool) -> None:
    """Requests finish one by one, so that later steps have fewer rows than were begun."""
    folder, oracle, prompts = models.problem(PLAIN, LENGTHS, seed=1)
    params = [greedy(20 + 5 * number) for number in range(len(prompts))]
    args: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
    with open_llm(folder, max_num_seqs=16, enforce_eager=enforce_eager, **args) as llm:
        outputs = generate(llm, prompts, params)
    assert [len(answer) for answer in ids(outputs)] == [param.max_tokens for param in params]
    oracle.assert_likeliest(prompts, ids(outputs))
    assert walk.begun == walk.taken, "an end at its length is known in advance"
    assert walk.whole > 50
    assert walk.early > 50, "the next step was begun only after the ids had arrived"


def test_a_request_that_joins_and_one_that_is_aborted(models: ModelShop, walk: GpuWalk) -> None:
    """A prompt joins, a request is aborted, and another request gets its slot: each time the other
    requests continue with the step that was begun."""
    folder, oracle, prompts = models.problem(PLAIN, (5, 40, 17, 1), seed=4)
    engine = make_engine(folder, max_num_seqs=3)
    for number in (0, 1):
        engine.add_request(str(number), None, greedy(30), prompt_token_ids=prompts[number])
    outputs = [output for _ in range(6) for output in engine.step()]
    before = walk.taken
    engine.add_request("2", None, greedy(30), prompt_token_ids=prompts[2])
    outputs += engine.step()
    assert walk.taken == before + 2
    assert walk.whole == 5, "of the first six steps all but that of the prompts"
    outputs += engine.step()
    engine.abort_request("1")
    engine.add_request("3", None, greedy(30), prompt_token_ids=prompts[3])  # of one token
    before = walk.taken
    outputs += engine.step()
    assert walk.taken == before + 2, "a row of the aborted request was used for the new one"
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
        assert (walk.begun, walk.early) == (0, 0)
    with open_llm(folder) as llm:
        assert ids(generate(llm, prompts, params)) == alone
    assert [len(answer) < 40 for answer in alone[:3]] == [True, True, False]
    assert walk.begun > walk.taken > 50


def test_groups_and_beams(models: ModelShop, walk: GpuWalk) -> None:
    """Sequences of a group are begun like others. Beams are not: the driver chooses their ids."""
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
        assert walk.taken > 50
        before = walk.begun
        assert told(generate(llm, prompts[:2], [beams, greedy(16)])) == best
    assert walk.begun == before


def test_ranks_that_are_lost_with_a_step_begun(models: ModelShop, walk: GpuWalk) -> None:
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
    assert walk.taken > 200


@pytest.mark.parametrize("is_done", [False, True])
def test_time_of_the_model_covers_what_ran_meanwhile(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """If the device still computes when the driver asks, it has computed since the last answer. If
    it has finished, the time of the driver does not count as the model's."""
    ticks = itertools.count()
    monkeypatch.setattr(run_ahead, "end_of_work", lambda device: lambda: is_done)
    monkeypatch.setattr(run_ahead.time, "perf_counter", lambda: float(next(ticks)))
    engine = make_engine(models.folder(PLAIN), max_num_seqs=2)
    engine.add_request("one", None, greedy(5), prompt_token_ids=[5, 6, 7])
    taken = []
    execute = RunAhead.execute

    def timed(self: RunAhead, step: StepInput) -> Any:
        output = execute(self, step)
        taken.append(output.model_s)
        return output

    monkeypatch.setattr(RunAhead, "execute", timed)
    run(engine)
    engine.shutdown()
    assert [steps > taken[0] for steps in taken[1:]] == [not is_done] * 4
