"""Lost workers, caches that shrink, and requests that may not run; random ones are in
`test_random_traces`."""

from __future__ import annotations

from .fake_worker import generate_undisturbed
from .loop import Limits, Loop, sizes, statuses


def test_a_lost_step_has_not_happened() -> None:
    loop = Loop()
    requests = loop.add_plain(10, 6, max_tokens=5)
    loop.step()
    before = [list(request.sequences[0].token_ids) for request in requests]
    loop.step(lost_to=40)
    assert [request.sequences[0].token_ids for request in requests] == before
    assert statuses(*requests) == ["WAITING", "WAITING"]
    assert loop.scheduler.num_waiting == 2
    output = loop.step()
    assert sizes(output) == [11, 7]  # prompt and the token of the first step
    assert not output.step_input.freed_slots  # the new worker never heard of them
    loop.run()
    for request in requests:
        alone = generate_undisturbed(request.prompt_token_ids, request.seed, 5)
        assert request.sequences[0].output_token_ids == alone


def test_what_no_longer_fits_is_ignored_alone() -> None:
    loop = Loop(Limits(num_blocks=20))
    long, short = loop.add_plain(30, 8, max_tokens=4)
    loop.step()
    loop.lose(num_blocks=5)
    loop.run()
    assert statuses(long, short) == ["FINISHED_IGNORED", "FINISHED_LENGTH"]
    assert "which hold 20 tokens" in str(long.error)


def test_only_those_that_are_allowed_run() -> None:
    loop = Loop()
    first, second, third = loop.add_plain(6, 7, 8)
    loop.step()
    loop.restrict([second.request_id])
    assert statuses(first, second, third) == ["WAITING", "RUNNING", "WAITING"]
    (late,) = loop.add_plain(5, first=3)
    assert loop.scheduler.num_waiting == 3
    output = loop.step()
    assert output.rows == second.sequences
    assert len(output.step_input.freed_slots) == 2
    loop.end(third)
    loop.restrict([late.request_id])
    assert loop.step().rows == late.sequences
    loop.restrict(None)
    assert loop.step().rows == [*late.sequences, *first.sequences, *second.sequences]
    loop.run()
    assert loop.endings[first.request_id] == "length"
