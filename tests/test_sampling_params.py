"""`SamplingParams`: checked when it is made, range and value in the message."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from tpengine import RequestOutputKind, SamplingParams
from tpengine.errors import InvalidSamplingParamsError, RequestError

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "[0, inf)"),
    ("temperature", math.nan, "[0, inf)"),
    ("temperature", math.inf, "[0, inf)"),
    ("temperature", "hot", "a number"),
    ("temperature", None, "a number"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"),
    ("top_p", math.nan, "(0, 1]"),
    ("top_k", 0, "(-1 keeps all tokens) must be at least 1"),
    ("top_k", -2, "(-1 keeps all tokens) must be at least 1"),
    ("top_k", 2.5, "an integer"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("min_p", math.nan, "[0, 1]"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", 3.0, "an integer"),
    ("max_tokens", True, "an integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most max_tokens = 16"),
    ("logprobs", -1, "[0, 64]"),
    ("logprobs", 65, "[0, 64]"),
    ("logprobs", True, "an integer"),
    ("seed", 2**64, "[-9223372036854775808, 18446744073709551615]"),
    ("seed", 1.5, "an integer"),
    ("n", 0, "at least 1"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", math.nan, "[-2, 2]"),
    ("repetition_penalty", 0.0, "(0, 2]"),
    ("stop", [""], "non-empty strings"),
    ("stop", ["a", 3], "non-empty strings"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", [1.5], "an integer"),
]
NOT_YET: list[tuple[str, Any]] = [
    ("spaces_between_special_tokens", False),
    ("truncate_prompt_tokens", 5),
]


@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE)
def test_out_of_range(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidSamplingParamsError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert name in message
    assert limit in message
    shown = value[-1] if isinstance(value, list) else value
    assert str(shown) in message
    assert isinstance(raised.value, RequestError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


@pytest.mark.parametrize(("name", "value"), NOT_YET)
def test_what_is_not_done_is_refused_not_ignored(name: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=rf"{name} = .*not supported.*leave it"):
        SamplingParams(**{name: value})


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0},
        {"max_tokens": None, "min_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 64},
        {"seed": 2**64 - 1},
        {"seed": -1},
        {"best_of": 1},
        {"stop": None, "stop_token_ids": None},
    ],
)
def test_borders_are_inside(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == (() if name.startswith("stop") else value)


def test_normal_forms() -> None:
    assert SamplingParams(top_k=-1).top_k is None
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams().greedy
    assert SamplingParams(stop=["a"]) == SamplingParams(stop="a")
    with pytest.raises(InvalidSamplingParamsError, match="detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["ignore_eos", "detokenize", "skip_special_tokens"])
def test_flags_are_booleans(name: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=f"{name} must be True or False, got 'no'"):
        SamplingParams(**{name: "no"})


def test_output_kind_by_name() -> None:
    assert SamplingParams(output_kind="delta").output_kind is RequestOutputKind.DELTA
    with pytest.raises(InvalidSamplingParamsError, match="'final_only', got 'last'"):
        SamplingParams(output_kind="last")
