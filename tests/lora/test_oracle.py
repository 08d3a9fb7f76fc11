"""Greedy ids equal to PEFT's own forward pass, in float32: eight adapters and none in one batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import NUM_TOKENS, Adapters, Job, assert_peft, open_engine, serve
from support.engines import greedy, ids, preemptions
from support.engines import serve as serve_ids
from support.foretold import totals
from support.matrix import only
from support.variants import VARIANTS

from lora.conftest import EIGHT
from tpengine import LoRARequest, SamplingParams

LENGTHS = (70, 9)
SCARCE = {"num_device_blocks_override": 24, "max_num_batched_tokens": 32}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "op by op": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16},
    "prompts first": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "swapped": SCARCE,
    "computed again": {**SCARCE, "preemption_mode": "recompute"},
    "one slot": {"max_loras": 1, "max_cpu_loras": 3},
    "drafts": {"speculative_model": "[ngram]"},
    "two slots, scarce": {"max_loras": 2, **SCARCE},
    "two ranks": {"tp_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two ranks, scarce": {"tp_size": 2, "max_loras": 3, **SCARCE},
}
FAMILIES = {variant.model_type: variant for variant in reversed(VARIANTS)}
LINEARS = ["llama", "qwen2", "phi3", "gemma3_text", "opt", "gpt2", "bloom", "gpt_neox"]
LINEARS += ["mixtral", "qwen2_moe"]
"""Families whose linear layers differ: by name, by bias, by what is fused, by experts."""
ATTENTION = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
"""Of models whose experts PEFT would adapt too."""


@pytest.fixture(scope="module")
def jobs(eight: Adapters) -> list[Job]:
    """Two prompts for each adapter and for none."""
    return eight.jobs([None, *EIGHT], LENGTHS)


@pytest.mark.parametrize("mode", only(("whole", "chunks", "swapped", "drafts", "two ranks"), MODES))
def test_eight_adapters_and_none_in_one_batch(eight: Adapters, jobs: list[Job], mode: str) -> None:
    args = {"max_loras": 8, **MODES[mode]}
    with open_engine(eight.base, **args) as engine:
        outputs = serve(engine, eight, jobs)
        assert engine.list_loras() == set(range(1, 9))
        if (drafter := engine._scheduler.drafter) is not None:
            assert min(totals(drafter)) > 0
    assert_peft(eight, jobs, outputs)
    assert (preemptions(outputs) > 0) == ("num_device_blocks_override" in args)


def test_the_prefix_cache_is_that_of_an_adapter(eight: Adapters) -> None:
    """One prompt for all adapters: each finds its own blocks, and no other's."""
    ((_, prompt),) = eight.jobs(["rank4"], [70])
    jobs: list[Job] = [(name, prompt) for name in (None, *EIGHT)]
    expected = eight.answers(jobs)
    with open_engine(eight.base, max_loras=2) as engine:
        for num_cached in (0, 64):
            for job, answer in zip(jobs, expected, strict=True):
                (output,) = serve(engine, eight, [job])
                assert output.num_cached_tokens == num_cached
                assert output.outputs[0].token_ids == answer.token_ids, job[0]


def test_all_sequences_of_a_request_have_its_adapter(eight: Adapters) -> None:
    """They are forked from one row, and beams are copied from each other."""
    ((_, prompt),) = jobs = eight.jobs(["rank16"], [40])
    (answer,) = eight.answers(jobs)
    answers = []
    with open_engine(eight.base, max_loras=1) as engine:
        likeliest = SamplingParams(n=3, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True)
        for params in (likeliest, greedy(NUM_TOKENS, n=2, best_of=3, use_beam_search=True)):
            (output,) = serve_ids(engine, [prompt], params, [eight.requests["rank16"]])
            answers.append(output.outputs)
    same, beams = answers
    assert [completion.token_ids for completion in same] == [answer.token_ids] * 3
    logits = eight.oracles["rank16"].logits_after(prompt, beams[0].token_ids)
    chosen = torch.tensor(beams[0].token_ids).unsqueeze(1)
    expected = float(logits.log_softmax(dim=-1).gather(1, chosen).sum())
    assert beams[0].cumulative_logprob == pytest.approx(expected, abs=1e-2)
    assert beams[0].cumulative_logprob >= same[0].cumulative_logprob - 1e-3


@pytest.mark.parametrize(
    ("tp_size", "family"),
    only(
        [(1 + place % 2, family) for place, family in enumerate(LINEARS)],
        itertools.product((1, 2), FAMILIES),
    ),
)
def test_every_family(tp_size: int, family: str, tmp_path: Path) -> None:
    """All linear layers of a model, on one rank and on two, where sizes are padded."""
    base = tmp_path / "base"
    FAMILIES[family].write(base)
    part = ATTENTION if family in ("mixtral", "qwen3_moe") else {}
    configs = {"low": {"r": 4, **part}, "high": {"r": 16, "lora_alpha": 8, **part}}
    adapters = Adapters(base, tmp_path, configs)
    jobs = adapters.jobs([None, "low", "high"], LENGTHS[:1])
    args = {"max_num_batched_tokens": 16} if tp_size > 1 else {}
    with open_engine(base, tp_size, max_loras=2, **args) as engine:
        assert_peft(adapters, jobs, serve(engine, adapters, jobs))


def test_a_changed_folder_is_another_adapter(tmp_path: Path, eight: Adapters) -> None:
    """The files are exchanged under a running engine, whose prefix cache knows the prompt."""
    names = "rank4", "rank16"
    ((_, prompt),) = eight.jobs(["rank4"], [70])
    folder = tmp_path / "adapter"
    folder.mkdir()
    with open_engine(eight.base, max_loras=2) as engine:
        for name in names:
            for file in Path(eight.requests[name].lora_path).iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            moved = LoRARequest("moved", eight.requests["rank64"].lora_int_id, str(folder))
            adapters = [moved, eight.requests[name]]
            outputs = serve_ids(engine, [prompt] * 2, greedy(NUM_TOKENS), adapters)
            assert ids(outputs) == [eight.answers([(name, prompt)])[0].token_ids] * 2
