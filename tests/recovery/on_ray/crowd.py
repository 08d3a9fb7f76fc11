"""Sixty-four requests of all kinds, half of them streams, kept in flight on a far too small cache.

A request that finishes is followed by another, so that each loss meets as many as the first.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.ray_engines import executor_of, rank_engine

from recovery.client import Answer, Client, Job, summary
from tpengine import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams

NUM_REQUESTS = 64
MAX_PROMPT, MAX_OUTPUT = 64, 24
NUM_BLOCKS, BLOCK_SIZE = 40, 16
MODEL_LENGTH = NUM_BLOCKS * BLOCK_SIZE
MIN_MARGIN = 1e-3
DELTA = RequestOutputKind.DELTA
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "output_kind": DELTA},
    {"temperature": 0.0},
    {"temperature": 1.1, "top_p": 0.9, "output_kind": DELTA},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "n": 2, "output_kind": DELTA},
    {"temperature": 1.0, "n": 1, "best_of": 3},
    {"temperature": 1.2, "frequency_penalty": 0.5, "logprobs": 1, "output_kind": DELTA},
    {"temperature": 0.0, "use_beam_search": True, "n": 2, "best_of": 3},
]
SEED = 0
"""Of the prompts: one for which no greedy choice is a matter of rounding."""


def make_jobs() -> list[Job]:
    """Their seeds are their own, so that an answer does not depend on when it was asked for."""
    rng = random.Random(SEED)
    jobs = []
    for number in range(NUM_REQUESTS):
        prompt = [rng.randrange(4, 512) for _ in range(rng.randint(2, MAX_PROMPT))]
        params = SamplingParams(
            seed=number, max_tokens=MAX_OUTPUT, ignore_eos=True, **KINDS[number % len(KINDS)]
        )
        jobs.append(Job(prompt, params))
    return jobs


def crowd_engine(folder: Path, **args: Any) -> LLMEngine:
    """Two ranks, room for a sixth of the crowd, and swap."""
    args = {"block_size": BLOCK_SIZE, "max_num_seqs": 32, "max_num_batched_tokens": 128, **args}
    args = {"num_device_blocks_override": NUM_BLOCKS, "max_model_len": MODEL_LENGTH, **args}
    args = {"preemption_mode": "swap", "swap_space": 0.02, "max_recoveries": 10_000, **args}
    return rank_engine(folder, 2, **args)


def whole(job: Job) -> Job:
    """The same request, answered in one piece, with what its margin is known by."""
    is_greedy = job.params.temperature == 0.0 and not job.params.use_beam_search
    logprobs = 2 if is_greedy else job.params.logprobs
    params = replace(job.params, output_kind=RequestOutputKind.FINAL_ONLY, logprobs=logprobs)
    return Job(job.prompt, params)


def margin(answers: list[Answer]) -> float:
    """Smallest lead of a greedy token over the second best."""
    leads = [
        first.logprob - second.logprob
        for answer, job in zip(answers, make_jobs(), strict=True)
        if job.params.temperature == 0.0 and not job.params.use_beam_search
        for entry in answer.outputs[0].logprobs or []
        for first, second in [sorted(entry.values(), key=lambda logprob: logprob.rank)[:2]]
    ]
    assert len(leads) > NUM_REQUESTS // 4 * (MAX_OUTPUT - 1)
    return min(leads)


class Crowd(Client):
    """Keeps jobs in flight on an engine and compares every answer with the undisturbed one.

    Attributes:
        num_finished: requests that came to their right end.
    """

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine, executor_of(engine))
        self.jobs = make_jobs()
        self.num_finished = 0
        self._numbers = itertools.count()
        self._open: dict[str, int] = {}
        self._expected: list[Answer] = []

    def serve_undisturbed(self) -> float:
        """All jobs once, in one piece each; returns the margin of the greedy ones."""
        for number, job in enumerate(self.jobs):
            self.add(str(number), whole(job))
        self._expected = list(self.run().values())
        return margin(self._expected)

    def fill(self, count: int = NUM_REQUESTS) -> None:
        """Adds requests until so many of the jobs are open."""
        while len(self._open) < count:
            number = next(self._numbers)
            job = number % len(self.jobs)
            self._open[f"job {number}"] = job
            self.add(f"job {number}", self.jobs[job])

    def step(self) -> list[RequestOutput]:
        """One step of the engine, whose outputs are checked."""
        outputs = super().step()
        for output in outputs:
            if output.finished and output.request_id in self._open:
                job, answer = self._open.pop(output.request_id), self.answers[output.request_id]
                assert answer.error is None
                assert summary(answer) == summary(self._expected[job]), self.jobs[job].params
                self.num_finished += 1
        return outputs

    def finish(self, timeout_s: float) -> None:
        """Steps until all have ended."""
        deadline = time.monotonic() + timeout_s
        while self.engine.has_unfinished_requests():
            assert time.monotonic() < deadline, f"{len(self._open)} are unfinished"
            self.step()
        assert not self._open

    def count_blocks(self) -> None:
        """One request that needs the whole cache can only be served if no other holds a block."""
        engine = self.engine
        assert engine.num_free_blocks == engine.num_total_blocks == NUM_BLOCKS
        stats = engine.stats()
        assert all(ledger.num_host_blocks > 0 for ledger in stats.ledgers)
        assert stats.cache.host_usage == 0.0
        prompt = [4 + place % 500 for place in range(MODEL_LENGTH - 2)]
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        engine.add_request("all", None, params, prompt_token_ids=prompt)
        least, outputs = NUM_BLOCKS, []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            least = min(least, engine.num_free_blocks)
        assert outputs[0].error is None
        assert len(outputs[0].outputs[0].token_ids) == 2
        assert least == 0
        assert engine.num_free_blocks == NUM_BLOCKS
