"""The engine on a GPU, beside `test_gpu_path.py`. Skips itself where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ops.cases import GPU
from support.engines import generate, greedy, ids, open_llm, outputs_of
from support.models import ModelShop
from support.workers import loaded_worker
from support.zoo import PLAIN

from tpengine import LLM, EngineArgs, SamplingParams
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, GraphCaptureError
from tpengine.worker.gpu.graphs import DRIVER_BYTES, CudaCapture, CudaGrowth, Recorded, Run
from tpengine.worker.transfers import Downloads, Uploads
from worker.test_gpu_path import MODES, check_answers, each_mode

pytestmark = GPU
CUDA = torch.device("cuda", 0)


def open_on_card(folder: Path, **args: Any) -> LLM:
    """Opens an engine with little swap space: to pin host memory takes long."""
    return open_llm(folder, **{"device": "cuda", "swap_space": 0.05, **args})


@each_mode
def test_greedy_as_transformers(
    models: ModelShop, mode: str, name: str, enforce_eager: bool
) -> None:
    card = {"device": "cuda", "swap_space": 0.05}
    check_answers(models, name, enforce_eager=enforce_eager, **card, **MODES[mode])


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_steps_that_are_begun_early_change_nothing(models: ModelShop, enforce_eager: bool) -> None:
    """Requests of every kind, which start and finish in different steps."""
    folder = models.folder(PLAIN)
    prompts = models.oracle(folder).prompts((5, 40, 17, 1, 90, 33), seed=4)
    params = [
        greedy(20),
        SamplingParams(temperature=1.0, seed=5, max_tokens=50, repetition_penalty=1.3),
        SamplingParams(n=3, seed=1, max_tokens=24, ignore_eos=True, logprobs=1),
        greedy(60),
        SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=16),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=2, max_tokens=40),
    ]
    args: dict[str, Any] = {"max_num_seqs": 8, "enforce_eager": enforce_eager}
    answers = []
    for early in (False, True):
        with open_on_card(folder, async_scheduling=early, **args) as llm:
            outputs = generate(llm, prompts, params)
        answers.append([[o.token_ids for o in output.outputs] for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_bfloat16_with_either_backend(models: ModelShop, backend: str, cache: str) -> None:
    """Returns as many tokens as asked; most first tokens equal those of float32."""
    folder = models.folder(PLAIN)
    oracle = models.oracle(folder)
    prompts = oracle.prompts((3, 40, 200), seed=2)
    args = {"dtype": "bfloat16", "attention_backend": backend, "kv_cache_dtype": cache}
    args |= {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with open_on_card(folder, **args) as llm:
        outputs = generate(llm, prompts, greedy(32))
        sampled = generate(llm, prompts, SamplingParams(seed=5, max_tokens=32, ignore_eos=True))
        again = generate(llm, prompts, SamplingParams(seed=5, max_tokens=32, ignore_eos=True))
    assert [len(answer) for answer in ids(outputs)] == [32] * 3
    assert ids(sampled) == ids(again)
    first = [answer.token_ids[0] for answer in oracle.answers(prompts)]
    assert sum(a[0] == b for a, b in zip(ids(outputs), first, strict=True)) >= 2


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_of_few_bits(models: ModelShop, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 as on a CPU in the same form; in bfloat16 most first tokens equal those."""
    folder = models.folder(PLAIN)
    prompts = models.oracle(folder).prompts((3, 40, 200), seed=2)
    answers = {}
    for dtype in ("float32", "bfloat16"):
        with open_on_card(folder, dtype=dtype, quantization=kind) as llm:
            answers[dtype] = ids(generate(llm, prompts, greedy(32)))
    monkeypatch.setattr("tpengine.layers.gpu_quantized.is_on_gpu", lambda weights: True)
    expected = ids(outputs_of(folder, prompts, greedy(32), device="cpu", quantization=kind))
    assert answers["float32"] == expected
    assert sum(a[0] == b[0] for a, b in zip(answers["bfloat16"], expected, strict=True)) >= 2


def test_ledger_adds_up(models: ModelShop) -> None:
    """With few tokens in a step, so that logits and sampling take more than the model does."""
    sizes = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 256}
    args = EngineArgs(str(models.folder(PLAIN)), dtype="bfloat16", **sizes)
    worker = loaded_worker(args.create_engine_config("cuda"))
    ledger = worker.profile_num_available_blocks()
    assert ledger.graphs_bytes > 0
    assert 0 < ledger.logits_bytes <= ledger.activation_peak_bytes
    parts = ledger.weights_bytes + ledger.activation_peak_bytes + ledger.graphs_bytes
    parts += ledger.kv_budget_bytes + ledger.held_by_others_bytes
    assert parts == pytest.approx(0.5 * ledger.total_bytes, rel=0.05)
    known = worker.profile_num_available_blocks(ledger.activation_peak_bytes)
    assert known.num_device_blocks == pytest.approx(ledger.num_device_blocks, rel=0.02)
    worker.init_cache_engine(ledger.num_device_blocks, 4)
    worker.init_cache_engine(ledger.num_device_blocks // 2, 4)
    held = torch.cuda.memory_reserved(CUDA)
    assert held < 0.35 * ledger.total_bytes, "the first cache was not freed"
    worker.shutdown()


def test_graph_larger_than_memory_is_a_typed_error(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Larger(CudaCapture):
        def __call__(self, run: Run) -> Recorded:
            return super().__call__(lambda: torch.empty(1 << 50, device=CUDA))

    monkeypatch.setattr("tpengine.worker.recorder.CudaCapture", Larger)
    with pytest.raises(GraphCaptureError, match="enforce_eager"):
        open_on_card(models.folder(PLAIN))


def test_wrong_use(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    with pytest.raises(ConfigError, match="fp8 KV cache needs dtype"):
        open_on_card(folder, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="float16 and bfloat16 only"):
        open_on_card(folder, attention_backend="varlen")


def test_transfers() -> None:
    uploads, downloads = Uploads(CUDA), Downloads(CUDA, ParallelState().wait_for)
    for turn in range(40):  # buffers are used again
        arrays = [torch.arange(turn, turn + 9).int().numpy(), torch.rand(2, 3).numpy()]
        sent = uploads.send(arrays)
        finish = downloads.start([sent[0] * 2, sent[1] + 1])
        assert torch.equal(sent[1].cpu(), torch.from_numpy(arrays[1]))
        doubled, more = finish()
        assert (doubled == 2 * arrays[0]).all()
        assert (more == arrays[1] + 1).all()


def test_growth_counts_what_stays() -> None:
    growth = CudaGrowth(CUDA)
    kept = torch.empty(300 << 20, dtype=torch.uint8, device=CUDA)
    assert 300 << 20 <= growth.num_bytes() <= (300 << 20) + DRIVER_BYTES
    del kept
    assert growth.num_bytes() <= DRIVER_BYTES
