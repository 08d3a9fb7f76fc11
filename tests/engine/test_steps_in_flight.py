"""Steps that are planned and sent before earlier ones are answered, and drafts, change no output:
tokens, texts, log probabilities as bits, ends. That the plans are right is checked in
`scheduling`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.engines import greedy, with_steps_in_flight
from support.foretold import foretell, totals
from support.gpu_walk import GpuWalk
from support.models import ModelShop
from support.ranks import ThreadedExecutor
from support.zoo import PLAIN, ZOO

from tpengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from tpengine.executor.local_executor import LocalExecutor
from tpengine.scheduling.drafter import RowPrices

LENGTHS = (33, 5, 70, 17, 9, 1, 24, 12)
OFTEN = [*range(0, 500, 20)]
"""Ids that end sequences of one request at different lengths."""
LETTERS = StructuredOutputsParams(regex="[ab]{2,30}")
PARAMS: list[SamplingParams] = [
    greedy(20, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=0, repetition_penalty=1.3),
    SamplingParams(n=3, temperature=0.9, seed=2, max_tokens=24, logprobs=1, stop_token_ids=OFTEN),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=16),
    SamplingParams(
        temperature=1.0, seed=6, max_tokens=30, min_tokens=7, structured_outputs=LETTERS
    ),
    SamplingParams(n=1, best_of=2, temperature=1.0, seed=7, max_tokens=12, min_tokens=8),
    greedy(40),  # `answers` gives it a stop string
    greedy(40),  # and this one a stop token
]
SCARCE = {"num_device_blocks_override": 20, "max_num_batched_tokens": 32}
MODES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "swap": {"preemption_mode": "swap", **SCARCE},
    "recompute": {"preemption_mode": "recompute", **SCARCE},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
}


def summary(output: RequestOutput) -> Any:
    completions = [
        (o.token_ids, o.text, o.cumulative_logprob, o.logprobs, o.finish_reason, o.stop_reason)
        for o in output.outputs
    ]
    return completions, output.prompt_logprobs


@dataclass
class Served:
    """
    Attributes:
        most: steps that were in flight at once.
    """

    outputs: list[Any]
    most: int
    num_preemptions: int
    num_drafted: int = 0
    num_accepted: int = 0


def answers(
    models: ModelShop, num_steps: int, stops: Any, known: Any = None, **args: Any
) -> Served:
    """The outputs with so many steps in flight at most.

    Args:
        stops: what ends the last two requests, a dict for each.
        known: the outputs that are expected, from which an engine that looks ahead drafts.
    """
    folder = models.folder(PLAIN, tokenizer=True)
    prompts = models.oracle(folder).prompts(LENGTHS, seed=4)
    fields = {"max_model_len": 256, "num_device_blocks_override": 400, **args}
    num_stages = args.get("pipeline_parallel_size", 1)
    if num_stages > 1:
        fields["executor"] = "processes"
    config = EngineArgs(str(folder), dtype="float32", **fields).create_engine_config("cpu")
    config = with_steps_in_flight(config, num_steps)
    executor = LocalExecutor(config) if num_stages == 1 else ThreadedExecutor(config, 1)
    last: dict[str, RequestOutput] = {}
    most, drafts = 0, (0, 0)
    with LLMEngine(config, executor, log_stats=False) as engine:
        if known is not None:
            texts = zip(prompts, known, strict=True)
            foretell(engine, {tuple(p): [c[0] for c in outputs[0]] for p, outputs in texts})
        for number, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
            own = replace(params, **stops[number - len(PARAMS)]) if number >= 6 else params
            engine.add_request(str(number), None, own, prompt_token_ids=prompt)
        engine.add_request("aborted", None, greedy(60), prompt_token_ids=prompts[0])
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
            most = max(most, 1 + len(engine._scheduler.unanswered))
            engine._scheduler.check_invariants()
            if "aborted" in last and len(last["aborted"].outputs[0].token_ids) > 9:
                engine.abort_request("aborted")
        assert engine.num_free_blocks == engine.num_total_blocks
        num_preemptions = engine.counters.num_preemptions
        if (drafter := engine._scheduler.drafter) is not None:
            drafts = totals(drafter)
    assert [output.error for output in last.values()] == [None] * len(last)
    assert last.pop("aborted").outputs[0].finish_reason == "abort"
    outputs = [summary(last[str(i)]) for i in range(len(PARAMS))]
    return Served(outputs, most, num_preemptions, *drafts)


@pytest.fixture(scope="module")
def check(models: ModelShop) -> Callable[..., Served]:
    return make_check(models)


def make_check(models: ModelShop) -> Callable[..., Served]:
    """Serves in a mode with so many steps in flight, and compares with one step at a time."""
    whole = answers(models, 1, [{}, {}]).outputs
    text, ids = whole[-2][0][0][1], whole[-1][0][0][0]
    stops = [{"stop": [text[9:12]]}, {"stop_token_ids": [ids[17]]}]
    expected = answers(models, 1, stops)
    assert expected.most == 1
    assert [output[0][0][4] for output in expected.outputs[-2:]] == ["stop", "stop"]

    def check(mode: str, num_steps: int, foretold: bool = False, **args: Any) -> Served:
        known = expected.outputs if foretold else None
        served = answers(models, num_steps, stops, known, **args, **MODES[mode])
        assert (served.num_preemptions > 0) == ("num_device_blocks_override" in MODES[mode])
        for number, (output, other) in enumerate(
            zip(served.outputs, expected.outputs, strict=True)
        ):
            assert output == other, f"request {number}"
        return served

    return check


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_steps", [2, 4])
def test_outputs_are_the_same(check: Callable[..., Served], mode: str, num_steps: int) -> None:
    assert check(mode, num_steps).most == num_steps


def test_ids_on_their_way_change_nothing(models: ModelShop, walk: GpuWalk) -> None:
    """As on a GPU, where steps are launched on ids that have not arrived on the host."""
    check = make_check(models)
    assert walk.early == 0
    assert check("roomy", 2).most == 2
    assert walk.ahead > 50


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most", [1, 7])
def test_drafts_change_nothing(check: Callable[..., Served], mode: str, most: int) -> None:
    """Steps without drafts are planned ahead, too."""
    served = check(mode, 2, True, speculative_model="[ngram]", num_speculative_tokens=most)
    assert 20 < served.num_accepted < served.num_drafted
    assert served.most == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_stages_change_nothing(check: Callable[..., Served], mode: str, drafts: bool) -> None:
    """Two stages, each with its own thread, and three steps in flight; log probabilities are equal
    as bits, as no sum is divided."""
    lookahead = {"speculative_model": "[ngram]", "num_speculative_tokens": 3} if drafts else {}
    served = check(mode, 3, drafts, pipeline_parallel_size=2, **lookahead)
    assert drafts or served.most == 3
    assert (served.num_accepted > 20) == drafts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["itself", "another"])
def test_a_draft_model_changes_nothing(
    models: ModelShop, check: Callable[..., Served], monkeypatch: Any, mode: str, name: str
) -> None:
    """The model itself guesses what it will sample, unless a penalty or a grammar is in the way;
    another random model guesses wrong, and is not asked for long."""
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.01))
    spec = PLAIN if name == "itself" else ZOO["d128-4to1-tied-llama3-old"]
    served = check(mode, 2, speculative_model=str(models.folder(spec, tokenizer=True)))
    if name == "itself":
        assert served.num_accepted > max(40, served.num_drafted // 3)
    else:
        assert served.num_accepted < 0.1 * served.num_drafted
        assert served.num_drafted < 240
