"""Decode steps that are recorded and run with any number of rows give the same bits as ops that
are called one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import generate, open_llm, preemptions
from support.models import ModelShop
from support.zoo import PLAIN, ZOO

from tpengine import LLM, SamplingParams
from tpengine.config import EMBEDDED_MODEL
from tpengine.layers.attention import AttentionMetadata
from tpengine.ops import fused, linear
from tpengine.ops.library import cpu_isa
from tpengine.worker.decode_recording import DecodeRecording, NotRecordableError
from tpengine.worker.input_batch import StepArrays

pytestmark = pytest.mark.skipif(
    cpu_isa() not in ("avx512", "avx512bf16"), reason="linear layers are torch's own here"
)
ROWS, SIZE = 6, 32
SCARCE = {"block_size": 8, "num_device_blocks_override": 60, "max_model_len": 256}


def recording_of(llm: LLM) -> Any:
    return llm.llm_engine._executor._worker._runner._recorded


def crowd(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of many lengths, so that the rows of a step change all the time."""
    rng = random.Random(3)
    prompts, params = [], []
    for number in range(24):
        prompts.append([rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 60))])
        kind: dict[str, Any] = [
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 0.9, "seed": number, "top_p": 0.9},
            {"temperature": 0.8, "seed": number, "n": 3},
            {"temperature": 0.0, "n": 2, "best_of": 2, "use_beam_search": True},
        ][number % 4]
        params.append(SamplingParams(max_tokens=rng.randint(1, 50), ignore_eos=True, **kind))
    return prompts, params


def answers(llm: LLM, requests: tuple[Sequence[Any], Sequence[Any]]) -> list[Any]:
    return [
        [(one.token_ids, one.cumulative_logprob, one.logprobs) for one in output.outputs]
        for output in generate(llm, *requests)
    ]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, {}) for name in ZOO),
        ("d64-4to1-tied", {"dtype": "bfloat16"}),
        ("d64-4to1-tied", {"quantization": "int8"}),
        (
            "d64-4to1-tied",
            {"block_size": 8, "num_device_blocks_override": 60, "max_model_len": 256},
        ),
        ("d64-4to1-tied", {"max_num_seqs": 5}),
    ],
    ids=str,
)
def test_same_bits_as_op_by_op(models: ModelShop, name: str, args: dict[str, Any]) -> None:
    """In a crowd of samples, beams and lone tokens, with swaps where the cache is small."""
    if args.get("dtype") == "bfloat16" and cpu_isa() != "avx512bf16":
        pytest.skip("bfloat16's linear layers are torch's own here")
    folder = models.folder(ZOO[name])
    found = []
    for enforce_eager in (True, False):
        with open_llm(folder, enforce_eager=enforce_eager, **args) as llm:
            assert (recording_of(llm) is None) == enforce_eager
            requests = crowd(llm.llm_engine.get_model_config().vocab_size)
            found.append(answers(llm, requests))
    assert found[0] == found[1]


def test_small_caches_do_swap(models: ModelShop) -> None:
    """What the comparison above is for."""
    with open_llm(models.folder(PLAIN), **SCARCE) as llm:
        assert preemptions(generate(llm, *crowd(llm.llm_engine.get_model_config().vocab_size))) > 0


def test_layers_share_their_memory() -> None:
    """A model of the same sizes with more layers takes no more."""
    with LLM(EMBEDDED_MODEL, max_num_seqs=16) as llm:
        recording = recording_of(llm)
        config = llm.llm_engine.get_model_config()
    hidden = config.hf_config["hidden_size"]
    widest = 2 * config.hf_config["intermediate_size"]
    inputs = 16 * 4 * (4 + config.max_model_len // 16)
    per_row = (recording.num_bytes - inputs) / 16 / 2
    assert config.num_layers >= 4
    assert hidden + widest <= per_row < 3 * (hidden + widest)


def test_its_memory_is_in_the_ledger(models: ModelShop) -> None:
    for enforce_eager in (True, False):
        with open_llm(models.folder(PLAIN), enforce_eager=enforce_eager) as llm:
            (ledger,) = llm.llm_engine._recovery.ledgers
            recording = recording_of(llm)
            assert ledger.graphs_bytes == (0 if enforce_eager else recording.num_bytes)


def arrays(num_rows: int) -> StepArrays:
    ones = np.ones(num_rows, np.int32)
    table = np.zeros((num_rows, 1), np.int32)
    return StepArrays(ones, ones, ones, table, ones, ones[:1], num_rows, ones)


class TinyModel:
    """A product and a norm, and between them whatever a test wants."""

    def __init__(self, between: Any = lambda x: x) -> None:
        torch.manual_seed(1)
        self.table = torch.randn(9, SIZE)
        self.weight = linear.pack_linear_weight(torch.randn(SIZE, SIZE))
        self.scale = torch.ones(SIZE)
        self.between = between

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        x = self.table.new_empty(token_ids.shape[0], SIZE)
        fused.embedding(x, self.table, token_ids)
        y = torch.empty_like(x)
        linear.packed_linear(y, x, self.weight, None)
        y = self.between(y)
        out = torch.empty_like(x)
        fused.add_rms_norm(out, y, x, self.scale, 1e-6)
        return out


@pytest.mark.parametrize("num_rows", [1, 4, ROWS])
def test_the_rows_that_a_step_has(num_rows: int) -> None:
    model = TinyModel()
    recording = DecodeRecording(model.forward, ROWS, 3)
    assert recording.num_calls == 3
    steps = arrays(num_rows)
    assert recording.fits(steps)
    expected = model.forward(torch.ones(num_rows, dtype=torch.int32), None)  # type: ignore[arg-type]
    for _ in range(2):
        found = recording.prepare(steps, None)()  # type: ignore[arg-type]
        assert torch.equal(found, expected)
    assert not recording.fits(arrays(ROWS + 1))


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (lambda x: x + 1.0, "aten.add.Tensor"),
        (lambda x: x.mul_(2.0), "aten.mul_.Tensor"),
        (lambda x: x.t().contiguous().t(), "aten.clone"),
        (lambda x: x if x.sum() > 0 else -x, "aten.sum"),
        (lambda x: torch.nn.functional.layer_norm(x, (SIZE,)), "layer_norm"),
        (lambda x: x.new_empty(3, SIZE), r"shape \[3, 32\]"),
        (lambda x: x[:2], r"x has shape \[2, 32\]|expected 6"),
    ],
    ids=["sum", "in place", "copy", "branch", "norm", "other rows", "some rows"],
)
def test_what_a_recording_would_leave_out_is_refused(between: Any, named: str) -> None:
    model = TinyModel(between)
    with pytest.raises(NotRecordableError, match=named):
        DecodeRecording(model.forward, ROWS, 3)
    model.between = lambda x: x  # and ops run again
    assert model.forward(torch.ones(2, dtype=torch.int32), None).any()  # type: ignore[arg-type]


def test_memory_is_given_out_again_only_when_nobody_has_it() -> None:
    """A view keeps it, whatever became of the tensor that it was taken from."""
    kept = []

    def between(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        linear.packed_linear(y, x, model.weight, None)
        half = y.view(ROWS, 2, -1)[:, :1]
        kept.append(half)
        del y
        z = torch.empty_like(x)  # must not lie where `half` does
        linear.packed_linear(z, x, model.weight, None)
        assert z.data_ptr() != half.data_ptr()
        first = z.data_ptr()
        del z
        again = torch.empty_like(x)  # nobody has the one before
        assert again.data_ptr() == first
        linear.packed_linear(again, x, model.weight, None)
        return again

    model = TinyModel(between)
    recording = DecodeRecording(model.forward, ROWS, 3)
    assert recording.num_calls == 6
    assert len(kept) == 1


def test_wrong_inputs_are_named() -> None:
    model = TinyModel()
    recording = DecodeRecording(model.forward, ROWS, 3)
    steps = arrays(2)
    steps.token_ids = steps.token_ids + 8
    with pytest.raises(RuntimeError, match=r"embedding: token_ids\[0\] is 9.*rows 0 to 8"):
        recording.prepare(steps, None)()  # type: ignore[arg-type]
