"""Random mixes of all features: no request is lost, doubled or changed."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.sequence import Request

from .loop import Limits, Loop, make_request, run_alone

KINDS = {
    "plain": {},
    "n": {"n": 3},
    "pair": {"n": 2},
    "best_of": {"n": 1, "best_of": 3},
    "beams": {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0},
    "early beams": {
        "n": 2,
        "use_beam_search": True,
        "temperature": 0.0,
        "early_stopping": True,
        "length_penalty": 0.5,
    },
}


@dataclass(frozen=True)
class Arrival:
    step: int
    family: int
    """Prompts of one family begin alike."""
    num_prompt_tokens: int
    max_tokens: int
    kind: str
    priority: int


@dataclass(frozen=True)
class Trace:
    limits: Limits
    arrivals: list[Arrival]
    ends: list[tuple[int, int, bool, bool]]
    """(step, which request, whether while the step is computed, whether it fails)"""


traces = st.builds(
    Trace,
    limits=st.builds(
        Limits,
        tokens=st.sampled_from([3, 7, 16, 40]),
        seqs=st.integers(3, 8),
        num_blocks=st.integers(6, 18),
        block_size=st.sampled_from([1, 2, 4]),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        chunked=st.booleans(),
        caching=st.booleans(),
        mode=st.sampled_from(["auto", "recompute", "swap", "swap"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.1]),
    ),
    arrivals=st.lists(
        st.builds(
            Arrival,
            step=st.integers(0, 12),
            family=st.integers(0, 1),
            num_prompt_tokens=st.integers(1, 16),
            max_tokens=st.integers(1, 20),
            kind=st.sampled_from(sorted(KINDS)),
            priority=st.integers(-2, 2),
        ),
        min_size=1,
        max_size=7,
    ),
    ends=st.lists(
        st.tuples(st.integers(0, 14), st.integers(0, 5), st.booleans(), st.booleans()), max_size=3
    ),
)


def prompt_of(arrival: Arrival, index: int) -> list[int]:
    """Two thirds are those of its family, so that full blocks are found again."""
    count = arrival.num_prompt_tokens
    own = count // 3
    shared = [3 + (17 * arrival.family + 5 * place) % 900 for place in range(count - own)]
    return shared + [3 + (31 * index + 7 * place) % 900 for place in range(own)]


def play(trace: Trace) -> tuple[Loop, list[Request]]:
    """Runs a trace to its end; the loop checks every step."""
    loop = Loop(replace(trace.limits, ahead=trace.limits.num_blocks % 2 == 0))
    arrivals = sorted(trace.arrivals, key=lambda arrival: arrival.step)
    requests: list[Request] = []

    def end(number: int, in_flight: bool) -> None:
        for step, which, wants_flight, fails in trace.ends:
            if step == number and wants_flight == in_flight:
                swapped = loop.scheduler._queues.swapped
                if which >= 3 and swapped:
                    loop.end(swapped[0], fails)
                elif which < len(requests):
                    loop.end(requests[which], fails)

    for number in range(16):
        while len(requests) < len(arrivals) and arrivals[len(requests)].step == number:
            arrival, index = arrivals[len(requests)], len(requests)
            params = SamplingParams(max_tokens=arrival.max_tokens, **KINDS[arrival.kind])
            request = make_request(index, prompt_of(arrival, index), params, arrival.priority)
            requests.append(loop.add(request))
        end(number, in_flight=False)
        loop.step(functools.partial(end, number, in_flight=True))
    loop.run()
    return loop, requests


def summary(output: RequestOutput) -> list[tuple[int, list[int], float | None, str | None]]:
    """What a user sees of the sequences."""
    return [(o.index, o.token_ids, o.cumulative_logprob, o.finish_reason) for o in output.outputs]


def check_ending(loop: Loop, request: Request) -> str:
    """It ended once, with the output that it has when it runs alone; returns how it ended."""
    output = loop.outputs[request.request_id]
    assert output.finished
    assert all(s.slot is None and s.status.finished for s in request.sequences)
    reasons = {s.status.finish_reason for s in request.sequences}
    alone = run_alone(request)
    if reasons <= {"stop", "length"}:
        assert output.error is None
        assert {o.finish_reason for o in output.outputs} <= {"stop", "length"}
        assert summary(output) == summary(alone)
        return "completed"
    assert (output.error is None) == ("abort" in reasons)
    if not request.sampling_params.is_ranked:
        for one, whole in zip(output.outputs, alone.outputs, strict=True):
            assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    (reason,) = reasons - {"stop", "length"}
    assert reason is not None
    return reason


@pytest.mark.timeout(600)
def test_random_groups() -> None:
    events: Counter[str] = Counter()

    @settings(
        max_examples=800,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trace=traces)
    def run(trace: Trace) -> None:
        loop, requests = play(trace)
        for request in requests:
            events[check_ending(loop, request)] += 1
        events.update(loop.events)

    run()
    # The random traces reach each of these events.
    wanted = ["forks", "beam forks", "copies", "swap outs", "swap ins", "hits", "evictions"]
    wanted += ["group recomputed", "group swapped", "single recomputed", "single swapped"]
    wanted += ["beams recomputed", "joined later", "completed", "ignored", "abort", "error"]
    wanted += ["ended WAITING", "ended RUNNING", "ended SWAPPED"]
    wanted += ["ahead", "ahead and kept"]
    assert {what: events[what] for what in wanted if events[what] < 5} == {}
