"""Bases of other forms: quantised ones, and models on transformers' code; and steps in which no row
has an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_quantized_checkpoints import FORMS, ROOT, dequantised_model
from support.adapters import Adapters, Job, assert_peft, open_engine, serve
from support.engines import greedy, make_engine
from support.engines import serve as serve_ids
from support.gguf_files import write_gguf
from support.matrix import only
from support.subjects import BY_NAME
from torch.utils._python_dispatch import TorchDispatchMode

from tpengine import LLMEngine, RequestOutput
from tpengine.config import LoRAConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.linear import MergedColumnParallelLinear
from tpengine.layers.lora import AdapterLayers
from tpengine.layers.weights import LoadedTensor, Weights
from tpengine.ops.lora_ops import LoRARows, pack_part
from tpengine.worker.worker import Worker


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_addition_is_that_of_a_plain_base(form: str) -> None:
    """Whatever the base's form, the same is added to its product, bit by bit in the input."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 96), torch.randn(5, 96)
    a, b = torch.randn(2, 8, 96), torch.randn(2, 64, 8)
    rows = LoRARows(torch.tensor([3, 0, 4]).int(), torch.tensor([[1, 0, 2], [0, 2, 3]]).int())
    added = []
    for quantization in (None, form):
        weights = Weights(torch.float32, torch.device("cpu"), ParallelState(), quantization)
        linear = MergedColumnParallelLinear(weights, ["model.up"], 96, [64])
        layers = AdapterLayers(weights, "model.", LoRAConfig(2, 2, 8))
        assert layers.targets == {"model.up": (64, 96)}
        weights.read("model.up.weight", LoadedTensor(weight))
        weights.finish()
        with torch.inference_mode():
            for slot in (0, 1):
                layers.fill(slot, {"model.up": pack_part(a[slot], b[slot], torch.float32)})
            bare = linear.forward(x)
            with layers.applied(rows):
                added.append(linear.forward(x) - bare)
    expected = torch.zeros(5, 64)
    for row, slot in ((3, 1), (0, 1), (4, 0)):
        expected[row] = x[row] @ a[slot].t() @ b[slot].t()
    for delta in added:
        assert not delta[[1, 2]].any()
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("form", "factor"), [("int8", 5.0), ("int4", 1.3), ("Q8_0", 5.0)])
def test_a_quantised_base_answers_as_nearly_as_without_adapters(
    eight: Adapters, form: str, factor: float, tmp_path: Path
) -> None:
    """Quantised when it is read, or a GGUF file as stored.

    Log probabilities of PEFT's ids: the adapter's answers lose no more by the base's form than
    those of the base, and less than without the adapter by this factor."""
    jobs = eight.jobs([None, "rank8", "rank64"], [30, 30, 30])
    base, quantization = eight.base, None if form == "Q8_0" else form
    if quantization is None:
        end = {"tokenizer.ggml.eos_token_id": 2}
        base = write_gguf(base, tmp_path / "model.gguf", form, metadata=end)
    dtype = "float32" if quantization else "auto"
    args = {"tp_size": 2, "quantization": quantization, "dtype": dtype}
    with open_engine(base, max_loras=2, **args) as engine:
        assert quantization or "as stored" in engine.stats().ledgers[0].weights_form
        assert_losses(engine, eight, jobs, 1.5, factor)


def assert_losses(
    engine: LLMEngine, adapters: Adapters, jobs: list[Job], most: float, factor: float
) -> None:
    """Compares mean differences of log probabilities.

    Args:
        most: what adapters' answers may lose, in multiples of what the base's lose.
        factor: what they lose at least without the adapter, in multiples of that with it.
    """
    losses: dict[str, list[float]] = {"none": [], "adapter": [], "left out": []}
    params = greedy(1, prompt_logprobs=0)
    for (name, prompt), answer in zip(jobs, adapters.answers(jobs), strict=True):
        ids = list(answer.token_ids[:20])
        chosen = [float(answer.logprobs[place, i]) for place, i in enumerate(ids)]
        for used in {name, None}:
            (output,) = serve_ids(engine, [[*prompt, *ids]], params, [adapters.request(used)])
            entries = output.prompt_logprobs[len(prompt) :]
            logprobs = [entry[i].logprob for entry, i in zip(entries, ids, strict=True) if entry]
            loss = sum(abs(x - y) for x, y in zip(logprobs, chosen, strict=True)) / len(ids)
            losses["none" if name is None else "adapter" if used else "left out"].append(loss)
    mean = {kind: sum(some) / len(some) for kind, some in losses.items()}
    assert mean["adapter"] < most * mean["none"], mean
    assert mean["left out"] > factor * mean["adapter"], mean


@pytest.mark.parametrize(
    "name",
    only(("awq", "gptq-order", "w8a8"), ["awq", "gptq-order", "w4a16-zeros", "w8a8", "fp8-block"]),
)
def test_checkpoints_of_other_tools(name: str, tmp_path: Path) -> None:
    """Ids equal to PEFT's over the tool's numbers in float32, on one rank and on two; and as
    stored, where `gptq-order` orders its inputs by group, answers as near as the base's."""
    plain = tmp_path / "plain"
    model, _ = dequantised_model(ROOT / name)
    model.save_pretrained(plain)
    adapters = Adapters(plain, tmp_path, {"low": {"r": 4}, "high": {"r": 16}})
    jobs = adapters.jobs([None, "low", "high"], [30, 30])
    for tp_size in (1, 2):
        with open_engine(ROOT / name, max_loras=2, tp_size=tp_size) as engine:
            assert_peft(adapters, jobs, serve(engine, adapters, jobs))
    with open_engine(ROOT / name, max_loras=2, dtype="auto") as engine:
        assert engine.stats().ledgers[0].weights_form == FORMS[name]
        most = 2.0 if name == "w8a8" else 1.5  # w8a8 has 1.51
        assert_losses(engine, adapters, jobs, most, 10.0)


@pytest.mark.parametrize(("name", "max_ranks"), [("qwen2-tied", 2), ("gpt2-8-heads", 1)])
def test_a_model_on_transformers_code(name: str, max_ranks: int, tmp_path: Path) -> None:
    """Its linear layers take adapters, transposed ones too, on one rank and on two."""
    BY_NAME[name].write(tmp_path / "base")
    adapters = Adapters(tmp_path / "base", tmp_path, {"low": {"r": 4}, "high": {"r": 16}})
    jobs = adapters.jobs([None, "low", "high"], [30])
    for tp_size in range(1, max_ranks + 1):
        args = {"max_num_batched_tokens": 16, "model_impl": "transformers", "tp_size": tp_size}
        with open_engine(adapters.base, max_loras=2, **args) as engine:
            assert_peft(adapters, jobs, serve(engine, adapters, jobs))


class Ops(TorchDispatchMode):
    """Notes the ops that are called, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ops]]:
    """Notes the ops of each step, one list each."""
    steps: list[Ops] = []
    execute = Worker.execute_model

    def noting(worker: Worker, step: Any) -> Any:
        steps.append(Ops())
        with steps[-1]:
            return execute(worker, step)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute_model", noting)
        yield steps


def worker_of(engine: LLMEngine) -> Worker:
    return engine._executor._worker  # type: ignore[attr-defined]


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_without_adapters_is_that_of_an_engine_without(
    eight: Adapters, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """The same ops with the same shapes, chunks and decodes, recorded or op by op."""
    lists: list[list[Any]] = []
    prompt = list(range(5, 45))

    def answer(engine: LLMEngine, name: str | None) -> RequestOutput:
        return serve_ids(engine, [prompt], greedy(4), [eight.request(name)])[0]

    args = {"max_model_len": 256, "max_num_batched_tokens": 16, "enforce_eager": eager}
    for enable_lora in (False, True):
        with make_engine(eight.base, enable_lora=enable_lora, max_lora_rank=64, **args) as engine:
            if enable_lora:
                answer(engine, "rank64")
            with noted(monkeypatch) as steps:
                answer(engine, None)
            recorded = worker_of(engine)._runner.recorded  # type: ignore[union-attr]
            num_recorded = 0 if recorded is None else recorded.num_calls  # type: ignore[union-attr]
            lists.append([num_recorded, *(step.calls for step in steps)])
            assert len(steps) == 6
            if enable_lora:
                with noted(monkeypatch) as steps:
                    answer(engine, "rank4")
                with_adapter = [name for step in steps for name, _ in step.calls]
                assert "tpengine.add_lora.default" in with_adapter
                of_adapters = worker_of(engine)._runner.recorded_adapters  # type: ignore[union-attr]
                num_more = 0 if of_adapters is None else of_adapters.num_calls - num_recorded
                assert num_more == (0 if recorded is None else 4 * 2)  # linears of two layers
    assert lists[0] == lists[1]
