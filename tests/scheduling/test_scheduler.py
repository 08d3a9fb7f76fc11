"""The scheduler's decisions, one test each. The loop also checks every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.errors import EngineError
from tpengine.inputs import Owner
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.step import StepDecisions

from .loop import END_TOKEN_IDS, Limits, Loop, make_request, plain, sizes, statuses


def test_worked_example() -> None:
    """300 prompts of 27, 30, 24, ... tokens (27 on average): 75 of them are 2025 of 2048 tokens."""
    loop = Loop(Limits(tokens=2048, seqs=256, chunked=False, num_blocks=10_000, block_size=16))
    loop.add_plain(*[27, 30, 24] * 100)
    admitted, waiting = [], []
    for _ in range(4):
        output = loop.step()
        admitted.append(len(output.rows))
        waiting.append(loop.scheduler.num_waiting)
        assert output.sampled == output.rows
        assert output.num_prefill_tokens == sum(sizes(output))
    assert admitted == [75, 75, 75, 31]
    assert waiting == [225, 150, 75, 44]
    for _ in range(3):
        output = loop.step()
        assert sizes(output) == [1] * 256
        assert output.num_prefill_tokens == 0
    loop.run()
    assert set(loop.endings.values()) == {"length"}
    assert len(loop.endings) == 300


def test_chunks_fill_the_budget_after_the_decodes() -> None:
    loop = Loop(Limits(tokens=10))
    first, second, third = loop.add_plain(7, 17, 2)
    output = loop.step()
    assert (sizes(output), output.sampled) == ([1, 7, 2], first.sequences)
    assert output.num_prefill_tokens == 10
    output = loop.step()
    assert sizes(output) == [1, 1, 8]
    assert output.sampled == [*first.sequences, *third.sequences]
    assert output.num_prefill_tokens == 9
    output = loop.step()
    assert sizes(output) == [1, 1, 7]
    assert output.rows == [*first.sequences, *third.sequences, *second.sequences]
    assert output.sampled == output.rows
    assert output.num_prefill_tokens == 7
    assert sizes(loop.step()) == [1, 1, 1]


def test_more_running_than_budget_serves_the_oldest() -> None:
    loop = Loop(Limits(tokens=2))
    requests = loop.add_plain(1, 1, max_tokens=3)
    loop.step()
    loop.add_plain(1, first=2)
    for _ in range(2):
        assert loop.step().rows == [s for r in requests for s in r.sequences]
    assert statuses(*requests) == ["FINISHED_LENGTH"] * 2
    loop.run()


def test_max_num_seqs_bounds_the_running() -> None:
    loop = Loop(Limits(seqs=3))
    loop.add_plain(2, 2, 2, 2, 2, max_tokens=2)
    assert len(loop.step().rows) == 3
    assert loop.scheduler.num_running == 3
    assert loop.scheduler.num_waiting == 2
    loop.step()
    output = loop.step()
    assert len(output.rows) == len(output.step_input.new_sequences) == 2
    assert sorted(output.step_input.freed_slots) == [0, 1, 2]
    loop.run()


def test_whole_prompts_wait_for_the_next_step() -> None:
    loop = Loop(Limits(tokens=10, chunked=False))
    loop.add_plain(6, 5, 4)
    assert sizes(loop.step()) == [6]  # 5 do not fit into the same step, and 4 wait behind them
    assert sizes(loop.step()) == [5, 4]
    assert sizes(loop.step()) == [1, 1, 1]


def test_short_requests_do_not_keep_decodes_waiting() -> None:
    """Each ends with its first token, so slots never run out, and prompts would always go first."""
    loop = Loop(Limits(tokens=10, seqs=4, chunked=False))
    (long,) = loop.add_plain(6, max_tokens=8)
    loop.add_plain(*[10] * 60, first=1, max_tokens=1)
    steps = 0
    while statuses(long) == ["RUNNING"] or not steps:
        loop.step()
        steps += 1
    # Between two of its seven decodes stands one round of at most max_num_seqs prompts.
    assert len(loop.endings) - 1 == 3 + 6 * 4
    assert steps == 1 + 3 + 6 * 4 + 7
    loop.run()


@pytest.mark.parametrize(
    ("chunked", "num_prompt_tokens", "words"),
    [
        (False, 65, ["65 tokens", "max_num_batched_tokens = 64", "enable_chunked_prefill"]),
        (True, 121, ["121 tokens", "31 blocks of 4", "120 tokens", "gpu_memory_utilization"]),
        (True, 5000, ["5000 tokens", "max_model_len = 4096"]),
    ],
)
def test_ignored_with_a_reason(chunked: bool, num_prompt_tokens: int, words: list[str]) -> None:
    loop = Loop(Limits(num_blocks=30, chunked=chunked))
    bad, good = loop.add_plain(num_prompt_tokens, 5)
    output = loop.step()
    assert output.ignored == [bad]
    assert output.rows == good.sequences
    assert statuses(bad) == ["FINISHED_IGNORED"]
    assert [word for word in words if word not in str(bad.error)] == []
    assert loop.scheduler.why_too_long(num_prompt_tokens) == str(bad.error)
    assert loop.scheduler.why_too_long(5) is None
    assert bad.metrics.first_scheduled_time is None
    assert loop.scheduler.get_request("r0") is None
    loop.run()


def test_limits_are_inclusive() -> None:
    loop = Loop(Limits(tokens=40, num_blocks=10, chunked=False, watermark=0.5))
    (request,) = loop.add_plain(40, max_tokens=1)
    loop.run()
    assert statuses(request) == ["FINISHED_LENGTH"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=30),
    tokens=st.integers(24, 60),
    num_blocks=st.integers(8, 40),
    fairness=st.sampled_from(["none", "owner"]),
    in_flight=st.integers(1, 3),
)
def test_an_encoder_computes_each_prompt_in_one_step(
    lengths: list[int], tokens: int, num_blocks: int, fairness: str, in_flight: int
) -> None:
    """Of the first waiting prompts each step computes as many as fit; none waits for ever."""
    own = {"fairness": fairness, "in_flight": in_flight, "whole_prompts": True}
    loop = Loop(Limits(tokens=tokens, num_blocks=num_blocks, **own))
    requests = [
        loop.add(make_request(i, length, plain(1), owner=Owner("", f"client {i % 3}")))
        for i, length in enumerate(lengths)
    ]
    while loop.scheduler.has_unfinished_requests():
        output = loop.step()
        assert sizes(output) == [row.num_prompt_tokens for row in output.rows]
        assert sum(sizes(output)) <= tokens
    assert all(statuses(request) == ["FINISHED_LENGTH"] for request in requests)


def test_token_that_was_not_appended_is_noticed() -> None:
    loop = Loop()
    loop.add_plain(4)
    loop.scheduler.schedule()
    loop.scheduler.update(StepDecisions())
    with pytest.raises(EngineError, match="sample what sequence 0 lacks"):
        loop.scheduler.check_invariants()


def test_no_step_is_planned_beyond_a_last_token() -> None:
    loop = Loop(Limits(in_flight=4))
    loop.add_plain(5, 9, max_tokens=6)
    assert sizes(loop.step()) == [5, 9]
    assert [sizes(output) for output in loop.scheduler.unanswered] == [[1, 1]] * 3
    loop.run()
    assert loop.worker.last_step == 6


def test_end_token_ids_are_sent_only_for_min_tokens() -> None:
    loop = Loop()
    for index, min_tokens in enumerate((0, 3)):
        loop.add(make_request(index, 4, SamplingParams(min_tokens=min_tokens)))
    new = loop.step().step_input.new_sequences
    assert [sequence.end_token_ids for sequence in new] == [[], sorted(END_TOKEN_IDS)]


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


def test_messages_do_not_share_the_drivers_lists() -> None:
    loop = Loop()
    (request,) = loop.add_plain(4)
    output = loop.scheduler.schedule()
    output.step_input.new_sequences[0].token_ids.append(1)
    output.step_input.new_sequences[0].block_ids.append(1)
    assert request.sequences[0].num_tokens == 4
    assert len(loop.blocks.block_ids(request.sequences[0])) == 1
