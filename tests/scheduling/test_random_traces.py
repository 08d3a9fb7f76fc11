"""Random mixes of all features, aborts, tiny caches and lost workers: no request is lost, doubled
or changed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_runs import SAME_EXAMPLES

from tpengine.inputs import NO_OWNER, Owner
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.block_manager import AllocStatus
from tpengine.scheduling.fairness import OwnerStats
from tpengine.scheduling.sequence import Request

from .fake_worker import generate_undisturbed
from .loop import END_TOKEN_IDS, Limits, Loop, make_request, run_alone, statuses

KINDS: dict[str, dict[str, Any]] = {
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
MAX_MODEL_LEN = 40
NUM_STEPS = 20
"""After so many, nothing comes from outside."""


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
    """
    Attributes:
        ends: (step, which request, whether while the step is computed, whether it fails)
        losses: by step: how many blocks fewer the next worker has, and whether the step is lost.
        restrictions: by step, the requests that may run; None: all.
    """

    limits: Limits
    arrivals: list[Arrival]
    ends: list[tuple[int, int, bool, bool]]
    losses: dict[int, tuple[int, bool]] = field(default_factory=dict)
    restrictions: dict[int, frozenset[int] | None] = field(default_factory=dict)


def limits_of(stages: int, in_flight: int, **fields: Any) -> Limits:
    """With stages, as many steps in flight as an engine has: 1, the stages, or one more."""
    if stages > 1 and in_flight > 1:
        in_flight = stages + in_flight % 2
    return Limits(stages=stages, in_flight=in_flight, **fields)


def traces(groups: bool, disturbed: bool) -> st.SearchStrategy[Trace]:
    """Traces of requests of one sequence, or of all kinds with all that `Limits` offers."""
    least = 3 if groups else 1  # the widest group has three sequences
    steps = st.integers(0, NUM_STEPS - 1)
    limits: dict[str, st.SearchStrategy[Any]] = {
        "tokens": st.integers(least, 24),
        "seqs": st.integers(least, 8),
        "num_blocks": st.integers(8, 24) if groups else st.integers(1, 20),
        "block_size": st.integers(1, 4),
        "chunked": st.booleans(),
        "in_flight": st.sampled_from([1, 1, 2, 3, 4]),
        "stages": st.sampled_from([1, 1, 2, 3]),
        "watermark": st.sampled_from([0.0, 0.01, 0.1, 0.2]),
        "window": st.sampled_from([None, None, 2, 6, 11]),
        "drafts": st.sampled_from([0, 0, 1, 3, 7]),
        "foretold": st.booleans(),
        "model_len": st.just(MAX_MODEL_LEN),
    }
    if groups:
        limits |= {
            "num_host_blocks": st.sampled_from([0, 3, 30, 30]),
            "caching": st.booleans(),
            "mode": st.sampled_from(["auto", "recompute", "swap", "swap"]),
            "policy": st.sampled_from(["fcfs", "priority"]),
        }
    trace: dict[str, st.SearchStrategy[Any]] = {
        "limits": st.builds(limits_of, **limits),
        "arrivals": st.lists(
            st.builds(
                Arrival,
                step=st.integers(0, 12),
                family=st.integers(0, 1),
                num_prompt_tokens=st.integers(1, 16 if groups else 24),
                max_tokens=st.integers(1, 16),
                kind=st.sampled_from(sorted(KINDS) if groups else ["plain"]),
                priority=st.integers(-2, 2),
            ),
            min_size=1,
            max_size=7,
        ),
        "ends": st.lists(
            st.tuples(st.integers(0, 14), st.integers(0, 5), st.booleans(), st.booleans()),
            max_size=4,
        ),
    }
    if disturbed:
        fewer = st.sampled_from([0, 0, 1, 3])
        trace |= {
            "losses": st.dictionaries(
                steps, st.tuples(fewer, st.booleans()), min_size=1, max_size=5
            ),
            "restrictions": st.dictionaries(
                steps, st.none() | st.frozensets(st.integers(0, 6), max_size=4), max_size=3
            ),
        }
    return st.builds(Trace, **trace)


def prompt_of(arrival: Arrival, index: int) -> list[int]:
    """Two thirds are those of its family, so that full blocks are found again."""
    count = arrival.num_prompt_tokens
    own = count // 3
    shared = [3 + (17 * arrival.family + 5 * place) % 900 for place in range(count - own)]
    return shared + [3 + (31 * index + 7 * place) % 900 for place in range(own)]


def play(
    trace: Trace,
    adapters: Sequence[int] = (),
    owners: Sequence[Owner] = (),
    pictures: Sequence[str] = (),
    encoders: Sequence[int] = (),
) -> tuple[Loop, list[Request]]:
    """Runs a trace to its end; the loop checks every step.

    Args:
        adapters: of each request, 0: none; empty: no request has one.
        owners: of each request; empty: no request has one.
        pictures: of each request, see `make_request`; empty: no request has any.
        encoders: tokens of each encoder prompt, at most as many as fit beside a token of its own.
    """
    loop = Loop(trace.limits)
    arrivals = sorted(trace.arrivals, key=lambda arrival: arrival.step)
    requests: list[Request] = []

    def end(number: int, in_flight: bool) -> None:
        for step, which, wants_flight, fails in trace.ends:
            if step == number and wants_flight == in_flight:
                swapped = [r for r in requests if "SWAPPED" in statuses(r)]
                if which >= 2 and swapped:
                    which = requests.index(swapped[0])
                if which < len(requests):
                    loop.events["ended in flight"] += in_flight and not requests[which].finished
                    loop.end(requests[which], fails)

    for number in range(NUM_STEPS):
        while len(requests) < len(arrivals) and arrivals[len(requests)].step == number:
            arrival, index = arrivals[len(requests)], len(requests)
            params = SamplingParams(max_tokens=arrival.max_tokens, **KINDS[arrival.kind])
            prompt, adapter = prompt_of(arrival, index), adapters[index] if adapters else 0
            owner = owners[index] if owners else NO_OWNER
            letters = pictures[index] if pictures else ""
            num_read = min(encoders[index], trace.limits.tokens - 1) if encoders else 0
            others = arrival.priority, adapter, owner, letters, num_read
            request = make_request(index, prompt, params, *others)
            requests.append(loop.add(request))
        if number in trace.restrictions:
            allowed = trace.restrictions[number]
            loop.restrict(None if allowed is None else [f"r{index}" for index in allowed])
        end(number, in_flight=False)
        lost_to = None
        if number in trace.losses:
            fewer, is_in_step = trace.losses[number]
            left = max(1, loop.blocks.num_total_blocks - fewer)
            if is_in_step:
                lost_to = left
            else:
                loop.lose(left)
        loop.step(functools.partial(end, number, in_flight=True), lost_to)
    if trace.restrictions:
        loop.restrict(None)
    loop.run()
    return loop, requests


Summary = list[tuple[int, tuple[int, ...], float | None, str | None]]


def summary(output: RequestOutput) -> Summary:
    """What a user sees of the sequences; of one alone without its probability."""
    several = len(output.outputs) > 1
    return [
        (o.index, o.token_ids, o.cumulative_logprob if several else None, o.finish_reason)
        for o in output.outputs
    ]


def undisturbed(request: Request) -> Summary:
    """What a user sees of a request that runs alone; without an engine if it has one sequence."""
    params = request.sampling_params
    if params.num_sequences > 1:
        return summary(run_alone(request))
    asked = request.prompt_token_ids, request.seed, params.max_tokens
    ids = tuple(generate_undisturbed(*asked, adapter=request.adapter))
    end = next((place for place, token in enumerate(ids) if token in END_TOKEN_IDS), None)
    return [(0, ids, None, "length")] if end is None else [(0, ids[: end + 1], None, "stop")]


def check_ending(loop: Loop, request: Request) -> str:
    """It ended once, with the output that it has when it runs alone; returns how it ended."""
    output = loop.outputs[request.request_id]
    assert output.finished
    assert all(s.slot is None and s.status.finished for s in request.sequences)
    assert request.metrics.num_preemptions == loop.preemptions[request.request_id]
    reasons = {
        "ignored" if s.status.name == "FINISHED_IGNORED" else s.status.finish_reason
        for s in request.sequences
    }
    alone = undisturbed(request)
    if reasons <= {"stop", "length"}:
        assert output.error is None
        assert summary(output) == alone
        assert output.outputs[0].finish_reason in ("stop", "length")
        return "completed"
    assert (output.error is None) == ("abort" in reasons)
    if not request.sampling_params.is_ranked:
        for completion, (_, whole, _, _) in zip(output.outputs, alone, strict=True):
            assert completion.token_ids == whole[: len(completion.token_ids)]
    (reason,) = reasons - {"stop", "length"}
    assert reason is not None
    if reason == "ignored" and loop.limits.chunked and len(request.sequences) == 1:
        # Nothing but the cache can have been too small.
        num_blocks = loop.blocks.num_blocks_for(request.sequences[0].num_tokens)
        num_blocks += loop.blocks.cross.num_needed(request)
        assert num_blocks > loop.blocks.num_total_blocks
    return reason


COMMON = [
    *("completed", "ignored", "abort", "error", "preempted and completed"),
    *("chunks", "ahead", "ended WAITING", "ended RUNNING", "ended in flight"),
    *("given back", "drafts accepted", "drafts rejected", "guesses accepted"),
]
OF_SINGLES = [
    *(answer.name for answer in AllocStatus),
    *("stop", "length", "single recomputed", "whole steps"),
]
OF_GROUPS = [
    *("forks", "beam forks", "copies", "swap outs", "swap ins", "hits", "evictions"),
    *("group recomputed", "group swapped", "single recomputed", "single swapped"),
    *("beams recomputed", "joined later", "ended SWAPPED"),
]
OF_LOSSES = ["losses", "lost steps", "lost ahead", "lost prefills", "restrictions"]
OF_ADAPTERS = ["completed", "with adapter", "adapter loads", "passed", "hits", "swap ins"]
OF_PICTURES = [
    *("completed", "error", "picture loads", "pictures dropped", "turns of the tower", "swap ins"),
    *("preempted and completed", "hits", "lost steps", "drafts accepted"),
]
OF_ENCODERS = [
    *("completed", "ignored", "encoder tokens", "forks", "beam forks", "swap ins", "copies"),
    *("group recomputed", "single recomputed", "joined later", "lost steps"),
]
OF_ENCODERS_AND_OWNERS = [
    *("completed", "encoder tokens", "charged once", "took room", "swap ins", "lost steps"),
    "group recomputed",
]
OF_OWNERS = ["completed", "took room", "swap ins", "hits", "group recomputed", "lost steps"]


def limited(trace: Trace, **limits: Any) -> Trace:
    return replace(trace, limits=replace(trace.limits, **limits))


def limited_pictures(trace: Trace, num_rows: int, most: int, are_whole: bool) -> Trace:
    limits: dict[str, Any] = {"picture_rows": num_rows, "most_awaited_rows": most}
    limits |= {"whole_pictures": are_whole, "model_len": MAX_MODEL_LEN + 10}
    if are_whole:  # the largest one fits beside a row of each other sequence
        limits["tokens"] = max(trace.limits.tokens, trace.limits.seqs + 5)
    return limited(trace, **limits)


DISTURBED = traces(True, True)
PICTURES = st.lists(st.sampled_from(["", "a", "b", "c", "ab", "aba", "cb", "f"]), min_size=7)
PICTURE_LIMITS = st.sampled_from([5, 6, 8, 20]), st.sampled_from([1, 6, 100]), st.booleans()
NO_FIELDS: st.SearchStrategy[dict[str, Any]] = st.just({})
ADAPTERS = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=7, max_size=7)
ENCODERS = st.lists(st.sampled_from([0, 1, 4, 5, 9]), min_size=7, max_size=7)
OWNER = st.builds(Owner, account=st.sampled_from("abc"), weight=st.sampled_from([0.5, 1, 3]))
OWNERS = st.lists(OWNER, min_size=7, max_size=7)
MIXES = {
    # name: traces, arguments of `play`, examples, events that are reached
    "singles": (traces(False, False), NO_FIELDS, 1000, [*COMMON, *OF_SINGLES]),
    "groups": (traces(True, False), NO_FIELDS, 1800, [*COMMON, *OF_GROUPS]),
    "lost singles": (traces(False, True), NO_FIELDS, 250, [*COMMON, *OF_LOSSES]),
    "lost groups": (DISTURBED, NO_FIELDS, 200, [*COMMON, *OF_LOSSES, "lost forks", "swap ins"]),
    "adapters": (
        st.builds(lambda trace, n: limited(trace, max_loras=n), DISTURBED, st.sampled_from([1, 2])),
        st.fixed_dictionaries({"adapters": ADAPTERS}),
        250,
        OF_ADAPTERS,
    ),
    "pictures": (
        st.builds(limited_pictures, DISTURBED, *PICTURE_LIMITS),
        st.fixed_dictionaries({"pictures": PICTURES}),
        400,
        OF_PICTURES,
    ),
    "encoders": (
        DISTURBED.map(lambda trace: limited(trace, caching=False, drafts=0, stages=1)),
        st.fixed_dictionaries({"encoders": ENCODERS}),
        400,
        OF_ENCODERS,
    ),
    "owners": (
        DISTURBED.map(lambda trace: limited(trace, chunked=True, fairness="owner")),
        st.fixed_dictionaries({"owners": OWNERS}),
        200,
        OF_OWNERS,
    ),
    "encoders of owners": (
        DISTURBED.map(
            lambda trace: limited(
                trace, caching=False, drafts=0, stages=1, chunked=True, fairness="owner"
            )
        ),
        st.fixed_dictionaries({"encoders": ENCODERS, "owners": OWNERS}),
        400,
        OF_ENCODERS_AND_OWNERS,
    ),
}


def check_charges(loop: Loop, requests: Sequence[Request]) -> int:
    """Owners whose requests have one sequence each, and were completed, have paid once for each
    token of both prompts and of the outputs; returns how many owners these are."""
    num_checked = 0
    for account, counted in loop.policy.stats().items():
        own = [request for request in requests if request.owner.account == account]
        alone = [r for r in own if r.sampling_params.num_sequences == 1 and r.error is None]
        outputs = [loop.outputs[request.request_id].outputs[0] for request in alone]
        if len(alone) == len(own) and {o.finish_reason for o in outputs} <= {"stop", "length"}:
            num_tokens = sum(request.num_prompt_tokens for request in own)
            num_tokens += sum(len(output.token_ids) for output in outputs)
            assert counted == OwnerStats(0, 0, num_tokens)
            num_checked += 1
    return num_checked


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.soak)])
def test_random_traces(name: str, share: int) -> None:
    """All requests end as they would alone. All examples, of which one in `share` is run, reach
    each event that they are for."""
    mix, fields, max_examples, wanted = MIXES[name]
    events: Counter[str] = Counter()

    @settings(SAME_EXAMPLES, max_examples=max_examples // share)
    @given(trace=mix, arguments=fields)
    def run(trace: Trace, arguments: dict[str, Any]) -> None:
        loop, requests = play(trace, **arguments)
        for request in requests:
            how = check_ending(loop, request)
            events[how] += 1
            if how == "completed":
                events["with adapter"] += request.adapter is not None
                events["preempted and completed"] += request.request_id in loop.preemptions
                events[loop.outputs[request.request_id].outputs[0].finish_reason or ""] += 1
        events.update(loop.events)
        if name == "encoders of owners":
            events["charged once"] += check_charges(loop, requests)

    run()
    assert share > 1 or {what: events[what] for what in wanted if events[what] < 5} == {}
