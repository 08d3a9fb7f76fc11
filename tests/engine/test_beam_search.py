"""Beam search against `generate(num_beams=k)` of transformers, in float32."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scheduling.loop import make_request
from support.costs import cost_ratio
from support.engines import preemptions
from support.engines import run as run_engine
from support.models import ModelShop
from support.small_llamas import SHAPES, VOCAB_SIZE, Job, MakeEngine, run
from support.step_log import log_steps

from tpengine.engine.beam_search import BeamSearch, num_candidates
from tpengine.messages import Candidates
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.sequence import Sequence
from tpengine.scheduling.step import StepDecisions

MAX_TOKENS = 14
WIDTHS, PENALTIES = (2, 4, 8), (0.5, 1.0, 2.0)
Beams = list[tuple[list[int], float]]
"""(output ids, score), best first"""
Expected = Callable[["Case"], Beams]


@dataclass(frozen=True)
class Case:
    model: str
    width: int
    length_penalty: float
    early_stopping: bool | str
    prompt: tuple[int, ...]
    end_token_ids: tuple[int, ...]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.width,
            use_beam_search=True,
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=True,  # the model's own is among these, or not
            stop_token_ids=self.end_token_ids,
        )


def make_cases() -> list[Case]:
    """All widths, penalties and ways to stop, over models and prompts."""
    rng = random.Random(7)
    cases = []
    for width, penalty in itertools.product(WIDTHS, PENALTIES):
        for model, length in zip(SHAPES, (3, 17, 41), strict=True):
            prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))
            ends = tuple(rng.sample(range(VOCAB_SIZE), 20))
            cases += [Case(model, width, penalty, s, prompt, ends) for s in (True, False, "never")]
    return cases


CASES = make_cases()


def place_of(case: Case) -> int:
    model = list(SHAPES).index(case.model)
    return WIDTHS.index(case.width) + PENALTIES.index(case.length_penalty) + model


DIAGONAL = [case for case in CASES if place_of(case) % 3 == 0]
"""Of each width and penalty the cases of one model, and of each model all widths and penalties."""


def oracle_beams(model: Any, case: Case) -> Beams:
    """What transformers gives, one prompt at a time."""
    with torch.inference_mode():
        searched = model.generate(
            torch.tensor([case.prompt]),
            num_beams=case.width,
            num_return_sequences=case.width,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_token_id=list(case.end_token_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = []
    for ids, score in zip(searched.sequences, searched.sequences_scores.tolist(), strict=True):
        output = ids[len(case.prompt) :].tolist()
        end = next((i for i, token in enumerate(output) if token in case.end_token_ids), None)
        beams.append((output if end is None else output[: end + 1], score))
    return beams


@pytest.fixture(scope="module")
def expected(models: ModelShop) -> Expected:
    """What transformers gives, computed when it is first asked for."""
    oracles = {name: models.oracle(models.folder(shape)) for name, shape in SHAPES.items()}
    return functools.cache(lambda case: oracle_beams(oracles[case.model].model, case))


def check(outputs: dict[str, RequestOutput], expected: Expected) -> None:
    for number, case in enumerate(CASES):
        if f"beams-{number}" not in outputs:
            continue
        output = outputs[f"beams-{number}"]
        assert output.error is None
        assert [beam.index for beam in output.outputs] == list(range(case.width))
        for beam, (ids, score) in zip(output.outputs, expected(case), strict=True):
            assert list(beam.token_ids) == ids, case
            assert abs(beam.cumulative_logprob / len(ids) ** case.length_penalty - score) < 1e-4
            stopped = ids[-1] in case.end_token_ids
            assert beam.finish_reason == ("stop" if stopped else "length")


def jobs_of(model: str, crowd: bool = False, cases: list[Case] = DIAGONAL) -> list[Job]:
    """The cases of a model; in a crowd, sampled requests of many kinds run between them."""
    jobs: list[Job] = []
    for number, case in enumerate(CASES):
        if case.model != model or case not in cases:
            continue
        jobs.append((f"beams-{number}", list(case.prompt), case.params))
        if crowd:
            prompt = [3 + (number * 7 + place) % 250 for place in range(5 + number % 20)]
            params = SamplingParams(n=1 + number % 3, temperature=1.0, max_tokens=20)
            jobs.append((f"other-{number}", prompt, params))
    return jobs


def test_the_cases_can_tell_a_wrong_search(expected: Expected) -> None:
    """Beams end early, and the three ways to stop differ in a third of the cases."""
    groups = [DIAGONAL[i : i + 3] for i in range(0, len(DIAGONAL), 3)]
    differ = sum(len({str([ids for ids, _ in expected(case)]) for case in g}) > 1 for g in groups)
    assert differ >= len(groups) / 3
    lengths = [len(ids) for case in DIAGONAL for ids, _ in expected(case)]
    assert sum(length < MAX_TOKENS for length in lengths) > len(lengths) / 4
    assert sum(length == MAX_TOKENS for length in lengths) > len(lengths) / 20


@pytest.mark.parametrize(
    ("chunked", "model", "cases"),
    [
        *((True, model, DIAGONAL) for model in SHAPES),
        (False, "single", DIAGONAL),
        *(
            pytest.param(chunked, model, CASES, marks=pytest.mark.soak)
            for chunked, model in itertools.product((True, False), SHAPES)
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_side_by_side(
    make_engine: MakeEngine, expected: Expected, chunked: bool, model: str, cases: list[Case]
) -> None:
    engine = make_engine(model, enable_chunked_prefill=chunked, max_num_batched_tokens=128)
    check(run(engine, jobs_of(model, cases=cases)), expected)


@pytest.mark.parametrize(
    ("mode", "caching"), [("swap", True), ("recompute", True), ("recompute", False)]
)
def test_in_a_crowd_and_preempted(
    make_engine: MakeEngine, expected: Expected, mode: str, caching: bool
) -> None:
    """On a cache that holds two or three of the requests."""
    engine = make_engine(
        "grouped",
        num_device_blocks_override=36,
        max_num_batched_tokens=24,
        preemption_mode=mode,
        swap_space=0.01 if mode == "swap" else 0.0,
        enable_prefix_caching=caching,
    )
    with log_steps() as log:
        outputs = run(engine, jobs_of("grouped", crowd=True))
    check(outputs, expected)
    assert preemptions([out for key, out in outputs.items() if key.startswith("beams")]) >= 4
    assert (log.num_swapped > 0) == (mode == "swap")


CASE = next(case for case in CASES if case.width == 4 and case.model == "grouped")


def test_n_of_best_of(make_engine: MakeEngine, expected: Expected) -> None:
    """Fewer are returned than are kept, in the only report, and logprobs are those of the returned
    tokens."""
    engine = make_engine("grouped")
    params = replace(CASE.params, n=2, best_of=4, logprobs=3)
    engine.add_request("one", None, params, prompt_token_ids=list(CASE.prompt))
    (output,) = run_engine(engine)
    assert output.finished
    assert [list(o.token_ids) for o in output.outputs] == [ids for ids, _ in expected(CASE)[:2]]
    for beam in output.outputs:
        pairs = zip(beam.logprobs or [], beam.token_ids, strict=True)
        own = [entry[token].logprob for entry, token in pairs]
        assert sum(own) == pytest.approx(beam.cumulative_logprob, abs=1e-4)
        assert all(len(entry) in (3, 4) for entry in beam.logprobs or [])


def test_end_tokens_are_kept_out_before_min_tokens(make_engine: MakeEngine) -> None:
    params = replace(CASE.params, min_tokens=9)
    output = run(make_engine("grouped"), [("one", list(CASE.prompt), params)])["one"]
    for beam in output.outputs:
        assert len(beam.token_ids) >= 9
        assert not set(beam.token_ids[:8]) & set(CASE.end_token_ids)


def test_end_ids_cost_little() -> None:
    """A search that looks at 12 times as many candidates, one by one, takes 10 times as long."""
    width, ends = 128, list(range(11))
    rng = random.Random(0)

    def search(*end_ids: int) -> Callable[[], object]:
        params = SamplingParams(
            n=width, use_beam_search=True, temperature=0.0, stop_token_ids=end_ids, max_tokens=50
        )
        sequences = [Sequence(i, i, [1, 2, 3 + i], 2) for i in range(width)]
        count = num_candidates(width, len(end_ids))
        own = {"end_token_ids": frozenset(end_ids), "num_candidates": count}
        request = replace(make_request(0, [1, 2], params), sequences=sequences, **own)
        sampled = []
        for sequence in sequences:
            scores = sorted((-10 * rng.random() for _ in range(count)), reverse=True)
            ids = rng.sample(range(5000), count)
            sampled.append((sequence, Candidates(ids, scores, scores), None))
        return lambda: BeamSearch(request, None).advance(sampled, StepDecisions())

    assert cost_ratio(search(*ends), search()) < 3
