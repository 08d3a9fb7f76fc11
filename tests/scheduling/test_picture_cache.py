"""Which pictures' features a step has."""

from __future__ import annotations

import pytest

from tpengine.config import PicturesConfig
from tpengine.messages import PictureLoad, PictureSpan, SamplingRules, StepInput
from tpengine.outputs import RequestMetrics
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.picture_cache import PictureCache
from tpengine.scheduling.sequence import PromptPictures, Request, Sequence, SequenceStatus


def ask(*pictures: str, num_computed: int = 0) -> Request:
    """A running request whose pictures have four tokens each, with one token before each."""
    spans = [PictureSpan(1 + 5 * i, 4, 0, 4, name.encode()) for i, name in enumerate(pictures)]
    loads = {span.digest: PictureLoad(span.digest, 4, 1, 1, b"\0\0\0") for span in spans}
    ids = list(range(5 * len(pictures) + 1))
    sequence = Sequence(0, 0, ids, len(ids), num_computed_tokens=num_computed)
    sequence.move_to(SequenceStatus.RUNNING)
    return Request(
        prompt=None, prompt_token_ids=ids, sampling_params=SamplingParams(), rules=SamplingRules(),
        request_id="", seed=0, arrival_index=0, sequences=[sequence],
        metrics=RequestMetrics(0.0, None, None, None, None), pictures=PromptPictures(spans, loads),
    )  # fmt: skip


def cache(num_rows: int, most: int = 100, are_whole: bool = False) -> PictureCache:
    return PictureCache(PicturesConfig(16, most, num_rows, {}, are_whole))


def step() -> StepInput:
    return StepInput(1, [], [])


def names(loads: list[PictureLoad]) -> list[str]:
    return [load.digest.decode() for load in loads]


def test_what_a_step_uses_is_not_given_away_in_it() -> None:
    pictures, first, second = cache(4), ask("a"), ask("b")
    assert pictures.reach(first, 6, 6, step(), [first, second]) == 6
    message = step()
    assert pictures.reach(first, 6, 6, message, [first, second]) == 6
    assert pictures.reach(second, 6, 6, message, [first, second]) == 1
    assert (message.picture_loads, pictures.take_dropped()) == ([], [])
    message = step()
    assert pictures.reach(second, 6, 6, message, [second]) == 6
    assert (names(message.picture_loads), pictures.take_dropped()) == (["b"], [b"a"])


def test_a_picture_may_come_again_behind_another() -> None:
    """There is room for one: the first one gives way, and is computed again."""
    pictures, request = cache(4), ask("a", "b", "a")
    for num_computed, reached in ((0, 6), (6, 5), (11, 5)):
        request.sequences[0].num_computed_tokens = num_computed
        message = step()
        assert pictures.reach(request, 16 - num_computed, 16, message, [request]) == reached
        assert len(message.picture_loads) == 1


def test_a_picture_that_is_begun_keeps_its_features() -> None:
    pictures, begun, other = cache(4), ask("a"), ask("b")
    assert pictures.reach(begun, 3, 3, step(), [begun]) == 3
    begun.sequences[0].num_computed_tokens = 3
    assert pictures.reach(other, 6, 6, step(), [begun, other]) == 1
    begun.sequences[0].num_computed_tokens = 5
    assert pictures.reach(other, 6, 6, step(), [begun, other]) == 6


@pytest.mark.parametrize(("most", "reached"), [(12, 21), (8, 16), (7, 6), (1, 6)])
def test_a_step_computes_few(most: int, reached: int) -> None:
    """But one picture in any case."""
    request = ask("a", "b", "a", "c")
    assert cache(100, most).reach(request, 21, 21, step(), [request]) == reached


@pytest.mark.parametrize(
    ("num_tokens", "tokens_left", "reached"), [(6, 9, 6), (3, 9, 5), (3, 4, 1), (1, 9, 1)]
)
def test_a_whole_picture_is_not_divided(num_tokens: int, tokens_left: int, reached: int) -> None:
    request = ask("a")
    pictures = cache(4, are_whole=True)
    assert pictures.reach(request, num_tokens, tokens_left, step(), [request]) == reached


def test_features_that_failed_are_computed_again() -> None:
    pictures, request, message = cache(8), ask("a"), step()
    pictures.reach(request, 6, 6, message, [request])
    pictures.note_failed([b"a", b"other"])
    assert pictures.take_dropped() == [b"a"]
    again = step()
    assert pictures.reach(request, 6, 6, again, [request]) == 6
    assert names(again.picture_loads) == names(message.picture_loads) == ["a"]
