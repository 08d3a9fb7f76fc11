"""Calls are found in a text wherever it is cut; grammars allow just the calls of a form."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_models import TEMPLATES, write

from tpengine import EngineArgs, StructuredOutputsParams
from tpengine.engine.tokenizer import load_tokenizer
from tpengine.server.http.tool_formats import FORMATS, ToolFormat, ToolParser
from tpengine.server.http.tools import choice_grammar, find_form
from tpengine.structured.constraints import Thinking, to_grammar

HERMES, LLAMA3, MISTRAL_2025, MISTRAL = FORMATS
FORMS = dict(zip(TEMPLATES, (HERMES, HERMES, LLAMA3, MISTRAL, MISTRAL_2025, HERMES), strict=True))
ONE, TWO = '{"city": "a}\\"{"}', "{}"
F, G = ("f", ONE), ("g_2", TWO)
CUT = '\n<tool_call>\n{"name": "f'


def parsed(form: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, str]], str]:
    """Text, calls and the reason of an answer that ends with `stop`."""
    parser, text = ToolParser(form, ["f", "g_2"]), ""
    calls: dict[int, dict[str, Any]] = {}
    for place, piece in enumerate(pieces):
        more, gains = parser.take(piece, place == len(pieces) - 1)
        text += more
        for gain in gains:
            known = calls.setdefault(gain["index"], {"arguments": ""})
            assert ("id" in gain) == ("name" in gain["function"]) == ("name" not in known)
            known["arguments"] += gain["function"].pop("arguments")
            known.update(gain["function"])
    assert list(calls) == list(range(len(calls)))
    pairs = [(call["name"], call["arguments"]) for call in calls.values()]
    assert parser.finish_reason("length") == "length"
    return text, pairs, parser.finish_reason("stop")


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as a template writes them."""
    each = [form.call.replace("NAME", name).replace("ARGUMENTS", text) for name, text in calls]
    return form.begin + form.between.join(each) + form.end


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        (HERMES, written(HERMES, F), ("", [F])),
        (HERMES, f"\n\n{written(HERMES, F, G)}\n", ("", [F, G])),
        (HERMES, f"Well.\n{written(HERMES, F)}\nSo.", ("Well.\n", [F], "\nSo.")),
        (HERMES, "a < b", ("a < b", [])),
        (HERMES, "  ", ("  ", [])),
        (HERMES, "<tool_call>" + " " * 65 + "{", None),
        (HERMES, "<tool_call>\n{'name': 'f'}\n</tool_call>", None),
        (HERMES, written(HERMES, ("unknown", TWO)), None),
        (HERMES, "<<tool_call>" + written(HERMES, G), ("<<tool_call>", [G])),
        (HERMES, written(HERMES, G) + CUT, ("", [G], CUT)),
        (HERMES, written(HERMES, F)[:-3], ("", [F])),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1},"x":2}</tool_call>',
         ("", [("f", '{"a":1}')], ',"x":2}</tool_call>')),
        (HERMES, '<tool_call> {"type": "function","name" :"f", "arguments":{} }</tool_call>',
         ("", [("f", TWO)])),
        (LLAMA3, written(LLAMA3, F), ("", [F])),
        (LLAMA3, f" {written(LLAMA3, F)};\n{written(LLAMA3, G)}", ("", [F, G])),
        (LLAMA3, f"{written(LLAMA3, F)}\n<|python_tag|>{written(LLAMA3, G)}", ("", [F, G])),
        (LLAMA3, f"Well. <|python_tag|>{written(LLAMA3, F)}", ("Well. ", [F])),
        (LLAMA3, f"Well. {written(LLAMA3, F)}", None),
        (LLAMA3, '{"name": "Anna", "parameters": 5}', None),
        (LLAMA3, "<|python_tag|>print(1)", None),
        (MISTRAL, written(MISTRAL, F, G), ("", [F, G])),
        (MISTRAL, f'[1] [TOOL_CALLS] [{{"name": "f", "arguments": {ONE}, "id": "abc"}}] ',
         ("[1] ", [F])),
        (MISTRAL, "[TOOL_CALLS][]", None),
        (MISTRAL_2025, written(MISTRAL_2025, F, G), ("", [F, G])),
        (MISTRAL_2025, f"a [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS] {ONE}", ("a ", [F])),
        (MISTRAL_2025, "[TOOL_CALLS]f{}", None),
    ],
)  # fmt: skip
def test_what_is_a_call(form: ToolFormat, text: str, wanted: Any) -> None:
    before, calls, *after = wanted or (text, [])
    whole = parsed(form, text)
    assert whole == ("".join([before, *after]), calls, "tool_calls" if calls else "stop")
    assert parsed(form, *text, "") == whole
    for place in range(len(text)):
        assert parsed(form, text[:place], text[place:]) == whole


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_ends_within_a_call(form: ToolFormat) -> None:
    text = "" if form is LLAMA3 else "Well. "
    text += written(form, F)
    begin, end = text.index(ONE), text.index(ONE) + len(ONE)
    for place in range(len(text)):
        cut = parsed(form, text[:place])
        if place <= begin:
            assert cut == (text[:place], [], "stop")
        else:
            calls = [("f", ONE[: place - begin])]
            reason = "tool_calls" if place >= end else "stop"
            assert cut == (text.partition(written(form, F))[0], calls, reason)


PIECES = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[",
    "]", "<", "{", "}", '{"name": "f", "arguments": ', '{"name": "g_2", "parameters": {', "{}", '"',
    "\\", "f", " ", "\n", ",", ";", "é🙂",
]  # fmt: skip


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_cuts_change_nothing(form: ToolFormat, text: str, places: list[int]) -> None:
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(cuts)]
    whole = parsed(form, text)
    assert parsed(form, *pieces) == parsed(form, *text, "") == whole
    if not whole[1]:
        assert whole[0] == text, "text without a call is lost"
    for _, arguments in whole[1]:
        assert arguments in text


def test_the_form_is_that_of_the_template() -> None:
    for name, form in FORMS.items():
        assert find_form(TEMPLATES[name][0]) is form


SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 3}},
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_what_a_grammar_allows(tmp_path: Path, name: str, must: bool, is_parallel: bool) -> None:
    form = FORMS[name]
    model = EngineArgs(str(write(tmp_path, name)), device="cpu").create_engine_config().model
    tokenizer = load_tokenizer(model)
    added = tokenizer.hf.get_added_vocab()
    tokens = {marker: added[marker] for marker in form.markers if marker in added}
    grammar = choice_grammar(form, {"f": SCHEMA, "g_2": SCHEMA}, tokens, must, is_parallel)
    whole = to_grammar(StructuredOutputsParams(grammar=grammar), Thinking.NONE, ())

    def allows(text: str) -> bool:
        matcher = tokenizer.vocabulary(model).matcher(whole)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    calls = [("f", '{"city": "a"}'), ("g_2", '{"city": "abc"}')]
    for call in calls:
        text = written(form, call)
        assert [allows(text), allows("\n\n" + text)] == [True, True]
        assert not any(map(allows, (text + "x", text[:-1])))
    assert allows(written(form, *calls)) == (is_parallel and form is not LLAMA3)
    for text in ("", "Well.", "Well." + written(form, calls[0])):
        assert allows(text) != must
    for wrong in (("f", '{"city": "abcd"}'), ("f", "{}"), ("h", '{"city": "a"}')):
        assert not allows(written(form, wrong))
