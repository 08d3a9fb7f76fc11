"""Requests with adapters: how many run at once, who waits for a slot, and who passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tpengine.messages import StepInput, StepOutput

from .loop import Limits, Loop, make_request, plain

LIMITS = Limits(tokens=64, seqs=8, num_blocks=200, caching=True, max_loras=2)


def arrivals(loop: Loop, *adapters: int, first: int = 0, max_tokens: int = 4) -> None:
    """Adds a request with each of these adapters, 0: none."""
    for index, adapter in enumerate(adapters, start=first):
        loop.add(make_request(index, 5, plain(max_tokens), adapter=adapter))


def fail_to_load(loop: Loop, fails: Callable[[StepInput], bool]) -> Callable[..., StepOutput]:
    """Adapter 1 cannot be loaded in such steps; returns what computed them before."""
    compute = loop.worker.compute

    def failing(step: StepInput) -> StepOutput:
        answer = compute(step)
        if fails(step):
            answer.load_results = {b"adapter1": "it is gone"}
        return answer

    loop.worker.compute = failing
    return compute


def running(loop: Loop) -> list[str]:
    """Ids of the requests that run, in order of arrival."""
    return sorted({f"r{s.seq_id // 100}" for s in loop.scheduler.running_sequences()})


def test_a_request_waits_for_a_slot_and_others_pass() -> None:
    """Two slots: the third adapter waits until one of the first two is idle."""
    loop = Loop(LIMITS)
    arrivals(loop, 1, 2, 3, 1, 0, 2, 3)
    step = loop.step().step_input
    assert running(loop) == ["r0", "r1", "r3", "r4", "r5"]
    assert [(a.slot, a.path) for a in step.adapter_loads] == [(0, "/adapter1"), (1, "/adapter2")]
    assert [new.adapter_slot for new in step.new_sequences] == [0, 1, 0, None, 1]
    while not loop.endings:
        assert not loop.step().step_input.adapter_loads[2:]
    step = loop.step().step_input
    assert running(loop) == ["r2", "r6"]
    assert [(load.slot, load.key) for load in step.adapter_loads] == [(0, b"adapter3")]
    loop.run()
    assert set(loop.endings.values()) == {"length"}


def test_the_least_recently_used_adapter_gives_way() -> None:
    loop = Loop(LIMITS)
    loads = []
    for index, adapter in enumerate((1, 2, 1, 3, 1, 2)):
        arrivals(loop, adapter, first=index)
        loads.append([load.key for load in loop.step().step_input.adapter_loads])
        loop.run()
    assert loads == [[b"adapter1"], [b"adapter2"], [], [b"adapter3"], [], [b"adapter2"]]


def test_a_new_worker_gets_all_adapters_again() -> None:
    loop = Loop(LIMITS)
    arrivals(loop, 1, 2, 0)
    loop.step()
    loop.lose(150)
    assert sorted(a.key for a in loop.step().step_input.adapter_loads) == [b"adapter1", b"adapter2"]
    loop.run()
    arrivals(loop, 2, first=3)
    assert not loop.step().step_input.adapter_loads


def test_an_adapter_that_cannot_be_loaded_ends_its_requests() -> None:
    """They leave nothing in the prefix cache, and the next request tries again."""
    loop = Loop(LIMITS)
    compute = fail_to_load(loop, lambda step: b"adapter1" in [a.key for a in step.adapter_loads])
    arrivals(loop, 1, 2, 1, 0)
    loop.step()
    assert loop.endings == {"r0": "error", "r2": "error"}
    assert loop.outputs["r0"].error == "it is gone"
    loop.worker.compute = compute
    arrivals(loop, 1, first=4)
    assert [load.key for load in loop.step().step_input.adapter_loads] == [b"adapter1"]
    loop.run()
    assert loop.endings["r4"] == loop.endings["r1"] == "length"
    assert loop.outputs["r4"].num_cached_tokens == 0


def test_a_load_that_fails_after_its_slot_was_given_away() -> None:
    """The answer comes when another adapter has the slot, or the same one is loaded again."""
    loop = Loop(replace(LIMITS, max_loras=1, in_flight=3))
    fail_to_load(loop, lambda step: step.step == 1)
    arrivals(loop, 1)
    loop._plan()
    loop.end(loop.scheduler.get_request("r0"))
    arrivals(loop, 2, first=1)
    loop._plan()
    loop.end(loop.scheduler.get_request("r1"))
    arrivals(loop, 1, first=2)
    loop.run()
    assert loop.endings == {"r0": "abort", "r1": "abort", "r2": "error"}
    arrivals(loop, 2, 1, first=3)
    loop.run()
    assert loop.endings["r3"] == loop.endings["r4"] == "length"


def test_a_request_without_a_row_ends_with_the_adapter_that_cannot_be_loaded() -> None:
    """Beams that come back from the host may have none in the step that loads their adapter."""
    loop = Loop(replace(LIMITS, tokens=3))
    beams = plain(8, n=3, use_beam_search=True, temperature=0.0)
    loop.add(make_request(0, 3, plain(40)))
    loop.add(make_request(1, 2, beams, adapter=1))
    while len(running(loop)) < 2 or len(loop.step().rows) > 1:
        loop.step()
    compute = fail_to_load(loop, lambda step: True)
    assert [row.seq_id for row in loop.step().rows] == [0]
    assert loop.endings == {"r1": "error"}
    loop.worker.compute = compute
    loop.run()
    assert loop.endings["r0"] == "length"
