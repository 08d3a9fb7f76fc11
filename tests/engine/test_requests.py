"""What is refused, at construction and when a request is added."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.byte_llama import VOCAB_SIZE, make_engine, run, write
from transformers import ByT5Tokenizer

from tpengine import LLMEngine, SamplingParams
from tpengine.engine.requests import read_sampling_params, sampling_rules
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError
from tpengine.executor import codec
from tpengine.messages import SamplingRules


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    with make_engine(write(tmp_path_factory.mktemp("model"))) as engine:
        yield engine


BEAMS = {"n": 2, "use_beam_search": True, "temperature": 0.0}
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\] .* got nan"),
    ({"logit_bias": {5: -math.inf}}, r"logit_bias\[5\] .* got -inf"),
    ({"logit_bias": {5: 2e6}}, r"logit_bias\[5\] must be at least -1000000 and at most 1000000"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias: an id must be an integer, got '5'"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: an id must be at least 0, got -1"),
    ({"logit_bias": [5, 1.0]}, "logit_bias must map ids to numbers"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [1, -3]}, r"allowed_token_ids\[1\] must be at least 0, got -3"),
    ({"allowed_token_ids": 3}, "allowed_token_ids must be a list, got 3"),
    ({"allowed_token_ids": [1.0]}, r"allowed_token_ids\[0\] must be an integer, got 1.0"),
    ({"bad_words": ["fine", " "]}, "bad_words must hold strings that are not blank, got ' '"),
    ({"bad_words": [3]}, r"bad_words\[0\] must be a text, got 3"),
    ({"bad_words_token_ids": [[]]}, "bad_words_token_ids holds an empty sequence"),
    ({"bad_words_token_ids": [3]}, r"bad_words_token_ids\[0\] must be a list, got 3"),
    ({"bad_words_token_ids": [[3, -1]]}, r"bad_words_token_ids\[0\]\[1\] must be at least 0"),
    ({"logits_processors": [3]}, 'must hold functions, .* "module:function", got 3'),
    ({"logits_processors": [b"bytes"]}, "must hold functions, .* got b'bytes'"),
    ({"logits_processors": ["json"]}, "\"module:function\", got 'json'"),
    ({"logits_processors": ["a b:c"]}, '"module:function"'),
    ({"logits_processors": 3}, "logits_processors must be a list, got 3"),
    ({"n": 3, "best_of": 2}, "best_of must be at least n = 3, got 2"),
    ({"n": 2, "temperature": 0.0}, "use_beam_search=True, or a temperature above 0"),
    ({"best_of": 2, "temperature": 0.0}, "use_beam_search=True, or a temperature above 0"),
    ({"n": 2, "use_beam_search": True}, "beam search needs temperature = 0.0, got 1.0"),
    ({"use_beam_search": True, "temperature": 0.0}, "best_of .or n. of at least 2"),
    ({"length_penalty": 2.0}, "only for use_beam_search=True"),
    ({"early_stopping": True}, "only for use_beam_search=True"),
    ({**BEAMS, "early_stopping": "later"}, "must be one of False, True, 'never', got 'later'"),
    ({**BEAMS, "top_p": 0.5}, "beam search needs top_p = 1.0, got 0.5"),
    ({**BEAMS, "stop": "x"}, "beam search needs stop"),
    ({**BEAMS, "length_penalty": float("nan")}, "length_penalty must be at"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=lambda v: str(v)[:40])
def test_refused_at_construction(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=message):
        SamplingParams(**values)


UNFIT_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "logprobs = 21 is more than max_logprobs = 20"),
    ({"prompt_logprobs": -1}, "= -1 asks for all 288 tokens, more than max_logprobs = 20"),
    ({"logit_bias": {0: 1, VOCAB_SIZE: 1}}, f"logit_bias holds {VOCAB_SIZE}, .* 287"),
    ({"allowed_token_ids": [4, 999]}, "allowed_token_ids holds 999"),
    ({"bad_words_token_ids": [[4, 288]]}, "bad_words_token_ids holds 288"),
    ({"bad_words": "\ud800"}, "bad_words holds .* cannot be tokenized"),
    ({"logits_processors": "no_such_module:f"}, "no_such_module:f' cannot be imported: Module"),
    ({"logits_processors": "support.logits_processors:absent"}, "be imported: AttributeError"),
    ({"logits_processors": "support.logits_processors:NOT_A_FUNCTION"}, "is a int, not a function"),
    ({"logits_processors": "support.logits_processors:one_argument"}, r"must take \(output_ids"),
    ({"logits_processors": [len]}, r"'len' must take \(output_ids"),
    ({"logits_processors": "broken_processors:f"}, "cannot be imported: ZeroDivisionError"),
]


@pytest.mark.parametrize(("values", "message"), UNFIT_VALUES, ids=lambda v: str(v)[:40])
def test_refused_when_added(
    engine: LLMEngine, values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "broken_processors.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidSamplingParamsError, match=message):
        engine.add_request("bad", None, SamplingParams(**values), prompt_token_ids=[5, 6])
    assert not engine.has_unfinished_requests()
    changed = SamplingParams()
    for name, value in values.items():
        setattr(changed, name, value)
    with pytest.raises(InvalidSamplingParamsError, match=message):
        engine.add_request("bad", None, changed, prompt_token_ids=[5, 6])
    # The engine continues, and the id can be used again.
    (output,) = run(engine, [([5, 6], SamplingParams(temperature=0, max_tokens=2))])
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 2


def read(
    engine: LLMEngine,
    params: SamplingParams,
    tokenizer: Any = None,
    is_local: bool = True,
    **model: Any,
) -> SamplingRules:
    config = replace(engine.get_model_config(), **model)
    params = read_sampling_params(params, config, tokenizer)
    return sampling_rules(params, config, tokenizer, is_local=is_local)


def test_texts_need_a_tokenizer(engine: LLMEngine) -> None:
    with pytest.raises(InvalidSamplingParamsError, match="bad_words needs a tokenizer"):
        read(engine, SamplingParams(bad_words=["x"]))
    params = SamplingParams(bad_words_token_ids=[[3, 4]])
    assert read(engine, params) == SamplingRules(bad_words_token_ids=[[3, 4]])


def test_bad_words_become_ids_with_and_without_space(engine: LLMEngine) -> None:
    tokenizer = engine.tokenizer
    params = SamplingParams(bad_words=["ab", " xy", "ab"], bad_words_token_ids=[[9, 9]])
    original = params.clone()
    checked = read(engine, params, tokenizer)
    assert params == original, "the user's object was changed"
    words = [[9, 9], *(tokenizer.encode(w, False) for w in ("ab", " ab", "xy", " xy"))]
    assert checked.bad_words_token_ids == words
    assert [len(word) for word in words] == [2, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(-1, -1, VOCAB_SIZE), (-1, VOCAB_SIZE, VOCAB_SIZE), (20, 20, 20)],
)
def test_log_probabilities_of_the_whole_vocabulary(
    engine: LLMEngine, count: int, limit: int, expected: int
) -> None:
    params = SamplingParams(logprobs=count, prompt_logprobs=count)
    checked = read(engine, params, max_logprobs=limit)
    assert (checked.logprobs, checked.prompt_logprobs) == (expected, expected)
    assert params.logprobs == count


def test_the_engine_has_a_copy_of_its_own(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=[])
    expected = run(engine, [([5, 6], params)])[0].outputs[0].token_ids
    engine.add_request("0", None, params, prompt_token_ids=[5, 6])
    params.max_tokens = 1
    params.stop_token_ids += range(VOCAB_SIZE)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == expected
    assert len(expected) == 5


def test_a_prompt_is_cut_to_its_last_tokens(engine: LLMEngine) -> None:
    max_model_len = engine.get_model_config().max_model_len
    long = [5 + i % 200 for i in range(max_model_len + 10)]
    plain = SamplingParams(temperature=0, max_tokens=4)
    cut = replace(plain, truncate_prompt_tokens=30)
    (whole, short) = run(engine, [(long[-30:], plain), (long, cut)])
    assert short.prompt_token_ids == long[-30:]
    assert short.outputs[0].token_ids == whole.outputs[0].token_ids
    (shorter,) = run(engine, [(long[:20], cut)])
    assert shorter.prompt_token_ids == long[:20]


def test_spaces_between_special_tokens(engine: LLMEngine) -> None:
    params = SamplingParams(spaces_between_special_tokens=False)
    read(engine, params, engine.tokenizer)
    slow = Tokenizer(ByT5Tokenizer())
    with pytest.raises(InvalidSamplingParamsError, match="spaces_between_special_tokens = False"):
        read(engine, params, slow)
    read(engine, replace(params, detokenize=False), slow)


def test_functions_leave_this_process_as_bytes(engine: LLMEngine) -> None:
    banned = [4, 5]

    def ban(output_ids: list[int], logits: Any) -> Any:
        logits[banned] = -math.inf
        return logits

    params = SamplingParams(logits_processors=[ban, "support.logits_processors:keep"])
    assert read(engine, params).logits_processors == params.logits_processors
    data, name = read(engine, params, is_local=False).logits_processors
    assert name == "support.logits_processors:keep"
    banned.append(6)  # what travelled is a copy
    assert pickle.loads(data)([], np.zeros(8)).tolist() == [0, 0, 0, 0, -math.inf, -math.inf, 0, 0]
    for held, message in ((threading.Lock(), "TypeError"), (bytes(2 << 20), "more than 1048576")):
        holds = SamplingParams(logits_processors=[lambda ids, logits, held=held: (held, logits)])
        with pytest.raises(InvalidSamplingParamsError, match=message):
            read(engine, holds, is_local=False)


def test_params_survive_pickling_and_their_makers_changes() -> None:
    bias = {3: 1.5}
    params = SamplingParams(
        logit_bias=bias, allowed_token_ids=[4, 5], logits_processors="support.logits_processors:f"
    )
    bias[3] = 9.0
    assert params.logit_bias == {3: 1.5}
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize("error", [TypeError("no plain data"), OverflowError("too large")], ids=str)
def test_what_cannot_be_sent_to_ranks_is_refused(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Else the step that first has it would fail, and with it all requests."""

    monkeypatch.setattr(codec, "encode", Mock(side_effect=error))
    assert read(engine, SamplingParams()).temperature == 1.0, "one rank is sent nothing"
    with pytest.raises(InvalidSamplingParamsError, match=f"cannot be sent to the ranks.*{error}"):
        read(engine, SamplingParams(), is_local=False)
