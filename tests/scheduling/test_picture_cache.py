"""Which pictures' features a step has."""

from __future__ import annotations

import pytest

from tpengine.config import PicturesConfig
from tpengine.messages import PictureLoad, PictureSpan, StepInput
from tpengine.scheduling.picture_cache import PictureCache
from tpengine.scheduling.sequence import PromptPictures, Request, SequenceStatus

from .loop import make_request


def ask(*pictures: str, num_computed: int = 0) -> Request:
    """A running request whose pictures have four tokens each, x two, with one token before each."""
    sizes = [2 if name == "x" else 4 for name in pictures]
    spans = [
        PictureSpan(1 + 5 * i, size, 0, size, name.encode())
        for i, (name, size) in enumerate(zip(pictures, sizes, strict=True))
    ]
    loads = {s.digest: PictureLoad(s.digest, s.num_tokens, 1, 1, b"\0\0\0") for s in spans}
    request = make_request(0, 5 * len(pictures) + 1)
    request.pictures = PromptPictures(spans, loads)
    request.sequences[0].num_computed_tokens = num_computed
    request.sequences[0].move_to(SequenceStatus.RUNNING)
    return request


def cache(num_rows: int, most: int = 100, are_whole: bool = False) -> PictureCache:
    return PictureCache(PicturesConfig(16, most, num_rows, {}, 1.0, are_whole))


def step(number: int = 1) -> StepInput:
    return StepInput(number, [], [])


def names(loads: list[PictureLoad]) -> list[str]:
    return [load.digest.decode() for load in loads]


def answer(pictures: PictureCache, *names: str, number: int = 1) -> None:
    pictures.note_answer(number, [name.encode() for name in names], [])


def test_a_request_waits_for_the_answer_with_its_features() -> None:
    pictures, request, message = cache(8), ask("a", "b"), step()
    for number in (1, 2):
        assert pictures.reach(request, 11, message, [request]) == 1
        assert (names(message.picture_loads), pictures.num_awaited_rows) == (["a"], 4), number
    answer(pictures, "a")
    assert pictures.reach(request, 11, message, [request]) == 6
    assert pictures.num_awaited_rows == 4
    pictures.tell_changes(message)
    assert (names(message.picture_loads), message.computed_pictures) == (["a", "b"], [b"a"])
    again = step()
    pictures.tell_changes(again)
    assert not again.computed_pictures


def test_what_a_step_uses_or_awaits_is_not_given_away() -> None:
    pictures, first, second = cache(4), ask("a"), ask("b")
    message = step()
    assert pictures.reach(first, 6, message, [first]) == 1
    assert pictures.reach(second, 6, message, [first, second]) == 1
    answer(pictures, "a")
    assert pictures.reach(first, 6, message, [first]) == 6
    assert pictures.reach(second, 6, message, [second]) == 1
    assert names(message.picture_loads) == ["a"]
    message = step()
    assert pictures.reach(second, 6, message, [second]) == 1
    pictures.tell_changes(message)
    assert (names(message.picture_loads), message.dropped_pictures) == (["b"], [b"a"])


def test_a_picture_may_come_again_behind_another() -> None:
    """There is room for one: the first one gives way, and is computed again."""
    pictures, request = cache(4), ask("a", "b", "a")
    for name, num_computed, reached in (("a", 0, 6), ("b", 6, 5), ("a", 11, 5)):
        request.sequences[0].num_computed_tokens = num_computed
        message = step()
        pictures.reach(request, 16 - num_computed, message, [request])
        assert names(message.picture_loads) == [name]
        answer(pictures, name)
        assert pictures.reach(request, 16 - num_computed, message, [request]) == reached


@pytest.mark.parametrize("place", [1, 3])
def test_what_a_running_request_needs_next_is_kept(place: int) -> None:
    """The picture that it waits for, or has begun."""
    pictures, begun, other = cache(4), ask("a"), ask("b")
    pictures.reach(begun, 3, step(), [begun])
    answer(pictures, "a")
    for num_computed, is_asked in ((place, False), (5, True)):
        begun.sequences[0].num_computed_tokens, message = num_computed, step()
        assert pictures.reach(other, 6, message, [begun, other]) == 1
        assert bool(message.picture_loads) == is_asked


@pytest.mark.parametrize(("most", "asked"), [(8, ["a", "b"]), (7, ["a"]), (1, ["a"])])
def test_few_are_awaited_at_once(most: int, asked: list[str]) -> None:
    """But one picture in any case."""
    pictures, message, requests = cache(100, most), step(), [ask(name) for name in "abc"]
    for request in requests:
        assert pictures.reach(request, 6, message, requests) == 1
    assert names(message.picture_loads) == asked


@pytest.mark.parametrize(
    ("num_tokens", "tokens_left", "size"), [(6, 9, 6), (3, 9, 5), (3, 4, 1), (1, 9, 1)]
)
def test_a_whole_picture_is_not_divided(num_tokens: int, tokens_left: int, size: int) -> None:
    assert cache(4, are_whole=True).undivided(ask("a"), num_tokens, tokens_left) == size
    assert cache(4).undivided(ask("a"), num_tokens, tokens_left) == num_tokens


def test_features_that_failed_are_computed_again() -> None:
    pictures, request, message = cache(8), ask("a"), step()
    pictures.reach(request, 6, message, [request])
    pictures.note_answer(1, [], [b"a", b"other"])
    assert pictures.num_awaited_rows == 0
    again = step()
    pictures.reach(request, 6, again, [request])
    pictures.tell_changes(again)
    assert (names(again.picture_loads), again.dropped_pictures) == (["a"], [b"a"])


@pytest.mark.parametrize(("most", "num_rows"), [(7, 100), (100, 7)])
def test_a_picture_that_the_limits_refuse_is_the_next_one(most: int, num_rows: int) -> None:
    """Else those that come later could take its place for ever."""
    pictures, first, later = cache(num_rows, most), ask("b"), ask("x")
    pictures.reach(ask("a"), 6, step(), [])
    message = step(2)
    assert pictures.reach(first, 6, message, [first]) == 1  # it does not fit beside the awaited one
    assert pictures.reach(later, 4, message, [first]) == 1
    assert not message.picture_loads
    answer(pictures, "a")
    message = step(3)
    assert pictures.reach(first, 6, message, [first]) == 1
    assert names(message.picture_loads) == ["b"]


def test_what_only_ended_requests_wait_for_is_given_up() -> None:
    pictures, ended, other = cache(100), ask("a", "b"), ask("b")
    for request in (ended, other):
        pictures.reach(request, 6, step(), [ended, other])
    assert pictures.waiting([ended, other]) == [ended, other]
    ended.sequences[0].num_computed_tokens = 10
    assert pictures.waiting([ended, other]) == [other]
    message = step(2)
    pictures.note_end(ended, [other])
    pictures.tell_changes(message)
    assert (message.dropped_pictures, pictures.num_awaited_rows) == ([b"a"], 4)


def test_a_late_answer_is_not_taken_for_a_later_one() -> None:
    """A picture is dropped and asked for again while the answer with its features is on its way."""
    pictures, first, second = cache(100), ask("a"), ask("a")
    pictures.reach(first, 6, step(1), [first])
    pictures.note_end(first, [])
    pictures.reach(second, 6, step(3), [second])
    answer(pictures, "a", number=2)
    assert (pictures.num_awaited_rows, pictures.reach(second, 6, step(4), [second])) == (4, 1)
    answer(pictures, "a", number=3)
    assert (pictures.num_awaited_rows, pictures.reach(second, 6, step(4), [second])) == (0, 6)
