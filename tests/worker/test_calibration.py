"""Scales of int4 by what a model computes: inputs that are large are multiplied more exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import third_party
from support.engines import open_llm
from support.tiny_llama import TinyLlama

from tpengine import SamplingParams
from tpengine.bench.perplexity import mean_loss, read_windows
from tpengine.engine.startup import weights_form
from tpengine.engine_args import EngineArgs
from tpengine.worker.calibration import InputMeter

FEW_STEPS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    TinyLlama(intermediate_size=256).write(folder)
    return folder


def logprobs(folder: Path, **args: Any) -> tuple[list[float], str]:
    """Of a prompt, and what the line at the start says of the weights."""
    prompt = torch.randint(512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with open_llm(folder, **args) as llm:
        (output,) = llm.generate(None, params, [prompt], use_tqdm=False)
        form = weights_form(llm.llm_engine.stats().ledgers)
    entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in entries], form


def test_an_input_counts_its_mean_square() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * torch.linspace(0, 9, 64)
    meter, out = InputMeter(), torch.ones(5, 3)
    assert meter.importance is None
    for rows in (x[:2], x[2:]):
        meter.add(out, rows)
    assert torch.equal(out, torch.ones(5, 3))
    squares = x.square().mean(0)
    importance = meter.importance
    assert importance is not None
    assert torch.allclose(importance, (squares / squares.mean() + 0.01) / 1.01)
    assert importance[0] > 0, "an input that was zero keeps its weights"
    meter.add(out, torch.full_like(x, torch.nan))
    assert meter.importance is None


def test_scales_are_chosen_anew(folder: Path) -> None:
    plain, form = logprobs(folder, quantization="int4", calibrate=False)
    assert form == ""
    chosen, form = logprobs(folder, quantization="int4")
    assert form == "calibrated"
    assert chosen != plain


@pytest.mark.check
@pytest.mark.timeout(600)
def test_half_of_the_loss_is_saved() -> None:
    """Of SmolLM2-135M on the text of a licence, which it did not write."""
    args = EngineArgs(str(third_party.smollm2()), max_model_len=1025, cpu_kv_cache_space=0.2)
    windows = read_windows(str(Path(__file__).parents[2] / "LICENSE"), args)
    exact, _ = mean_loss(args, windows)
    for kind in ("int4", "int4-g128"):
        chosen, plain = (
            mean_loss(replace(args, quantization=kind, calibrate=calibrate), windows)[0] - exact
            for calibrate in (True, False)
        )
        assert 0.0 < chosen < 0.6 * plain


@pytest.mark.parametrize(
    "args", [FEW_STEPS, {"pipeline_parallel_size": 2}, {"seed": 5}], ids=["steps", "stages", "seed"]
)
def test_it_depends_on_the_model_alone(folder: Path, args: dict[str, Any]) -> None:
    plain, _ = logprobs(folder, quantization="int4-g128")
    assert logprobs(folder, quantization="int4-g128", **args)[0] == plain


def test_each_rank_measures_its_inputs(folder: Path) -> None:
    assert logprobs(folder, quantization="int4", tensor_parallel_size=2)[1] == "calibrated"


@pytest.mark.parametrize("args", [{"load_format": "dummy"}, {"quantization": "int8"}], ids=str)
def test_there_is_nothing_to_choose(folder: Path, args: dict[str, Any]) -> None:
    assert logprobs(folder, **{"quantization": "int4", **args})[1] == ""
