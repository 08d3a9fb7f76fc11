"""Log probabilities of prompts against transformers: whole, in chunks, sliced, recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.byte_llama import make_engine, random_prompts, run
from support.oracle import Oracle
from support.patches import on_call

from tpengine import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from tpengine.worker import model_runner

LENGTHS = [1, 2, 16, 17, 65, 130]
NUM_TOP = [0, 1, 5, 20, 3, 2]


def _check(oracle: Oracle, prompt: list[int], output: RequestOutput, num_top: int) -> None:
    with torch.inference_mode():
        expected = torch.log_softmax(oracle.model(torch.tensor([prompt])).logits[0], dim=-1)
    actual = output.prompt_logprobs
    assert len(actual) == len(prompt)
    assert actual[0] is None
    for position in range(1, len(prompt)):
        entries, row = actual[position], expected[position - 1]
        own = prompt[position]
        # Tokens whose logits differ by a rounding error may have the other order.
        assert len(set(entries) ^ {*row.topk(max(num_top, 1)).indices.tolist()[:num_top], own}) <= 2
        assert list(entries).count(own) == 1
        assert entries[own].rank == 1 + int((row > row[own]).sum())
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.decoded_token is not None
    assert num_top in (0, 1) or len(actual[-1] or [0, 0]) >= num_top


def _requests(**kwargs: Any) -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt, SamplingParams(prompt_logprobs=num_top, **({"max_tokens": 5} | kwargs)))
        for prompt, num_top in zip(random_prompts(LENGTHS, seed=4), NUM_TOP, strict=True)
    ]


def _check_all(oracle: Oracle, outputs: list[RequestOutput]) -> None:
    for prompt, output, num_top in zip(
        random_prompts(LENGTHS, seed=4), outputs, NUM_TOP, strict=True
    ):
        _check(oracle, prompt, output, num_top)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 64, 512])
def test_equal_transformers(folder: Any, oracle: Oracle, max_num_batched_tokens: int) -> None:
    """Prompts in chunks of 7 tokens, in a few chunks, and whole."""
    with make_engine(folder, max_num_batched_tokens=max_num_batched_tokens) as engine:
        # Among requests that ask for none.
        others = [([9] * 20, SamplingParams(max_tokens=8, logprobs=2))] * 2
        outputs = run(engine, [*_requests(), *others])
    _check_all(oracle, outputs[:-2])
    assert all(output.prompt_logprobs is None for output in outputs[-2:])


def test_slices_are_bounded(folder: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice has more rows of logits than the memory profile ran with."""
    monkeypatch.setattr(model_runner, "PROMPT_SLICE_ROWS", 11)
    with make_engine(folder, max_num_batched_tokens=512, max_num_seqs=2) as engine:
        calls = on_call(monkeypatch, torch, "log_softmax")
        outputs = run(engine, _requests())
    monkeypatch.undo()
    sizes = [len(logits) for logits, *_ in calls]
    assert max(sizes) == 11
    assert len(sizes) > sum(LENGTHS) // 11
    _check_all(oracle, outputs)


def test_after_preemption_in_the_middle(folder: Any, oracle: Oracle) -> None:
    """Prompts are computed twice, the second time together with output."""
    requests = _requests(max_tokens=40, ignore_eos=True)
    with make_engine(
        folder, num_device_blocks_override=12, max_model_len=192, max_num_batched_tokens=32
    ) as engine:
        outputs = run(engine, requests)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    _check_all(oracle, outputs)


def test_nothing_before_the_prompt_is_complete(engine: LLMEngine) -> None:
    """An abort in the middle of a prompt reports none, and does not affect later requests."""
    params = SamplingParams(prompt_logprobs=1, output_kind=RequestOutputKind.CUMULATIVE)
    engine.add_request("0", None, params, prompt_token_ids=random_prompts(LENGTHS, seed=4)[-1])
    assert engine.step() == []
    engine.abort_request("0")
    (output,) = engine.step()
    assert output.prompt_logprobs is None
    assert output.outputs[0].finish_reason == "abort"
    (again,) = run(engine, [([5, 6, 7], params)])
    assert [entry is None for entry in again.prompt_logprobs or []] == [True, False, False]
