"""Ten minutes of random requests on far too small caches: nothing is lost, nothing changes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.step_log import StepLog, log_steps

from tpengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams

DURATION_S = 600.0
NUM_KINDS = 60
MAX_TOKENS = 60
MAX_PENDING = 60
OPENINGS = ["Hello, my name is", "The capital of", "Once upon a time", "Two plus three is", "A"]
FAMILIES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 2, "best_of": 4},
    {"n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 0.6},
    {"n": 4, "use_beam_search": True, "early_stopping": True},
]
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {40: 2.0, 41: -3.0}},
]
TINY_SWAP_GIB = 1e-3
"""Host blocks for one or two requests: most that are preempted are computed again."""
ENGINES: dict[str, dict[str, Any]] = {
    "swap": {"preemption_mode": "swap"},
    "little swap": {"preemption_mode": "swap", "swap_space": TINY_SWAP_GIB},
    "recompute": {"preemption_mode": "recompute", "scheduling_policy": "priority"},
    "auto, whole prompts": {
        "preemption_mode": "auto",
        "scheduling_policy": "priority",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 512,
    },
    "outgrown": {
        "num_device_blocks_override": 12,
        "max_model_len": 192,
        "enable_prefix_caching": False,
    },
}

Kind = tuple[str, SamplingParams]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(DURATION_S + 900)]


def _make_kinds(rng: random.Random) -> list[Kind]:
    """Requests with fixed seeds, so that each has one right answer."""
    kinds = []
    for seed in range(NUM_KINDS):
        prompt = " ".join(rng.choice(OPENINGS) for _ in range(rng.randint(1, 20)))
        fields = FAMILIES[seed % len(FAMILIES)] | rng.choice(PENALTIES)
        fields |= {"max_tokens": rng.randint(1, MAX_TOKENS), "min_tokens": rng.choice([0, 1])}
        if fields.get("use_beam_search"):
            fields["temperature"] = 0.0
        else:
            several = fields.get("n", 1) > 1
            fields["temperature"] = rng.choice([0.8, 1.2] if several else [0.0, 0.8, 1.2])
            fields |= {"top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([-1, 20])}
            fields["stop"] = rng.choice([[], ["."], ["and", "the"]])
        kinds.append((prompt, SamplingParams(seed=seed, **fields)))
    return kinds


@contextmanager
def _engine(**kwargs: Any) -> Iterator[LLMEngine]:
    kwargs = {"dtype": "float32", "max_model_len": 512, "disable_log_stats": True} | kwargs
    args = EngineArgs(**kwargs)
    with LLMEngine.from_engine_args(args) as engine:
        yield engine


def _ids(output: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


def _answers(kinds: list[Kind]) -> list[list[list[int]]]:
    """What each kind gets when it is alone."""
    answers: list[list[list[int]]] = []
    with _engine() as engine:
        for prompt, params in kinds:
            engine.add_request("alone", prompt, params)
            while engine.has_unfinished_requests():
                last = engine.step()
            answers.append(_ids(last[0]))
    return answers


def _check(output: RequestOutput, kind: Kind, answer: list[list[int]]) -> str:
    """Compares a finished request with its answer; returns how it ended."""
    # Some sequences may have been complete when the others were ended.
    is_aborted = "abort" in {one.finish_reason for one in output.outputs}
    if not is_aborted and output.error is None:
        assert _ids(output) == answer, kind
        return "complete"
    reason = "abort" if is_aborted else "outgrown"
    assert (output.error is not None) == (reason == "outgrown")
    if not kind[1].is_ranked:  # of those it is open which would have been the best
        for found, whole in zip(_ids(output), answer, strict=True):
            assert found == whole[: len(found)], kind
    return reason


def _serve(
    engine: LLMEngine,
    rng: random.Random,
    kinds: list[Kind],
    answers: list[list[list[int]]],
    with_priorities: bool,
    duration_s: float,
) -> Counter[str]:
    """Adds and aborts at random for a while, then lets all that is left come to its end."""
    pending: dict[str, int] = {}
    ends: Counter[str] = Counter()
    number = 0
    deadline = time.monotonic() + duration_s
    while pending or time.monotonic() < deadline:
        if time.monotonic() < deadline and len(pending) < MAX_PENDING and rng.random() < 0.5:
            kind, number = rng.randrange(len(kinds)), number + 1
            priority = rng.randint(-3, 3) if with_priorities else 0
            engine.add_request(str(number), *kinds[kind], priority=priority)
            pending[str(number)] = kind
        if pending and rng.random() < 0.02:
            engine.abort_request(rng.choice(list(pending)))
        for output in engine.step():
            if output.finished:
                kind = pending.pop(output.request_id)
                ends[_check(output, kinds[kind], answers[kind])] += 1
    assert sum(ends.values()) == number
    assert engine.num_free_blocks == engine.num_total_blocks
    return ends


def _assert_acted(name: str, log: StepLog, ends: Counter[str]) -> None:
    """Each engine did what it is there for, a few times at least."""
    assert ends["complete"] > 20
    assert ends["abort"] > 0
    assert (ends["outgrown"] > 0) == (name == "outgrown")
    assert log.num_preemptions > 20
    if name != "recompute":
        assert log.num_swapped > 0
    if name not in ("swap", "outgrown"):
        assert log.num_recomputed > 0


def test_a_random_mix_ends_as_if_each_request_were_alone() -> None:
    rng = random.Random(0)
    kinds = _make_kinds(rng)
    answers = _answers(kinds)
    for name, own in ENGINES.items():
        tight = {"num_device_blocks_override": 40, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        with log_steps() as log, _engine(**tight | own) as engine:
            share_s = DURATION_S / len(ENGINES)
            with_priorities = "scheduling_policy" in own
            ends = _serve(engine, rng, kinds, answers, with_priorities, share_s)
        _assert_acted(name, log, ends)
