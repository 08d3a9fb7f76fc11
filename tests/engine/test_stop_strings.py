"""Stop strings: which one ends the text, where it is cut, and what may be shown before."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.costs import cost_ratio
from support.small_tokenizers import stream_all
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from tpengine.engine.detokenizer import Detokenizer
from tpengine.engine.tokenizer import Tokenizer
from tpengine.sampling_params import SamplingParams


def letters_tokenizer() -> Tokenizer:
    """Each token is a short word; they are joined without spaces."""
    tokens = ["a", "b", "c", "ab", "ba", "aab", "bbab", "abc", "END", "E", "N", "D"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


LETTERS = letters_tokenizer()


def letters(*words: str) -> list[int]:
    return [int(LETTERS.hf.convert_tokens_to_ids(word)) for word in words]


def stop_oracle(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The stop string that is complete first, character by character; of equals the longest."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def showable(text: str, stops: Sequence[str]) -> str:
    """The text without the longest end of it that begins a stop."""
    for start in range(len(text)):
        if any(stop != text[start:] and stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "bbab", "c", "abc"]), max_size=10),
    st.lists(
        st.one_of(st.text("ab", min_size=3, max_size=8), st.text("abc", min_size=1, max_size=4)),
        max_size=3,
    ),
    st.booleans(),
)
@example(["ab"], ["b", "ab"], False)
def test_stop_strings_at_every_border(words: list[str], stops: list[str], include: bool) -> None:
    detokenizer = Detokenizer(
        LETTERS, [], SamplingParams(stop=stops, include_stop_str_in_output=include)
    )
    text = streamed = ""
    for word in words:
        text += word
        stopped_by = detokenizer.append(*letters(word))
        streamed += detokenizer.take_delta()
        assert streamed == detokenizer.text
        assert (stopped_by is None) == (stop_oracle(text, stops, include)[1] is None)
        if stopped_by is not None:
            break
        assert streamed == (text if include else showable(text, stops))
    detokenizer.finish()
    streamed += detokenizer.take_delta()
    assert (streamed, detokenizer.stopped_by) == stop_oracle(text, stops, include)
    assert streamed == detokenizer.text


def test_stop_waits_for_min_tokens() -> None:
    ids = letters("END", "a", "E", "N", "D", "b")
    # The first is complete at token 1, the second at token 5.
    for min_tokens, deltas, stop in (
        (0, ["", ""], "END"),
        (1, ["", ""], "END"),
        (2, ["END", "a", "", "", "", ""], "END"),
        (5, ["END", "a", "", "", "", ""], "END"),
        (6, ["END", "a", "", "", "END", "b", ""], None),
    ):
        detokenizer = Detokenizer(LETTERS, [], SamplingParams(stop=["END"], min_tokens=min_tokens))
        assert stream_all(detokenizer, ids)[1:] == (deltas, stop)


def test_many_long_stop_strings_cost_little() -> None:
    """The text is nearly each of them, again and again. To compare it with all of them takes 1,000
    times as long as with a short one."""
    stops = [(400 + 10 * index) * "a" + "b" for index in range(60)]
    text = letters(*600 * ["a"], "c", *700 * ["a"])

    def read(*stop: str) -> str:
        detokenizer = Detokenizer(LETTERS, [], SamplingParams(stop=stop))
        assert not any(map(detokenizer.append, text))
        detokenizer.finish()
        return detokenizer.text

    assert read(*stops) == 600 * "a" + "c" + 700 * "a"
    assert cost_ratio(lambda: read(*stops), lambda: read("ba")) < 10
