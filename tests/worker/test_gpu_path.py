"""The code path of a GPU (gathered context, a library's kernels, padded decode batches at fixed
addresses), run on the CPU; see `support.gpu_walk`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import (
    generate,
    greedy,
    ids,
    make_engine,
    open_llm,
    outputs_of,
    preemptions,
    run,
)
from support.gpu_walk import GpuWalk
from support.matrix import matrix
from support.models import ModelShop
from support.zoo import PLAIN, ZOO

from tpengine import SamplingParams
from tpengine.worker import model_runner
from tpengine.worker.gpu import attention_plans as gpu

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 129, 300)
MAX_MODEL_LEN = 512
SCARCE = {"num_device_blocks_override": MAX_MODEL_LEN // 16 + 4, "max_num_batched_tokens": 64}
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 48},
    "swap": {"preemption_mode": "swap", **SCARCE},
    "recompute": {"preemption_mode": "recompute", **SCARCE},
    "whole prompts": {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False},
}
NAMES = ("d64-4to1-tied", "d96-7to1-llama3", "d256-2to1-3-layers")


def check_answers(models: ModelShop, name: str, **args: Any) -> None:
    """Those of the engine are those of transformers."""
    folder, oracle, prompts = models.problem(ZOO[name], LENGTHS, seed=1)
    with open_llm(folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    assert (preemptions(outputs) > 0) == ("num_device_blocks_override" in args)


each_mode = pytest.mark.parametrize(
    ("mode", "name", "enforce_eager"), matrix(list(MODES), NAMES, (False, True))
)


@each_mode
def test_greedy_as_transformers(
    models: ModelShop, walk: GpuWalk, mode: str, name: str, enforce_eager: bool
) -> None:
    check_answers(models, name, enforce_eager=enforce_eager, **MODES[mode])
    assert walk.sizes == ([] if enforce_eager else [1, 2, 4, 8, 16])
    assert (walk.replays > 20) == (not enforce_eager)
    assert (walk.gathers > 10) == (mode != "whole prompts")
    assert walk.prefills > 0
    assert walk.early > 20, "the next step was launched only after the ids had arrived"


def test_more_context_than_scratch_goes_in_groups(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_GATHERED_TOKENS", 64)
    folder, oracle, prompts = models.problem(PLAIN, (200, 201, 202, 203), seed=5)
    args = {"max_model_len": 300, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    with open_llm(folder, **args) as llm:
        generate(llm, [prompt[:150] for prompt in prompts], greedy(1))
        walk.gathers = 0
        outputs = generate(llm, prompts, greedy(8))
    oracle.assert_greedy(prompts, ids(outputs), 8)
    assert walk.gathers > PLAIN.num_layers  # the context of each prompt is gathered separately


def test_steps_with_more_rows_than_graphs_run_by_themselves(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.worker.recorder.MAX_RECORDED_ROWS", 4)
    check_answers(models, NAMES[0])
    assert walk.sizes == [1, 2, 4]
    assert 0 < walk.replays < 200


def test_a_request_that_joins_and_one_that_is_aborted(models: ModelShop, walk: GpuWalk) -> None:
    """A prompt joins, a request is aborted, and another one gets its slot while a sample for the
    first is on its way."""
    folder, oracle, prompts = models.problem(PLAIN, (5, 40, 17, 1), seed=4)
    engine = make_engine(folder, max_num_seqs=3)
    for number in (0, 1):
        engine.add_request(str(number), None, greedy(30), prompt_token_ids=prompts[number])
    outputs = [output for _ in range(6) for output in engine.step()]
    assert walk.whole > 3
    before = walk.ahead
    engine.add_request("2", None, greedy(30), prompt_token_ids=prompts[2])
    outputs += [output for _ in range(3) for output in engine.step()]
    assert walk.ahead >= before + 2 * 3, "the others did not continue ahead"
    engine.abort_request("1")
    engine.add_request("3", None, greedy(30), prompt_token_ids=prompts[3])  # of one token
    outputs += run(engine)
    engine.shutdown()
    final = {output.request_id: output.outputs[0].token_ids for output in outputs}
    answers = [final[str(number)] for number in range(4)]
    assert [len(answers[number]) for number in (0, 2, 3)] == [30] * 3
    oracle.assert_likeliest(prompts, answers)


def test_beams(models: ModelShop, walk: GpuWalk) -> None:
    """They do not run ahead: the driver chooses their ids."""
    params = SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=16)
    outputs_of(models.folder(PLAIN), [[5, 6, 7]], params)
    assert walk.replays > 5
    assert walk.ahead == 0


def test_times_of_the_model_do_not_overlap(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is launched while the device computes another begins when that one is done."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(model_runner, "time", clock)
    engine = make_engine(models.folder(PLAIN), max_num_seqs=2)
    engine.add_request("one", None, greedy(9), prompt_token_ids=[5, 6, 7])
    first = next(ticks)
    run(engine)
    engine.shutdown()
    assert walk.early > 5
    assert 0 < engine.counters.step_seconds["model"] <= next(ticks) - first
