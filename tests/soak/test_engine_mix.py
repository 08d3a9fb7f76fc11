"""Ten minutes of random requests on a far too small cache: nothing is lost, nothing changes."""

from __future__ import annotations

import random
import time

import pytest

from tpengine import EngineArgs, LLMEngine, SamplingParams

DURATION_S = 600.0
NUM_KINDS = 40
MAX_TOKENS = 60
OPENINGS = ["Hello, my name is", "The capital of", "Once upon a time", "Two plus three is", "A"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(DURATION_S + 600)]


def _make_kinds(rng: random.Random) -> list[tuple[str, SamplingParams]]:
    """Requests with fixed seeds, so that each has one right answer."""
    kinds = []
    for seed in range(NUM_KINDS):
        prompt = " ".join(rng.choice(OPENINGS) for _ in range(rng.randint(1, 30)))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([-1, 20]),
            seed=seed,
            stop=rng.choice([[], ["."], ["and", "the"]]),
            max_tokens=rng.randint(1, MAX_TOKENS),
            min_tokens=rng.choice([0, 1]),
        )
        kinds.append((prompt, params))
    return kinds


def _engine(**kwargs: object) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(dtype="float32", max_model_len=512, disable_log_stats=True, **kwargs)
    )


def test_a_random_mix_ends_as_if_each_request_were_alone() -> None:
    rng = random.Random(0)
    kinds = _make_kinds(rng)
    expected = {}
    with _engine() as engine:
        for i, (prompt, params) in enumerate(kinds):
            engine.add_request(str(i), prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    expected[i] = output.outputs[0].token_ids

    pending: dict[str, int] = {}
    ended = aborted = preemptions = 0
    with _engine(
        num_device_blocks_override=40, max_num_seqs=16, max_num_batched_tokens=64
    ) as engine:
        deadline = time.monotonic() + DURATION_S
        number = 0
        while pending or time.monotonic() < deadline:
            if time.monotonic() < deadline and len(pending) < 60 and rng.random() < 0.5:
                kind, number = rng.randrange(NUM_KINDS), number + 1
                engine.add_request(str(number), *kinds[kind])
                pending[str(number)] = kind
            if pending and rng.random() < 0.02:
                engine.abort_request(rng.choice(list(pending)))
            for output in engine.step():
                if not output.finished:
                    continue
                kind = pending.pop(output.request_id)
                ended += 1
                preemptions += output.metrics.num_preemptions
                if output.outputs[0].finish_reason == "abort":
                    aborted += 1
                    token_ids = output.outputs[0].token_ids
                    assert token_ids == expected[kind][: len(token_ids)]
                else:
                    assert output.outputs[0].token_ids == expected[kind]
        assert engine.num_free_blocks == engine.num_total_blocks
    assert ended == number
    assert aborted > 10
    assert preemptions > 100
