"""How the stages of a pipeline share the running sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from scheduling.loop import Limits, Loop, make_request, plain


@pytest.mark.parametrize(("stages", "count"), [(2, 6), (3, 7), (4, 8)])
def test_each_stage_has_its_group(stages: int, count: int) -> None:
    """Equal parts, and a sequence is in every `stages`-th step only, so that its last token is
    known when its next row enters the first stage."""
    loop = Loop(Limits(in_flight=stages + 1, stages=stages))
    loop.add_plain(*[2] * count, max_tokens=20)
    for _ in range(2 * stages):  # prompts, and then the first groups
        loop.step()
    rows = [[s.seq_id for s in loop.step().rows] for _ in range(3 * stages)]
    for number in range(len(rows) - stages + 1):
        counts = Counter(seq for step in rows[number : number + stages] for seq in step)
        assert max(counts.values()) == 1
        assert len(counts) == count, "each sequence has its turn"
    sizes = [len(step) for step in rows]
    assert max(sizes) - min(sizes) <= 1
    loop.run()


def test_a_sequence_alone_is_one_step_ahead_of_itself() -> None:
    loop = Loop(Limits(in_flight=5, stages=4))
    loop.add_plain(3, max_tokens=9)
    for _ in range(4):
        loop.step()
        assert len(loop.scheduler.unanswered) <= 1
    loop.run()
    assert loop.worker.last_step == 9


def test_parts_of_a_prompt_wait_for_nothing() -> None:
    """They follow each other, while the others take their turns."""
    loop = Loop(Limits(tokens=8, in_flight=4, stages=3))
    loop.add_plain(2, 2, 2, max_tokens=30)
    for _ in range(6):
        loop.step()
    long = make_request(9, 30, plain(4))
    loop.add(long)
    for _ in range(4):
        loop.step()
        newest = loop.scheduler.unanswered[-1]
        at = newest.rows.index(long.sequences[0])
        assert newest.step_input.num_scheduled_tokens[at] > 1
    loop.run()


def test_long_sequences_count_for_more() -> None:
    """A group of two long sequences is as dear as one of more short ones."""
    loop = Loop(Limits(tokens=30_000, num_blocks=20_000, in_flight=3, stages=2, model_len=30_000))
    loop.add_plain(8192, 8192, *[2] * 6, max_tokens=40)
    for _ in range(10):
        loop.step()
    sizes = sorted(len(loop.step().rows) for _ in range(2))
    assert sizes == [2, 6]
    loop.run()


def test_nothing_is_divided_while_one_step_is_sent_at_a_time() -> None:
    """As while drafts are hoped for, or grammars are compiled."""
    loop = Loop(Limits(stages=2))
    loop.add_plain(2, 2, 2, 2, max_tokens=8)
    loop.step()
    assert [len(loop.step().rows) for _ in range(7)] == [4] * 7
    assert not loop.scheduler.has_unfinished_requests()


@pytest.mark.parametrize("seed", [4, 12, *range(20, 30)])
def test_a_request_that_is_swapped_in_has_a_row_at_once(seed: int) -> None:
    """Beside beams that wait for an answer, and if others have taken the whole part of the step: a
    step without rows is not sent, so that its blocks would not be moved."""
    random = Random(seed)
    limits = Limits(num_host_blocks=80, mode="swap", seqs=10, in_flight=3, stages=2)
    loop = Loop(replace(limits, num_blocks=random.randint(10, 26)))
    width = random.choice([3, 4])
    beams = {"n": width, "best_of": width, "use_beam_search": True, "temperature": 0.0}
    loop.add(make_request(0, 3, plain(random.randint(20, 40), **beams)))
    for index in range(1, random.randint(3, 6)):
        loop.add(make_request(index, random.randint(1, 9), plain(random.randint(3, 30))))
        for _ in range(random.randint(0, 2)):
            loop.step()
    loop.run()
