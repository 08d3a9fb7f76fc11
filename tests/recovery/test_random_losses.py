"""Random requests and settings, with groups that are lost at any moment: every request ends as
without the losses, and no stream loses or repeats a token."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.engines import with_steps_in_flight
from support.patches import on_call
from support.random_runs import SAME_EXAMPLES
from support.step_log import log_steps

from tpengine import RequestOutputKind, SamplingParams
from tpengine.config import EngineConfig
from tpengine.engine import recovery
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import SequenceStatus

from .client import Answer, Job, open_client, serve, summary
from .conftest import MakeConfig
from .mortal import Fate

END_TOKEN_IDS = [199, 398, 597, 796]
"""The fake worker's candidates for beams are often multiples of 199."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3},
    "best_of": {"n": 1, "best_of": 3},
    "beams": {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0},
    "early beams": {"n": 2, "use_beam_search": True, "temperature": 0.0, "early_stopping": True},
}
ENGINES: dict[str, dict[str, Any]] = {
    "chunked, swap": {"preemption_mode": "swap", "max_num_batched_tokens": 24},
    "whole, recompute": {
        "preemption_mode": "recompute",
        "enable_chunked_prefill": False,
        "scheduling_policy": "priority",
    },
    "auto, no caching": {"enable_prefix_caching": False, "max_num_batched_tokens": 8},
}
MAX_STEP_KILLS = 3
"""A request that runs alone would fail after a fourth loss in a row at the same token."""


@dataclass(frozen=True)
class Arrival:
    call: int
    num_prompt_tokens: int
    max_tokens: int
    kind: str
    output_kind: RequestOutputKind
    priority: int


@dataclass(frozen=True)
class Trace:
    engine: str
    blocks: list[tuple[int, int]]
    arrivals: list[Arrival]
    kills: frozenset[int]
    idle_kills: frozenset[int]
    rebuilds: list[str]
    in_flight: int
    aborts: dict[int, int]


NUM_CALLS = 30
traces = st.builds(
    Trace,
    engine=st.sampled_from(sorted(ENGINES)),
    # Only the first group's cache must hold a sequence of the greatest length.
    blocks=st.builds(
        lambda first, others: [first, *others],
        st.tuples(st.sampled_from([8, 12, 16, 40]), st.sampled_from([0, 4, 30])),
        st.lists(st.tuples(st.sampled_from([3, 8, 12, 40]), st.sampled_from([0, 30])), max_size=2),
    ),
    arrivals=st.lists(
        st.builds(
            Arrival,
            call=st.integers(0, 20),
            num_prompt_tokens=st.integers(1, 24),
            max_tokens=st.integers(1, 24),
            kind=st.sampled_from([*KINDS, "plain"]),
            output_kind=st.sampled_from(RequestOutputKind),
            priority=st.integers(-1, 1),
        ),
        min_size=1,
        max_size=7,
    ),
    kills=st.frozensets(st.integers(1, 24), min_size=1, max_size=MAX_STEP_KILLS),
    idle_kills=st.frozensets(st.integers(0, NUM_CALLS), max_size=3),
    rebuilds=st.lists(st.sampled_from(["rebuild", "cache", ""]), max_size=4),
    in_flight=st.sampled_from([1, 1, 2, 4]),
    aborts=st.dictionaries(st.integers(0, 15), st.integers(0, 4), max_size=3),
)


def job_of(arrival: Arrival, number: int, policy: str) -> Job:
    """Prompts of even numbers, and those of odd ones, share a beginning for the prefix cache."""
    count = arrival.num_prompt_tokens
    shared = [3 + (17 * (number % 2) + 5 * place) % 900 for place in range(count - count // 3)]
    own = [3 + (31 * number + 7 * place) % 900 for place in range(count // 3)]
    params = SamplingParams(
        max_tokens=arrival.max_tokens,
        stop_token_ids=END_TOKEN_IDS,
        seed=number,
        output_kind=arrival.output_kind,
        **KINDS[arrival.kind],
    )
    return Job(shared + own, params, arrival.priority if policy == "priority" else 0)


def play(trace: Trace, config: EngineConfig, events: Counter[str], keeps_memory: bool) -> None:
    config = with_steps_in_flight(config, trace.in_flight)
    fate = Fate(trace.kills, deque(trace.rebuilds), trace.blocks, keeps_memory=keeps_memory)
    client = open_client(config, [], fate)
    engine, executor = client.engine, client.executor
    arrivals = sorted(trace.arrivals, key=lambda arrival: arrival.call)
    jobs = [job_of(a, i, config.scheduler.policy) for i, a in enumerate(arrivals)]
    is_recovering = False
    for call in range(NUM_CALLS):
        is_recovering = engine.health().state.value == "recovering"
        number = len(client.answers)
        while number < len(jobs) and arrivals[number].call <= call:
            client.add(str(number), jobs[number])
            number += 1
            events["added in a recovery"] += is_recovering
        if trace.aborts.get(call, number) < number:
            engine.abort_request(str(trace.aborts[call]))
            events["aborted in a recovery"] += is_recovering
        if call in trace.idle_kills and executor.loss is None:
            executor.lose()
        client.step()
    with engine:
        answers = client.run()
        client.recover()
    undisturbed = serve(config, jobs, Fate(blocks=[(100, 0)])).answers
    for number, job in enumerate(jobs):
        reason = compare(answers[str(number)], undisturbed[str(number)], job)
        events[f"{arrivals[number].kind} {reason}"] += 1
        events[reason] += 1
    events.update(loss.phase for loss in executor.losses)
    events["shrunk"] += any(r.num_blocks[1] < r.num_blocks[0] for r in engine.recoveries)
    events["resumed"] += sum(record.is_resumed for record in engine.recoveries)
    attempts = sum(record.num_attempts for record in engine.recoveries)
    assert attempts == len(executor.losses) == executor.epoch - 1


def compare(answer: Answer, undisturbed: Answer, job: Job) -> str:
    """Returns how it ended."""
    completed = "completed" if answer.error is None else "outgrown"
    (reason,) = {r for r in answer.reasons if r in ("abort", "error")} or {completed}
    assert reason != "error"
    assert (answer.error is not None) == (reason == "outgrown")
    if reason == "completed":
        assert summary(answer) == summary(undisturbed)
    elif not job.params.is_ranked:
        for index, completion in answer.outputs.items():
            whole = undisturbed.outputs[index].token_ids
            assert completion.token_ids == whole[: len(completion.token_ids)]
    return str(reason)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("keeps_memory", [False, True])
def test_random_losses(
    fake_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, keeps_memory: bool
) -> None:
    events: Counter[str] = Counter()
    configs = {k: fake_config(max_num_seqs=6, max_model_len=64, **v) for k, v in ENGINES.items()}

    def count(scheduler: Scheduler, *_: Any) -> None:
        events["ahead when lost"] += len(scheduler.unanswered) > 1
        for request in scheduler.unfinished_requests():
            statuses = {s.status for s in request.unfinished_sequences}
            events["swapped when lost"] += SequenceStatus.SWAPPED in statuses
            begun = any(s.num_output_tokens for s in request.sequences)
            running = SequenceStatus.RUNNING in statuses
            events["prefilling when lost"] += running and not begun
            events["decoding when lost"] += running and begun

    monkeypatch.setattr(recovery, "pause_s", lambda _: 0.0)
    on_call(monkeypatch, Scheduler, "restart", count)

    # Shrinking a failure takes too long.
    @settings(SAME_EXAMPLES, max_examples=60 if keeps_memory else 140, phases=[Phase.generate])
    @given(trace=traces)
    def run(trace: Trace) -> None:
        play(trace, configs[trace.engine], events, keeps_memory)

    with log_steps() as log:
        run()
    events["preempted"] = log.num_preemptions
    # The traces reach the cases that this test is for.
    wanted = ["execute_model", "idle", "rebuild", "cache", "shrunk", "preempted"]
    wanted += ["swapped when lost", "prefilling when lost", "decoding when lost"]
    wanted += ["ahead when lost", "added in a recovery", "aborted in a recovery"]
    wanted += ["abort", "outgrown"]
    if keeps_memory:
        wanted = ["resumed", "preempted", "abort", "outgrown", "idle"]
    wanted += [f"{kind} completed" for kind in KINDS]
    assert {what: events[what] for what in wanted if events[what] < 3} == {}, events
