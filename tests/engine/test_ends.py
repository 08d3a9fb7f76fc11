"""Why a sequence ends (`finish_reason`, `stop_reason`), and the text of its last tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.engines import complete, greedy, make_engine, run
from support.models import ModelShop
from support.patches import on_call
from support.tiny_llama import edit_json
from support.zoo import PLAIN

from tpengine import LLMEngine, SamplingParams
from tpengine.engine.detokenizer import Detokenizer
from tpengine.errors import InvalidSamplingParamsError

NO_EOS = {"temperature": 0.0, "ignore_eos": True}


def drop(content: dict[str, Any]) -> None:
    """No end id; a missing one would be filled in by the architecture's default."""
    content["eos_token_id"] = None


def test_max_tokens(engine: LLMEngine, prompt: list[int], expected: tuple[int, ...]) -> None:
    assert complete(engine, prompt, greedy(1)).token_ids == expected[:1]
    unbounded = complete(engine, prompt, SamplingParams(**NO_EOS, max_tokens=None))
    assert unbounded.finish_reason == "length"
    assert len(unbounded.token_ids) == PLAIN.max_positions - len(prompt)
    assert unbounded.token_ids[:64] == expected


def test_prompt_of_exactly_the_longest_length(models: ModelShop, prompt: list[int]) -> None:
    """Its last position still has logits: one token comes, and that is the end."""
    folder = models.folder(PLAIN, tokenizer=True)
    oracle = models.oracle(folder)
    with make_engine(folder, max_model_len=33) as engine:
        completion = complete(engine, prompt, greedy(9))
        assert completion.token_ids == oracle.answers([prompt])[0].token_ids[:1]
        assert completion.finish_reason == "length"
        shorter = complete(engine, prompt[:31], greedy(9))
        assert len(shorter.token_ids) == 2
        assert shorter.finish_reason == "length"


def test_stop_token_ids(engine: LLMEngine, prompt: list[int], expected: tuple[int, ...]) -> None:
    stop = expected[5]
    at = expected.index(stop)
    completion = complete(engine, prompt, greedy(20, stop_token_ids=[stop]))
    assert completion.token_ids == expected[: at + 1]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    beside_eos = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop])
    assert complete(engine, prompt, beside_eos).token_ids == completion.token_ids
    tokenizer = engine.tokenizer
    assert completion.text == tokenizer.decode(expected[:at])
    params = greedy(20, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert complete(engine, prompt, params).text == tokenizer.decode(expected[: at + 1])
    with pytest.raises(InvalidSamplingParamsError, match=r"512.*\[0, 511\]"):
        engine.add_request("bad", None, greedy(2, stop_token_ids=[512]), prompt_token_ids=prompt)


def test_no_end_too_early(engine: LLMEngine, prompt: list[int], expected: tuple[int, ...]) -> None:
    stop = expected[2]
    params = greedy(20, stop_token_ids=[stop], min_tokens=8, logprobs=1)
    completion = complete(engine, prompt, params)
    assert completion.token_ids[:2] == expected[:2]
    assert stop not in completion.token_ids[:8]
    assert len(completion.token_ids) >= 9
    # reported are the raw logits, in which the banned token still leads
    entries = completion.logprobs[2]
    assert entries[stop].rank == 1
    assert entries[completion.token_ids[2]].rank > 1


@pytest.mark.parametrize("source", ["config.json", "generation_config.json"])
def test_end_ids_of_the_model(
    models: ModelShop, tmp_path: Path, prompt: list[int], expected: tuple[int, ...], source: str
) -> None:
    folder = shutil.copytree(models.folder(PLAIN, tokenizer=True), tmp_path / "model")
    end = expected[6]
    at = expected.index(end)

    def change(content: dict[str, Any]) -> None:
        content["eos_token_id"] = [500, end]

    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, change if name == source else drop)
    with make_engine(folder) as engine:
        assert engine.get_model_config().end_token_ids == {500, end}
        ended = complete(engine, prompt, SamplingParams(temperature=0.0, max_tokens=20))
        assert ended.token_ids == expected[: at + 1]
        # As in vLLM 0.5.4, only the tokenizer's end token gives no reason.
        assert (ended.finish_reason, ended.stop_reason) == ("stop", end)
        assert ended.text == engine.tokenizer.decode(expected[:at])
        ignored = complete(engine, prompt, SamplingParams(**NO_EOS, max_tokens=20))
        assert ignored.token_ids == expected[:20]
        later = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=12)
        assert end not in complete(engine, prompt, later).token_ids[:12]


def test_end_token_of_the_tokenizer(models: ModelShop, tmp_path: Path, prompt: list[int]) -> None:
    folder = shutil.copytree(models.folder(PLAIN, tokenizer=True), tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, drop)
    with make_engine(folder) as engine:
        assert engine.get_model_config().end_token_ids == frozenset()
        for ids, ignore_eos, reason in (([], False, None), ([2], False, None), ([2], True, 2)):
            params = SamplingParams(
                temperature=5.0, seed=1, max_tokens=600, stop_token_ids=ids, ignore_eos=ignore_eos
            )
            completion = complete(engine, prompt, params)
            assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
            assert completion.token_ids[-1] == engine.tokenizer.eos_token_id == 2
            assert 2 not in completion.token_ids[:-1]


def test_stop_strings(engine: LLMEngine, prompt: list[int]) -> None:
    whole = complete(engine, prompt, greedy(48)).text
    stop = whole[13:22]
    before = whole[: whole.index(stop)]
    completion = complete(engine, prompt, greedy(48, stop=["never said", stop]))
    assert completion.text == before
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    kept = complete(engine, prompt, greedy(48, stop=stop, include_stop_str_in_output=True))
    assert kept.text == before + stop
    assert len(kept.token_ids) < 48


def test_special_tokens_in_the_text(engine: LLMEngine, prompt: list[int]) -> None:
    fields = {"temperature": 3.0, "seed": 4, "max_tokens": 400, "ignore_eos": True}
    plain = complete(engine, prompt, SamplingParams(**fields))
    special = complete(engine, prompt, SamplingParams(**fields, skip_special_tokens=False))
    assert special.token_ids == plain.token_ids
    assert {0, 1, 2, 3} & set(plain.token_ids)
    assert engine.tokenizer.decode(plain.token_ids, True) == plain.text
    assert engine.tokenizer.decode(plain.token_ids, False) == special.text
    assert len(special.text) > len(plain.text)


@pytest.mark.parametrize("end", ["aborted", "complete"])
def test_a_text_that_cannot_be_finished_fails_one_request_alone(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with make_engine(models.folder(PLAIN, tokenizer=True)) as engine:
        engine.add_request("bad", None, greedy(4), prompt_token_ids=[5] * 5)
        engine.add_request("good", None, greedy(8), prompt_token_ids=[6] * 5)
        engine.step()

        def fail(_: Detokenizer) -> None:
            if len(set(finished)) == 1:  # of the request that ends first
                raise ZeroDivisionError("on purpose")

        finished = on_call(monkeypatch, Detokenizer, "finish", fail)
        if end == "aborted":
            engine.abort_request("bad")
        ends = {output.request_id: output for output in run(engine) if output.finished}
        bad, good = ends["bad"], ends["good"]
        assert bad.outputs[0].finish_reason == ("abort" if end == "aborted" else "error")
        assert "on purpose" in bad.error
        assert good.error is None
        assert len(good.outputs[0].token_ids) == 8
        assert engine.num_free_blocks == engine.num_total_blocks
