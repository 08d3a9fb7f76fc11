"""Lost workers, caches that shrink, and requests that may not run: no request is lost, doubled or
changed."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpengine.sequence import Request, Sequence, SequenceStatus

from .fake_engine import FakeEngine, add, engine_of, make_config, make_request, sizes, statuses
from .fake_worker import generate_undisturbed
from .test_random_traces import MAX_MODEL_LEN, check_ending


@dataclass(frozen=True)
class Disturbances:
    """By step: (how many blocks fewer the next worker has, whether a step is lost); the requests
    that may run (None: all); a request to abort, before the step or while it is computed."""

    losses: dict[int, tuple[int, bool]]
    restrictions: dict[int, frozenset[int] | None]
    aborts: dict[int, int]


NUM_STEPS = 24
steps = st.integers(0, NUM_STEPS - 1)
disturbances = st.builds(
    Disturbances,
    losses=st.dictionaries(
        steps, st.tuples(st.sampled_from([0, 0, 1, 3]), st.booleans()), min_size=1, max_size=5
    ),
    restrictions=st.dictionaries(
        steps, st.none() | st.frozensets(st.integers(0, 6), max_size=4), max_size=3
    ),
    aborts=st.dictionaries(steps, st.integers(0, 6), max_size=2),
)


def play(
    arrivals: list[tuple[int, int, int]],
    disturbances: Disturbances,
    chunked: bool,
    tokens: int,
    num_blocks: int,
) -> tuple[FakeEngine, list[Request]]:
    config = make_config(tokens, 4, MAX_MODEL_LEN, chunked, looks_ahead=num_blocks % 2 == 0)
    engine = FakeEngine(config, num_blocks, block_size=2)
    requests: list[Request] = []
    arrivals = sorted(arrivals)

    def abort(which: int) -> None:
        if which < len(requests):
            engine.abort(requests[which].request_id)

    for number in range(NUM_STEPS):
        while len(requests) < len(arrivals) and arrivals[len(requests)][0] <= number:
            _, num_prompt_tokens, max_tokens = arrivals[len(requests)]
            request = make_request(len(requests), num_prompt_tokens, max_tokens)
            requests.append(engine.add(request))
        if number in disturbances.restrictions:
            allowed = disturbances.restrictions[number]
            ids = None if allowed is None else frozenset(f"r{index}" for index in allowed)
            engine.restrict(ids)
        in_flight, lost_to = lambda: None, None
        if number in disturbances.aborts:
            which = disturbances.aborts[number]
            if which % 2:
                abort(which)
            else:
                in_flight = functools.partial(abort, which)
        if number in disturbances.losses:
            fewer, in_step = disturbances.losses[number]
            left = max(1, engine.blocks.num_total_blocks - fewer)
            if in_step:
                lost_to = left
            else:
                engine.lose(left)
        engine.step(in_flight, lost_to)
    engine.restrict(None)
    engine.run()
    return engine, requests


def test_random_losses() -> None:
    events: Counter[str] = Counter()

    @settings(
        max_examples=250,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        arrivals=st.lists(
            st.tuples(st.integers(0, 12), st.integers(1, 24), st.integers(1, 14)),
            min_size=1,
            max_size=7,
        ),
        disturbances=disturbances,
        chunked=st.booleans(),
        tokens=st.integers(1, 24),
        num_blocks=st.integers(6, 30),
    )
    def run(
        arrivals: list[tuple[int, int, int]],
        disturbances: Disturbances,
        chunked: bool,
        tokens: int,
        num_blocks: int,
    ) -> None:
        engine, requests = play(arrivals, disturbances, chunked, tokens, num_blocks)
        for request in requests:
            check_ending(engine, request)
        events.update(engine.events)

    run()
    # The random traces reach each of these events.
    wanted = ["losses", "lost steps", "lost prefills", "restrictions", "preempted", "chunks"]
    wanted += ["ahead and kept"]
    endings = [s for s in SequenceStatus if s.finished and s is not SequenceStatus.FINISHED_FAILED]
    wanted += [status.name for status in endings]
    assert {what: events[what] for what in wanted if events[what] < 20} == {}


def test_a_lost_step_has_not_happened() -> None:
    engine = engine_of(tokens=64)
    requests = add(engine, 10, 6, max_tokens=5)
    engine.step()
    before = [list(request.sequences[0].token_ids) for request in requests]
    engine.step(lost_to=40)
    assert [request.sequences[0].token_ids for request in requests] == before
    assert statuses(requests) == ["WAITING", "WAITING"]
    assert engine.scheduler.num_waiting == 2
    output = engine.step()
    assert sizes(output) == [11, 7]  # prompt and the token of the first step
    assert not output.step_input.freed_slots  # the new worker never heard of them
    engine.run()
    for request in requests:
        alone = generate_undisturbed(request.prompt_token_ids, request.seed, 5)
        assert request.sequences[0].output_token_ids == alone


def test_what_no_longer_fits_is_ignored_alone() -> None:
    engine = engine_of(num_blocks=20)
    long, short = add(engine, 30, 8, max_tokens=4)
    engine.step()
    engine.lose(num_blocks=5)
    engine.run()
    assert engine.endings == {
        long.request_id: SequenceStatus.FINISHED_IGNORED,
        short.request_id: SequenceStatus.FINISHED_LENGTH,
    }
    assert long.error is not None
    assert "which hold 20 tokens" in long.error


def test_only_those_that_are_allowed_run() -> None:
    engine = engine_of(tokens=64)
    first, second, third = add(engine, 6, 7, 8)
    engine.step()
    engine.restrict(frozenset({second.request_id}))
    assert statuses([first, second, third]) == ["WAITING", "RUNNING", "WAITING"]
    (late,) = add(engine, 5, first=3)
    assert engine.scheduler.num_waiting == 3
    output = engine.step()
    assert output.rows == second.sequences
    assert len(output.step_input.freed_slots) == 2
    engine.abort(third.request_id)
    engine.restrict(frozenset({late.request_id}))
    assert engine.step().rows == late.sequences
    engine.restrict(None)
    assert engine.step().rows == [*late.sequences, *first.sequences, *second.sequences]
    engine.run()
    assert engine.endings[first.request_id] is SequenceStatus.FINISHED_LENGTH


def test_a_fork_of_a_lost_step_is_forgotten() -> None:
    """Its request is then not treated as one that has a row in the step being scheduled."""
    engine = engine_of()
    request = make_request(0, 6)
    request.sequences.append(Sequence(5000, 1, list(request.prompt_token_ids), 6))
    engine.scheduler.add_request(request)
    assert engine.scheduler.schedule().forks
    queues = engine.scheduler._queues
    assert queues.is_forking(request)
    engine.lose(num_blocks=10)
    assert not queues.is_forking(request)
    assert statuses([request]) == ["WAITING", "WAITING"]
