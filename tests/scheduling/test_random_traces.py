"""Random arrivals, lengths, aborts and tiny caches: no request is lost, doubled or changed."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpengine.scheduling import AllocStatus
from tpengine.sequence import Request, SequenceStatus

from .fake_engine import STOP_EVERY, FakeEngine, make_config, make_request
from .fake_worker import generate_undisturbed

MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Trace:
    chunked: bool
    ahead: bool
    tokens: int
    seqs: int
    num_blocks: int
    block_size: int
    watermark: float
    requests: list[tuple[int, int, int]]
    """(step of arrival, prompt tokens, max_tokens)"""
    aborts: list[tuple[int, int, bool]]
    """(step, which request, whether while the step is computed)"""


traces = st.builds(
    Trace,
    chunked=st.booleans(),
    ahead=st.booleans(),
    tokens=st.integers(1, 24),
    seqs=st.integers(1, 5),
    num_blocks=st.integers(1, 14),
    block_size=st.integers(1, 4),
    watermark=st.sampled_from([0.0, 0.01, 0.2]),
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 24), st.integers(1, 14)),
        min_size=1,
        max_size=9,
    ),
    aborts=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 5), st.booleans()), max_size=5),
)


def play(trace: Trace) -> tuple[FakeEngine, list[Request]]:
    """Runs a trace to its end; the engine checks every step."""
    config = make_config(trace.tokens, trace.seqs, MAX_MODEL_LEN, trace.chunked, trace.ahead)
    engine = FakeEngine(config, trace.num_blocks, trace.block_size, trace.watermark)
    arrivals = sorted(trace.requests)
    requests: list[Request] = []
    last_event = max([arrivals[-1][0], *(step for step, _, _ in trace.aborts)])

    def abort(number: int, in_flight: bool) -> None:
        for step, which, wants_flight in trace.aborts:
            if step == number and wants_flight == in_flight and which < len(requests):
                was = {s.status for s in requests[which].sequences}
                engine.abort(requests[which].request_id)
                if not any(status.finished for status in was):
                    kind = "in flight" if in_flight else was.pop().name
                    engine.events[f"abort {kind}"] += 1

    for number in range(last_event + 1):
        while len(requests) < len(arrivals) and arrivals[len(requests)][0] == number:
            _, num_prompt_tokens, max_tokens = arrivals[len(requests)]
            request = make_request(len(requests), num_prompt_tokens, max_tokens)
            requests.append(engine.add(request))
        abort(number, in_flight=False)
        engine.step(functools.partial(abort, number, in_flight=True))
    engine.run()
    return engine, requests


def check_ending(engine: FakeEngine, request: Request) -> None:
    """It ended once, and generated what it generates when it runs alone."""
    ending = engine.endings[request.request_id]
    (sequence,) = request.sequences
    assert sequence.status is ending
    assert sequence.slot is None
    assert request.metrics.num_preemptions == engine.preemptions[request.request_id]
    max_tokens = request.sampling_params.max_tokens
    assert max_tokens is not None
    alone = generate_undisturbed(request.prompt_token_ids, request.seed, max_tokens)
    stop = next((i + 1 for i, t in enumerate(alone) if t % STOP_EVERY == 0), None)
    output = sequence.output_token_ids
    assert output == alone[: len(output)]
    if ending is SequenceStatus.FINISHED_STOPPED:
        assert len(output) == stop
    elif ending is SequenceStatus.FINISHED_LENGTH:
        assert len(output) == max_tokens
        assert stop is None or stop == max_tokens
    else:
        assert (request.error is None) == (ending is SequenceStatus.FINISHED_ABORTED)
    if ending is SequenceStatus.FINISHED_IGNORED and engine.config.enable_chunked_prefill:
        # Nothing but the cache can have been too small.
        assert engine.blocks.num_blocks_for(sequence.num_tokens) > engine.blocks.num_total_blocks


def test_random_traces() -> None:
    events: Counter[str] = Counter()

    @settings(
        max_examples=1000,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trace=traces)
    def run(trace: Trace) -> None:
        engine, requests = play(trace)
        for request in requests:
            check_ending(engine, request)
        events.update(engine.events)
        events.update({answer.name: n for answer, n in engine.blocks.answers.items()})
        events["resumed"] += sum(
            engine.endings[request_id]
            in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
            for request_id in engine.preemptions
        )

    run()
    # The random traces reach each of these events.
    wanted = ["preempted", "resumed", "chunks", "whole steps", "ahead", "ahead and kept"]
    wanted += ["abort WAITING", "abort RUNNING", "abort in flight"]
    wanted += [answer.name for answer in AllocStatus]
    endings = [s for s in SequenceStatus if s.finished and s is not SequenceStatus.FINISHED_FAILED]
    wanted += [status.name for status in endings]
    assert {what: events[what] for what in wanted if events[what] < 20} == {}
