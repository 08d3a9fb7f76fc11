"""`SamplingParams`: checked when it is made and after a change, range and value in the message; its
attributes read as in vLLM 0.5.4."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpengine import RequestOutputKind, SamplingParams
from tpengine.errors import InvalidSamplingParamsError, RequestError
from tpengine.options import parameters
from tpengine.sampling_params import SamplingType

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("temperature", math.nan, "at least 0 and finite"),
    ("temperature", math.inf, "at least 0 and finite"),
    ("temperature", "hot", "a number"),
    ("temperature", None, "a number"),
    ("frequency_penalty", True, "a number"),
    ("top_p", 0.0, "more than 0 and at most 1"),
    ("top_p", np.float32(1.5), "more than 0 and at most 1"),
    ("top_k", 0, "at least 1, got 0; -1 keeps all tokens"),
    ("top_k", 2.5, "an integer"),
    ("max_tokens", True, "an integer"),
    ("max_tokens", np.float64(3.0), "an integer"),
    ("max_tokens", np.int32(0), "at least 1"),
    ("min_tokens", 17, "at most max_tokens = 16"),
    ("seed", 1.5, "an integer"),
    ("stop", [""], "[0] must be a text that is not empty"),
    ("stop", ["a", 3], "[1] must be a text, got 3"),
    ("stop_token_ids", [-1], "[0] must be at least 0"),
    ("stop_token_ids", [1.5], "an integer"),
    ("max_tokens", 2**64, "at most 9223372036854775807"),
    ("min_tokens", 2**63, "at most 9223372036854775807"),
    ("truncate_prompt_tokens", 10**90, "at most 9223372036854775807"),
    ("logprobs", np.uint64(2**64 - 1), "at most 9223372036854775807"),
    ("ignore_eos", "no", "True or False, got 'no'"),
    ("output_kind", "last", "'final_only', got 'last'"),
]
for name, declared in parameters(SamplingParams).items():
    if isinstance(getattr(SamplingParams(), name), int | float | None) and not declared.max_entries:
        if math.isfinite(declared.at_least):
            OUT_OF_RANGE.append((name, declared.at_least - 1, f"at least {declared.at_least}"))
        if math.isfinite(declared.at_most):
            OUT_OF_RANGE.append((name, declared.at_most + 1, f"at most {declared.at_most}"))


@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE)
def test_out_of_range(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidSamplingParamsError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidSamplingParamsError) as raised:
        params.check()
    assert str(raised.value) == message
    assert name in message
    assert limit in message
    shown = value[-1] if isinstance(value, list) else value
    assert str(shown) in message
    assert isinstance(raised.value, RequestError)
    assert raised.value.field == name
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


@pytest.mark.parametrize("stop", ["\ud83d", ["a", "b\udcff"], ["\ud800" * 1000]], ids=len)
def test_stop_strings_are_valid_unicode(stop: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=r"stop holds .*valid Unicode") as raised:
        SamplingParams(stop=stop)
    assert len(str(raised.value).encode()) < 200


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    params = SamplingParams()
    params.temprature = 1.0
    with pytest.raises(InvalidSamplingParamsError, match="'temprature'; did you mean temperature"):
        params.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 100.0}, {"top_p": 1e-9}, {"top_k": 1}, {"top_k": -1},
        {"min_p": 1.0}, {"max_tokens": None, "min_tokens": 5}, {"logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": 10**6}, {"seed": 2**64 - 1}, {"seed": -(2**63)},
        {"best_of": 1}, {"truncate_prompt_tokens": 1}, {"length_penalty": 1.000001},
    ],
)  # fmt: skip
def test_borders_are_inside(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, {"top_k": -1, "stop": [], "stop_token_ids": [], "best_of": 1}),
        ({}, {"logits_processors": None, "seed": None, "logprobs": None}),
        ({"top_k": None}, {"top_k": -1}),
        ({"top_k": 2**40}, {"top_k": -1}),
        ({"n": 3}, {"best_of": 3}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "end"}, {"stop": ["end"]}),
        ({"stop": ("a", "b"), "stop_token_ids": (3, 4)}, {"stop": ["a", "b"]}),
        ({"stop_token_ids": (3, 4, 3)},
         {"stop_token_ids": [3, 4, 3], "all_stop_token_ids": frozenset({3, 4})}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"logprobs": False}, {"logprobs": 0}),
        ({"temperature": 9e-6, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
         {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "greedy": True}),
        ({"temperature": 1e-5, "top_k": 3}, {"top_k": 3, "greedy": False}),
        ({"stop": ["abc", "a"]}, {"output_text_buffer_length": 2}),
        ({"stop": "abc", "include_stop_str_in_output": True}, {"output_text_buffer_length": 0}),
        ({"temperature": 0}, {"sampling_type": SamplingType.GREEDY, "greedy": True}),
        ({"temperature": 0, "seed": 5}, {"sampling_type": SamplingType.GREEDY}),
        ({}, {"sampling_type": SamplingType.RANDOM, "greedy": False}),
        ({"seed": 5}, {"sampling_type": SamplingType.RANDOM_SEED}),
        ({"use_beam_search": True, "n": 2, "temperature": 0}, {"sampling_type": SamplingType.BEAM}),
        ({"logits_processors": len}, {"logits_processors": [len]}),
        ({"logits_processors": "os.path:join"}, {"logits_processors": ["os.path:join"]}),
        ({"allowed_token_ids": (3,), "bad_words": "no"}, {"allowed_token_ids": [3]}),
        ({"bad_words": "no", "bad_words_token_ids": ((1, 2),)}, {"bad_words": ["no"]}),
        ({"bad_words_token_ids": ((1, 2),)}, {"bad_words_token_ids": [[1, 2]]}),
        ({"output_kind": "delta"}, {"output_kind": RequestOutputKind.DELTA}),
    ],
    ids=str,
)  # fmt: skip
def test_attributes_read_as_in_vllm(fields: dict[str, Any], read: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    values = {name: getattr(params, name) for name in read}
    assert repr(values) == repr(read)  # also tells a tuple from a list
    params.check()
    assert {name: getattr(params, name) for name in read} == read


def test_parameters_of_vllm_come_first_and_have_positions() -> None:
    kinds = [parameter.kind for parameter in inspect.signature(SamplingParams).parameters.values()]
    assert kinds[:26] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 26
    assert set(kinds[26:]) == {inspect.Parameter.KEYWORD_ONLY}


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidSamplingParamsError, match="detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_numbers_of_numpy_become_those_of_python() -> None:
    integers = ("n", "best_of", "top_k", "seed", "max_tokens", "logprobs", "truncate_prompt_tokens")
    floats = ("presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "min_p")
    pairs: dict[str, tuple[Any, Any]] = {name: (np.int64(5), 5) for name in integers}
    pairs |= {name: (np.float32(0.5), 0.5) for name in floats}
    pairs |= {name: (np.array([7, 8]), [7, 8]) for name in ("stop_token_ids", "allowed_token_ids")}
    pairs["bad_words_token_ids"] = (np.array([[7, 8]]), [[7, 8]])
    pairs["logit_bias"] = ({np.int32(7): np.float16(0.5)}, {7: 0.5})
    pairs["temperature"] = (np.float64(0.5), 0.5)
    params = SamplingParams(**{name: value for name, (value, _) in pairs.items()})
    plain = SamplingParams(**{name: value for name, (_, value) in pairs.items()})
    assert repr(params) == repr(plain)


def _processor(output_ids: list[int], logits: Any) -> Any:
    return logits


def test_attributes_can_be_assigned() -> None:
    params = SamplingParams(n=2)
    params.stop, params.top_k, params.max_tokens = "end", None, np.int64(3)  # type: ignore
    params.check()
    assert (params.stop, params.top_k, params.max_tokens) == (["end"], -1, 3)
    params.n = 3
    with pytest.raises(InvalidSamplingParamsError, match=r"n = 3, got 2; None makes it n"):
        params.check()
    params.best_of = None
    params.check()
    assert params.best_of == 3
    assert len({params, params, replace(params)}) == 2  # by identity, as in vLLM


def test_clone_shares_the_processors_alone() -> None:
    params = SamplingParams(
        stop="a", logit_bias={3: 1.0}, bad_words_token_ids=[[1, 2]], logits_processors=[_processor]
    )
    cloned = params.clone()
    assert cloned == params
    cloned.stop.append("b")
    cloned.logit_bias[4] = 1.0
    cloned.bad_words_token_ids[0].append(3)
    cloned.logits_processors.append(_processor)
    assert (params.stop, params.logit_bias) == (["a"], {3: 1.0})
    assert (params.bad_words_token_ids, params.logits_processors) == ([[1, 2]], [_processor])
    assert cloned.logits_processors[0] is _processor


@pytest.mark.parametrize(
    ("config", "end_id", "ignore_eos", "expected"),
    [
        ({"eos_token_id": [2, 9]}, 2, False, [5, 9]),
        ({"eos_token_id": 5}, None, False, [5]),
        ({"eos_token_id": 9}, 2, True, [5]),
        ({}, 2, False, [5]),
    ],
)
def test_end_tokens_of_a_generation_config(
    config: dict[str, Any], end_id: int | None, ignore_eos: bool, expected: list[int]
) -> None:
    params = SamplingParams(stop_token_ids=[5], ignore_eos=ignore_eos)
    params.update_from_generation_config(config, end_id)
    assert params.stop_token_ids == expected


def test_none_stands_for_the_default() -> None:
    params = SamplingParams.from_optional(n=2, best_of=None, top_p=None, stop=None, max_tokens=7)
    assert params == SamplingParams(n=2, max_tokens=7)
