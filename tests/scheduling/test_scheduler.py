"""The scheduler's decisions, one test each. The fake engine also checks every step."""

from __future__ import annotations

import pytest

from tpengine.errors import EngineError
from tpengine.scheduling import StepDecisions
from tpengine.sequence import SequenceStatus

from .fake_engine import FakeEngine, add, engine_of, make_config, make_request, sizes, statuses


def test_worked_example() -> None:
    """300 prompts of 27, 30, 24, ... tokens (27 on average): 75 of them are 2025 of 2048 tokens."""
    engine = FakeEngine(make_config(2048, 256, chunked=False), 10_000, 16, stop_every=None)
    add(engine, *[27, 30, 24] * 100)
    admitted, waiting = [], []
    for _ in range(4):
        output = engine.step()
        admitted.append(len(output.rows))
        waiting.append(engine.scheduler.num_waiting)
        assert output.sampled == output.rows
        assert output.num_prefill_tokens == sum(sizes(output))
    assert admitted == [75, 75, 75, 31]
    assert waiting == [225, 150, 75, 44]
    for _ in range(3):
        output = engine.step()
        assert sizes(output) == [1] * 256
        assert output.num_prefill_tokens == 0
    engine.run()
    assert set(engine.endings.values()) == {SequenceStatus.FINISHED_LENGTH}
    assert len(engine.endings) == 300


def test_steps_are_counted_from_one_and_empty_ones_are_not() -> None:
    engine = engine_of()
    assert engine.step().is_empty
    add(engine, 3)
    assert engine.step().step_input.step == 1
    assert engine.step().step_input.step == 2
    engine.run()
    assert engine.step().is_empty
    add(engine, 3, first=1)
    assert engine.step().step_input.step == engine.worker.last_step == 17


def test_chunks_fill_the_budget_after_the_decodes() -> None:
    engine = engine_of(tokens=10)
    first, second, third = add(engine, 7, 15, 4)
    output = engine.step()
    assert (sizes(output), output.sampled) == ([7, 3], first.sequences)
    assert output.num_prefill_tokens == 10
    output = engine.step()
    assert (sizes(output), output.sampled) == ([1, 9], first.sequences)
    assert output.num_prefill_tokens == 9
    output = engine.step()
    assert sizes(output) == [1, 3, 4]
    assert output.rows == [*first.sequences, *second.sequences, *third.sequences]
    assert output.sampled == output.rows
    assert output.num_prefill_tokens == 7
    assert sizes(engine.step()) == [1, 1, 1]


def test_prefill_tokens_count_a_chunk_of_one() -> None:
    engine = engine_of(tokens=4)
    add(engine, 5)
    assert engine.step().num_prefill_tokens == 4
    output = engine.step()
    assert (sizes(output), output.num_prefill_tokens) == ([1], 1)
    assert engine.step().num_prefill_tokens == 0


def test_rows_with_one_token_come_first() -> None:
    engine = engine_of(tokens=20)
    long, short = add(engine, 6, 1)
    output = engine.step()
    assert output.rows == [*short.sequences, *long.sequences]
    assert sizes(output) == [1, 6]
    assert output.step_input.sample_rows == [0, 1]


def test_more_running_than_budget_serves_the_oldest() -> None:
    engine = engine_of(tokens=2)
    requests = add(engine, 1, 1, max_tokens=3)
    engine.step()
    add(engine, 1, first=2)
    for _ in range(2):
        output = engine.step()
        assert output.rows == [s for r in requests for s in r.sequences]
    assert statuses(requests) == ["FINISHED_LENGTH"] * 2
    engine.run()


def test_max_num_seqs_bounds_the_running() -> None:
    engine = engine_of(seqs=3)
    add(engine, 2, 2, 2, 2, 2, max_tokens=2)
    assert len(engine.step().rows) == 3
    assert engine.scheduler.num_running == 3
    assert engine.scheduler.num_waiting == 2
    engine.step()
    output = engine.step()
    assert len(output.rows) == len(output.step_input.new_sequences) == 2
    assert sorted(output.step_input.freed_slots) == [0, 1, 2]
    engine.run()


def test_whole_prompts_wait_for_the_next_step() -> None:
    engine = engine_of(tokens=10, chunked=False)
    add(engine, 6, 5, 4)
    assert sizes(engine.step()) == [
        6
    ]  # 5 tokens do not fit into the same step, and 4 wait behind them
    assert sizes(engine.step()) == [5, 4]
    assert sizes(engine.step()) == [1, 1, 1]


def test_prompts_before_decodes() -> None:
    engine = engine_of(tokens=10, chunked=False)
    add(engine, 6)
    engine.step()
    add(engine, 6, first=1)
    output = engine.step()
    assert sizes(output) == [6]
    assert len(output.step_input.new_sequences) == 1


def test_short_requests_do_not_keep_decodes_waiting() -> None:
    """Each ends with its first token, so slots never run out, and prompts would always go first."""
    engine = engine_of(tokens=10, seqs=4, chunked=False)
    (long,) = add(engine, 6, max_tokens=8)
    add(engine, *[10] * 60, first=1, max_tokens=1)
    steps = 0
    while statuses([long]) == ["RUNNING"] or not steps:
        engine.step()
        steps += 1
    # Between two of its seven decodes stands one round of at most max_num_seqs prompts.
    assert len(engine.endings) - 1 == 3 + 6 * 4
    assert steps == 1 + 3 + 6 * 4 + 7
    engine.run()


@pytest.mark.parametrize(
    ("chunked", "num_prompt_tokens", "words"),
    [
        (False, 65, ["65 tokens", "max_num_batched_tokens = 64", "enable_chunked_prefill"]),
        (True, 121, ["121 tokens", "31 blocks of 4", "120 tokens", "gpu_memory_utilization"]),
        (True, 5000, ["5000 tokens", "max_model_len is 4096"]),
    ],
)
def test_ignored_with_a_reason(chunked: bool, num_prompt_tokens: int, words: list[str]) -> None:
    engine = engine_of(num_blocks=30, chunked=chunked)
    bad, good = add(engine, num_prompt_tokens, 5)
    output = engine.step()
    assert output.ignored == [bad]
    assert output.rows == good.sequences
    assert statuses([bad]) == ["FINISHED_IGNORED"]
    assert bad.error is not None
    assert [word for word in words if word not in bad.error] == []
    assert bad.metrics.first_scheduled_time is None
    assert engine.scheduler.get_request("r0") is None
    engine.run()


def test_step_may_hold_nothing_but_ignored_requests() -> None:
    engine = engine_of(num_blocks=2)
    bad = add(engine, 9, 9)
    output = engine.step()
    assert output.is_empty
    assert output.ignored == bad
    assert not engine.scheduler.has_unfinished_requests()


def test_limits_are_inclusive() -> None:
    engine = engine_of(tokens=40, num_blocks=10, chunked=False, watermark=0.5)
    (request,) = add(engine, 40, max_tokens=1)
    engine.run()
    assert statuses([request]) == ["FINISHED_LENGTH"]


def test_later_stops_admission_for_all_behind() -> None:
    engine = engine_of(num_blocks=10)
    first, second, _ = add(engine, 20, 24, 4, max_tokens=2)
    assert engine.step().rows == first.sequences
    assert engine.step().rows == first.sequences  # the third would fit, but it is not its turn
    assert len(engine.step().rows) == 2
    assert second.sequences[0].num_computed_tokens == 24
    engine.run()


def test_token_that_was_not_appended_is_noticed() -> None:
    engine = engine_of()
    add(engine, 4)
    engine.scheduler.update(engine.scheduler.schedule(), StepDecisions())
    with pytest.raises(EngineError, match="its token was not appended"):
        engine.scheduler.schedule()


def test_end_token_ids_are_sent_only_for_min_tokens() -> None:
    engine = engine_of()
    engine.add(make_request(0, 4, end_token_ids=frozenset({9, 2})))
    engine.add(make_request(1, 4, min_tokens=3, end_token_ids=frozenset({9, 2})))
    new = engine.step().step_input.new_sequences
    assert [sequence.end_token_ids for sequence in new] == [[], [2, 9]]


def test_messages_do_not_share_the_drivers_lists() -> None:
    engine = engine_of()
    (request,) = add(engine, 4)
    output = engine.scheduler.schedule()
    output.step_input.new_sequences[0].token_ids.append(1)
    output.step_input.new_sequences[0].block_ids.append(1)
    assert request.sequences[0].num_tokens == 4
    assert len(engine.blocks.block_ids(request.sequences[0])) == 1
