"""Text between think tags is told from the rest, wherever a stream is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpengine.server.http.reasoning import ReasoningSplitter

PIECES = [
    "<think>", "</think>", "<", "think", ">", "</", "/", " ", "\n", "a", "é🙂", "</thi", "<th",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def _split(prompt: str | None, *pieces: str) -> tuple[str, str]:
    splitter, reasoning, content = ReasoningSplitter(prompt), "", ""
    for place, piece in enumerate(pieces):
        was_over = splitter.is_over
        more, rest = splitter.take(piece, place == len(pieces) - 1)
        assert not (was_over and more)
        assert not (content and more), "reasoning after content"
        reasoning, content = reasoning + more, content + rest
    return reasoning, content


@given(TEXTS, st.sampled_from([None, "a", "a<think>\n"]), st.lists(st.integers(0, 60)))
def test_cuts_change_nothing(text: str, prompt: str | None, places: list[int]) -> None:
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(cuts)]
    whole = _split(prompt, text)
    assert _split(prompt, *pieces) == whole
    assert _split(prompt, *text, "") == whole
    if whole[0]:
        closing = "</think>" if "</think>" in text else ""
        opening = "" if prompt is not None and prompt.endswith("\n") else "<think>"
        assert text.lstrip() == f"{opening}{whole[0]}{closing}{whole[1]}".lstrip()
    assert "</think>" not in whole[0]


@pytest.mark.parametrize(
    ("prompt", "text", "wanted"),
    [
        (None, "<think>why</think>\n\nso", ("why", "\n\nso")),
        (None, "\n <think>why</think>so", ("why", "so")),
        ("user: a\n<think>\n", "why</think>so", ("why", "so")),
        (None, "<think>why", ("why", "")),
        (None, "<think>why</thi", ("why</thi", "")),
        (None, "<thin", ("", "<thin")),
        (None, " " * 65 + "<think>a", ("", " " * 65 + "<think>a")),
        (None, "so <think>not</think>", ("", "so <think>not</think>")),
        ("<think>a</think>", "so</think>", ("", "so</think>")),
        (None, "<think></think>so", ("", "so")),
        (None, "", ("", "")),
    ],
)
def test_what_is_reasoning(prompt: str | None, text: str, wanted: tuple[str, str]) -> None:
    assert _split(prompt, text) == wanted
    assert _split(prompt, *text, "") == wanted
