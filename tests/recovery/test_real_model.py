"""A real worker with a small random Llama in float32 is lost again and again: a user sees the same
as without the losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foretold import foretell, totals
from support.matrix import only
from support.step_log import log_steps

from recovery.client import open_client
from tpengine import RequestOutputKind, SamplingParams

from .client import Answer, Job, serve, summary
from .mortal import Fate, RealGroup

DELTA = RequestOutputKind.DELTA
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "output_kind": DELTA, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.2, "seed": 7, "output_kind": DELTA, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.9, "n": 3, "logprobs": 1},
    {"temperature": 1.0, "n": 2, "output_kind": DELTA, "stop": ["a", "qu"], "min_tokens": 3},
    {"temperature": 0.9, "n": 1, "best_of": 3, "seed": 3},
    {"temperature": 0.0, "use_beam_search": True, "n": 2, "best_of": 3, "logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "bad_words": ["e"], "prompt_logprobs": 2},
    {"temperature": 1.0, "n": 2, "structured_outputs": {"regex": "[a-f ]{9,30}!"}},
    {
        "temperature": 0.0,
        "use_beam_search": True,
        "best_of": 3,
        "structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}},
    },
]
LENGTHS = [33, 5, 64, 17, 2, 40, 21, 12, 50, 9, 26, 31]
ENGINES = {
    "roomy": ({}, [(200, 0)]),
    "swap": (
        {"preemption_mode": "swap", "max_num_batched_tokens": 48, "block_size": 8},
        [(40, 200), (34, 200), (28, 200)],
    ),
    "drafts": ({"speculative_model": "[ngram]"}, [(200, 0)]),
    "recompute": (
        {
            "preemption_mode": "recompute",
            "max_num_batched_tokens": 32,
            "block_size": 8,
            "enable_prefix_caching": False,
            "scheduling_policy": "priority",
        },
        [(40, 0), (34, 0)],
    ),
    "window": (
        {"preemption_mode": "swap", "max_num_batched_tokens": 48, "block_size": 8},
        [(40, 200), (34, 200)],
    ),
}
ENGINES |= {
    f"{name}, transformers' code": (args | {"model_impl": "transformers"}, [*blocks])
    for name, (args, blocks) in ENGINES.items()
}
"""By name: what engines are told, and how many blocks each group has. All are compared with
tpengine's code."""
ENGINES["a GPU's way"] = ({}, [(200, 0)])
# Its sequences keep the blocks behind a window.
ENGINES["window, transformers' code"][1][:] = [(48, 200), (38, 200)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_jobs(with_priorities: bool) -> list[Job]:
    generator = torch.Generator().manual_seed(3)
    jobs = []
    for number, length in enumerate(LENGTHS):
        prompt = torch.randint(4, 512, (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=24, **KINDS[number % len(KINDS)])
        jobs.append(Job(prompt, params, number % 3 if with_priorities else 0))
    return jobs


def logprobs_of(answer: Answer) -> list[float]:
    """Returns all log probabilities of an answer, in order."""
    entries = [e for o in answer.outputs.values() for e in o.logprobs or []]
    entries += [entry for entry in answer.prompt_logprobs or [] if entry is not None]
    logprobs = [entry[token].logprob for entry in entries for token in sorted(entry)]
    return logprobs + [o.cumulative_logprob or 0.0 for o in answer.outputs.values()]


IN_EACH_RUN = ("swap", "drafts", "recompute", "window, transformers' code", "a GPU's way")


@pytest.mark.parametrize("name", only(IN_EACH_RUN, ENGINES))
def test_everything_a_user_sees_is_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """Also if a lost step had drafts, or ids of steps in flight had not arrived."""
    args, blocks = ENGINES[name]
    walk = request.getfixturevalue("walk") if "GPU" in name else None
    make = request.getfixturevalue("window_config" if "window" in name else "real_config")
    config = make(**args)
    jobs = make_jobs(config.scheduler.policy == "priority")
    plenty = make(scheduling_policy=config.scheduler.policy)
    undisturbed = serve(plenty, jobs, Fate(blocks=[(400, 0)]), RealGroup).answers
    kills = frozenset({2, 4, 9, 14, 20, 27, 41})
    known = {
        tuple(job.prompt): [o.token_ids for _, o in sorted(undisturbed[str(i)].outputs.items())]
        for i, job in enumerate(jobs)
    }

    served = open_client(config, jobs, Fate(kills, blocks=blocks), RealGroup)
    if config.scheduler.lookahead is not None:
        foretell(served.engine, known)
    with log_steps() as log, served.engine:
        served.run()
    if (drafter := served.engine._scheduler.drafter) is not None:
        drafted, accepted = totals(drafter)
        assert 20 < accepted < drafted
    assert len(served.executor.losses) >= 5
    assert walk is None or walk.ahead > 200
    assert (log.num_swapped > 0) == name.startswith(("swap", "window"))
    # Also with swap a request is recomputed that has several sequences and computes its prompt.
    assert log.num_recomputed > 0 or not name.startswith("recompute")
    assert served.engine.num_total_blocks == blocks[-1][0]
    for number, job in enumerate(jobs):
        answer, expected = served.answers[str(number)], undisturbed[str(number)]
        assert answer.error is None
        assert summary(answer) == summary(expected), job.params
        assert logprobs_of(answer) == pytest.approx(logprobs_of(expected), abs=1e-4)
        if job.params.prompt_logprobs is not None:
            assert len(answer.prompt_logprobs) == len(job.prompt)
