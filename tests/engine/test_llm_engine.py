"""`LLMEngine`: requests are added, aborted and finished at any moment."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest
from support.engines import complete, greedy, make_engine, run
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN

from tpengine import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tpengine.errors import DuplicateRequestError
from tpengine.executor.local_executor import LocalExecutor


def test_add_requests_and_step_until_done(engine: LLMEngine, prompt: list[int]) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    for i in range(3):
        engine.add_request(str(i), None, greedy(4 + i), prompt_token_ids=prompt)
    assert engine.get_num_unfinished_requests() == 3
    assert engine.get_model_config().vocab_size == 512
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
        assert engine.last_step.num_rows <= 3
        assert engine.last_step.step_s >= engine.last_step.model_s > 0
    assert finished == ["0", "1", "2"]
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_interval_merges_tokens_and_changes_none(
    models: ModelShop, prompt: list[int], expected: tuple[int, ...], n: int
) -> None:
    temperature = 0.0 if n == 1 else 1.0
    answers = [expected[:10]] if n == 1 else []
    sizes = {1: [1] * 10, 3: [1, 3, 3, 3], 4: [1, 4, 4, 1], 50: [1, 9]}
    for interval, wanted in sizes.items():
        with make_engine(models.folder(PLAIN, tokenizer=True), stream_interval=interval) as engine:
            for kind in RequestOutputKind:
                params = SamplingParams(
                    n=n,
                    temperature=temperature,
                    seed=5,
                    max_tokens=10,
                    ignore_eos=True,
                    logprobs=1,
                    output_kind=kind,
                )
                engine.add_request(kind.value, None, params, prompt_token_ids=prompt)
            outputs = run(engine)
        by_kind = {
            kind: [one.outputs for one in outputs if one.request_id == kind.value]
            for kind in RequestOutputKind
        }
        (final,) = by_kind[RequestOutputKind.FINAL_ONLY]
        for kind, reports in by_kind.items():
            flags = [one.finished for one in outputs if one.request_id == kind.value]
            assert flags == [False] * (len(reports) - 1) + [True]
            assert all(one.finished() and one.finish_reason == "length" for one in reports[-1])
        answers = answers or [one.token_ids for one in final]
        for index, answer in enumerate(answers):
            assert final[index].token_ids == answer
            assert len(final[index].logprobs) == 10
            deltas = [completions[index] for completions in by_kind[RequestOutputKind.DELTA]]
            assert [len(one.token_ids) for one in deltas] == wanted
            assert [len(one.logprobs) for one in deltas] == wanted
            assert tuple(token for one in deltas for token in one.token_ids) == answer
            assert "".join(one.text for one in deltas) == final[index].text
            whole = [completions[index] for completions in by_kind[RequestOutputKind.CUMULATIVE]]
            assert [one.token_ids for one in whole] == [
                answer[:count] for count in itertools.accumulate(wanted)
            ]
            assert whole[-1].text == final[index].text


def test_duplicate_id(engine: LLMEngine, prompt: list[int]) -> None:
    engine.add_request("twin", None, greedy(2), prompt_token_ids=prompt)
    with pytest.raises(DuplicateRequestError, match="'twin'"):
        engine.add_request("twin", None, greedy(9), prompt_token_ids=prompt)
    outputs = run(engine)
    assert [len(o.outputs[0].token_ids) for o in outputs if o.finished] == [2]
    engine.add_request(
        "twin", None, greedy(3), prompt_token_ids=prompt
    )  # free again once it has finished
    assert len(run(engine)[-1].outputs[0].token_ids) == 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 8])
def test_abort_at_any_moment(
    models: ModelShop, prompt: list[int], expected: tuple[int, ...], num_steps: int
) -> None:
    """Prompts of 33 tokens in chunks of 16: waiting, between chunks, just sampled, decoding."""
    folder = models.folder(PLAIN, tokenizer=True)
    with make_engine(folder, max_num_batched_tokens=16, max_num_seqs=2) as engine:
        for name in ("kept", "gone", "never started"):
            engine.add_request(name, None, greedy(12), prompt_token_ids=prompt)
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        before = engine.num_free_blocks
        engine.abort_request(["gone", "never started", "unknown"])
        assert engine.get_num_unfinished_requests() == 1
        held = engine.num_total_blocks - engine.num_free_blocks
        assert held <= 3, "only the request that was kept holds blocks"
        if num_steps >= 4:
            assert engine.num_free_blocks > before
        engine.abort_request("gone")  # a second time changes nothing
        assert engine.has_unfinished_requests()
        outputs += run(engine)
        ends = {o.request_id: o.outputs[0] for o in outputs if o.finished}
        assert ends["kept"].token_ids == expected[:12]
        for name in ("gone", "never started"):
            assert ends[name].finish_reason == "abort"
            assert ends[name].token_ids == expected[: len(ends[name].token_ids)]
            assert sum(o.request_id == name and o.finished for o in outputs) == 1
        assert ends["never started"].token_ids == ()
        assert engine.num_free_blocks == engine.num_total_blocks


def test_abort_of_everything_is_still_reported(engine: LLMEngine, prompt: list[int]) -> None:
    engine.add_request("only", None, greedy(9), prompt_token_ids=prompt)
    engine.step()
    engine.abort_request("only")
    assert engine.get_num_unfinished_requests() == 0
    assert engine.has_unfinished_requests(), "there is an end to report"
    outputs = engine.step()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("only", "abort")]
    assert not engine.has_unfinished_requests()


def test_ctrl_c_keeps_the_step(
    engine: LLMEngine, prompt: list[int], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the middle of a step: the step ends, and the next call returns its outputs."""
    execute = LocalExecutor.execute_model

    def interrupted(self: LocalExecutor, step: Any) -> Any:
        answer = execute(self, step)
        signal.raise_signal(signal.SIGINT)
        return answer

    engine.add_request(
        "one", None, greedy(6, output_kind=RequestOutputKind.DELTA), prompt_token_ids=prompt
    )
    tokens = []
    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "execute_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for output in run(engine):
        tokens += output.outputs[0].token_ids
    assert tuple(tokens) == expected[:6]


def test_without_detokenizing(
    engine: LLMEngine, prompt: list[int], expected: tuple[int, ...]
) -> None:
    completion = complete(engine, prompt, greedy(8, detokenize=False))
    assert (completion.text, completion.token_ids) == ("", expected[:8])


@pytest.mark.parametrize("detokenize", [True, False])
def test_logprobs_carry_text(engine: LLMEngine, prompt: list[int], detokenize: bool) -> None:
    asked = greedy(4, logprobs=2, prompt_logprobs=1, detokenize=detokenize)
    beams = replace(asked, use_beam_search=True, n=2)
    for number, params in enumerate((asked, beams)):
        engine.add_request(str(number), None, params, prompt_token_ids=prompt)
    for output in run(engine):
        for one in output.outputs if output.finished else ():
            tokens = [*prompt, *one.token_ids]
            found = [*output.prompt_logprobs, *one.logprobs]
            for token_id, entries in zip(tokens[1:], found[1:], strict=True):
                text = engine.tokenizer.token_text(token_id) if detokenize else None
                assert entries[token_id].decoded_token == text
            assert [len(entries) for entries in one.logprobs] >= [2] * 4


def test_statistics_line(
    models: ModelShop, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("tpengine.engine.stats._LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(
        "tpengine.engine.stats.logger.info", lambda text, *args: lines.append(text % args)
    )
    args = EngineArgs(str(models.folder(TinyLlama())), dtype="float32")
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("one", None, greedy(3), prompt_token_ids=prompt)
        run(engine)
    assert len(lines) == 3
    assert "1 running, 0 waiting" in lines[0]
    assert "KV cache" in lines[0]
