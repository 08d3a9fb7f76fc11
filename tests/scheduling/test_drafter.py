"""Which tokens are guessed, and how many of them get a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foretold import Foretold

from tpengine.config import LookaheadConfig
from tpengine.inputs import NO_OWNER, Owner
from tpengine.scheduling.drafter import Drafter, Guess, RowPrices
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.token_index import TokenIndex

from .loop import Limits, Loop, make_request

CHEAP, USUAL, DEAR = (1.0, 0.02), (1.0, 0.1), (1.0, 0.9)
CYCLE = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def _cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: CHEAP)


def make_drafter(source: str = "[ngram]", **fields: Any) -> Drafter:
    names = {
        "num_speculative_tokens": 4,
        "ngram_prompt_lookup_max": 3,
        "ngram_prompt_lookup_min": 2,
        "speculative_disable_by_batch_size": None,
        "speculative_max_model_len": 1000,
    }
    return Drafter(LookaheadConfig(source, **{**names, **fields}))


def look(drafter: Drafter, request: Request, most: int = 100, num_sequences: int = 1) -> list[int]:
    """The drafts of a request in a step of so many sequences."""
    if not drafter.begin_step(num_sequences):
        return []
    return [guess.token_id for guess in drafter.draft(request, request.sequences[0], most)]


def say(request: Request, *token_ids: int) -> Request:
    """The tokens are appended."""
    sequence = request.sequences[0]
    sequence.token_ids = [*sequence.token_ids, *token_ids]
    return request


def ask(*token_ids: int, index: int = 0, owner: Owner = NO_OWNER) -> Request:
    return make_request(index, list(token_ids), owner=owner)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_an_index_finds_what_a_search_finds(
    tokens: list[int], size: int, more: int, cut: int
) -> None:
    index, longest = TokenIndex(size), size + more
    for start in range(0, len(tokens), cut):
        index.extend(tokens[start : start + cut])
    expected = []
    for end in reversed(range(size, len(tokens))):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= size:
            expected.append((length, end))
    best = max(expected[:32], default=(0, 0))[0]
    places = [(match.length, match.end) for match in index.find(tokens, longest)]
    assert places == [place for place in expected[:32] if place[0] == best]


@pytest.mark.parametrize(
    ("token_ids", "guessed"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 8, 1, 2], [4, 8, 1, 2]),  # the latest place
        ([7, 1, 2, 3, 0, 1, 2, 4, 7, 1, 2], [3, 0, 1, 2]),  # the longest match
        ([4, 4, 4], [4, 4, 4, 4]),  # a loop goes on
        ([1, 2, 8, 1, 2], [8, 1, 2, 8]),
        ([1, 2, 3, 4, 5], []),
        ([3, 2, 9, 4, 2], []),  # one token is no match
        ([1], []),
    ],
)
def test_what_followed_before_is_guessed(token_ids: list[int], guessed: list[int]) -> None:
    assert look(make_drafter(), ask(*token_ids)) == guessed


def test_the_suffix_method_takes_the_most_frequent_token() -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 5, 1, 2]
    assert look(make_drafter("[suffix]"), ask(*text))[0] == 7
    assert look(make_drafter("[ngram]"), ask(*text))[0] == 5


def test_the_share_of_a_guess_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that comes true as often as its share of the places is worth half of a step."""
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.5))
    fields = {"num_speculative_tokens": 1, "ngram_prompt_lookup_max": 2}
    drafter, request = make_drafter("[suffix]", **fields), ask(1, 2)
    followed = [7 if number % 3 else 50 + number for number in range(90)]
    sizes = [len(look(drafter, say(request, token_id, 1, 2))) for token_id in followed]
    assert sizes[-20:] == [1] * 20


def test_outputs_of_the_same_client_are_guessed_again() -> None:
    drafter = make_drafter("[suffix]")
    ann, bob = Owner(account="ann"), Owner(account="bob")
    first = say(ask(1, 2, owner=ann), 11, 12, 13, 14)
    assert look(drafter, first) == []
    drafter.leave(first)
    assert look(drafter, say(ask(9, index=1, owner=ann), 11, 12)) == [13, 14]
    assert look(drafter, say(ask(9, index=2, owner=bob), 11, 12)) == []
    assert look(drafter, say(ask(9, 1, index=3, owner=ann), 2, 11)) == [], "of the prompt"
    plain = make_drafter("[ngram]")
    plain.leave(first)
    assert look(plain, say(ask(9, index=4, owner=ann), 11, 12)) == []


def test_old_outputs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpengine.scheduling.drafter._GENERATION_TOKENS", 10)
    drafter = make_drafter("[suffix]")
    for number in range(3):
        drafter.leave(say(ask(1, index=number), *range(100 * number, 100 * number + 8)))
    known = [bool(look(drafter, ask(100 * n + 3, 100 * n + 4, index=9 + n))) for n in range(3)]
    assert known == [False, True, True]


def test_forced_tokens_come_first() -> None:
    drafter, request = make_drafter(num_speculative_tokens=8), ask(1, 2, 3, 9, 1)
    drafter.note_forced(request.sequences[0], [2])
    assert look(drafter, request) == [], "a sequence that is not followed: it may have ended"
    drafter.note_forced(request.sequences[0], [2])
    assert look(drafter, request) == [2, 3, 9, 1, 2, 3, 9, 1]
    assert look(drafter, request) == [2, 3, 9, 1, 2, 3, 9, 1]
    assert look(drafter, say(request, 7)) == [], "it has gone on"


def test_guesses_that_fail_cost_no_more_rows_and_return_when_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: USUAL)
    drafter, request = make_drafter(), ask(*CYCLE, *CYCLE[:2])
    assert look(drafter, request) == [7, 8, 9, 5]
    sizes = []
    for number in range(40):  # a loop of two tokens, of which the next is always another
        say(request, 100 + number, *CYCLE[:2])
        sizes.append(len(look(drafter, request)))
    assert sizes[-20:] == [0] * 20
    for _ in range(60):
        for token_id in (7, 8, 9, 5, 6):
            sizes.append(len(look(drafter, say(request, token_id))))
    assert sizes[-5:] == [4] * 5


def test_a_model_is_judged_by_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in steps of several sequences; if it fails, by no request, but now and then."""
    monkeypatch.undo()
    drafter = make_drafter("small", draft_model=object())
    requests = [ask(1, 2, 3, index=index) for index in range(300)]

    def try_it(request: Request, num_accepted: int, is_behind: bool = False) -> int:
        size = len(look(drafter, request, num_sequences=6))
        guesses = [Guess(0, "model", place) for place in range(1, size + 1)]
        drafter.count(request.sequences[0], guesses, min(num_accepted, size), is_behind)
        return size

    assert {try_it(requests[0], 0, is_behind=True) for _ in range(60)} == {1}, "not judged"
    assert [try_it(request, 4) for request in requests[1:20]][-1] == 4
    assert [try_it(request, 0) for request in requests[60:]].count(0) > 200
    assert [try_it(requests[0], 4) for _ in range(3000)][-1] == 4, "it came to fit"


@pytest.mark.parametrize(
    ("fields", "num_sequences", "most", "num_drafts"),
    [
        ({}, 1, 100, 4),
        ({}, 1, 2, 2),
        ({"num_speculative_tokens": 1}, 1, 100, 1),
        ({"speculative_disable_by_batch_size": 2}, 2, 100, 4),
        ({"speculative_disable_by_batch_size": 2}, 3, 100, 0),
        ({"speculative_max_model_len": 7}, 1, 100, 0),
        ({}, 45, 100, 0),
    ],
)
def test_limits(fields: dict[str, Any], num_sequences: int, most: int, num_drafts: int) -> None:
    request = ask(*CYCLE, *CYCLE[:2])
    assert len(look(make_drafter(**fields), request, most, num_sequences)) == num_drafts


def test_dear_rows_get_few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: DEAR)
    assert look(make_drafter(), ask(*CYCLE, *CYCLE[:2])) == []


def test_guesses_that_cost_more_than_they_save_are_rarely_made() -> None:
    drafter, request = make_drafter(), ask(*CYCLE, *CYCLE[:2])
    made = []
    for _ in range(200):
        made.append(bool(look(drafter, request)))
        drafter.note_guessing(0.5 if made[-1] else 0.0)  # half of a step
    assert all(made[:2])
    assert 2 < sum(made[20:]) < 20
    while drafter.begin_step(1):
        drafter.note_guessing(0.5)
    guesses = [Guess(7, "text", 2)] * 4
    drafter.count(request.sequences[0], guesses, num_accepted=0)
    assert not drafter.begin_step(1)
    drafter.count(request.sequences[0], guesses, num_accepted=1)
    assert drafter.begin_step(1), "the tokens of one step have come for less"


def test_the_price_of_a_row_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cheap, dear = RowPrices(), RowPrices()
    for number in range(200):
        rows = 1 + number % 5
        cheap.note(rows, 0.010 + 0.0003 * rows)
        dear.note(rows, 0.010 + 0.004 * rows)
        if number % 50 == 49:
            cheap.note(2, 1.0)  # it was interrupted
    step_s, row_s = dear.cost(1)
    assert step_s == pytest.approx(0.014, rel=0.1)
    assert row_s == pytest.approx(0.004, rel=0.1)
    assert cheap.cost(1)[1] < row_s / 4
    assert RowPrices().cost(1)[1] < RowPrices().cost(1)[0]


def test_nothing_is_kept_of_a_request_that_left() -> None:
    drafter, request = make_drafter(), ask(*CYCLE, *CYCLE)
    look(drafter, request)
    assert drafter._texts
    drafter.leave(request)
    assert not drafter._texts


def test_no_step_is_planned_behind_one_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens its sequences have is not known; `Loop` says so."""
    monkeypatch.setattr(Foretold, "begin_step", lambda self, num_sequences: True)
    loop = Loop(Limits(tokens=50, in_flight=3, drafts=3))
    loop.add_plain(1)
    assert [len(loop.step().drafts) for _ in range(3)] == [1, 1, 1]
    loop.run()


def test_steps_are_planned_ahead_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foretold, "begin_step", lambda self, num_sequences: True)
    loop = Loop(Limits(tokens=4, in_flight=3, drafts=3))
    loop.add_plain(1)
    for _ in range(4):
        loop.step()
    assert loop.scheduler.wants_drafts
    loop.restrict([])
    loop.restrict(None)
    loop.step()
    assert not loop.scheduler.wants_drafts, "its tokens are computed again"
    loop.run()
