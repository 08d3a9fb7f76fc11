"""Recorded decode steps, run with any number of rows, give the same bits as ops that are called one
by one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import bits, generate, open_llm, preemptions
from support.matrix import only
from support.models import ModelShop
from support.subjects import BY_NAME, Subjects
from support.variants import VARIANTS
from support.zoo import ZOO

from tpengine import LLM, SamplingParams
from tpengine.config import EMBEDDED_MODEL
from tpengine.layers.attention import AttentionMetadata
from tpengine.ops import fused_ops as fused
from tpengine.ops import linear_ops as linear
from tpengine.ops.recording import has_recordings
from tpengine.worker.decode_recording import DecodeRecording, NotRecordableError
from tpengine.worker.input_batch import StepArrays

pytestmark = pytest.mark.skipif(not has_recordings(), reason="the native library is not built")
ROWS, SIZE = 6, 32
FAMILIES = [v.name for v in VARIANTS if v.model_type in ("opt", "bloom")]
"""Families that `ZOO` does not have: their layers differ from Llama's."""
DIAGONAL = [(name, {}) for name in ("d96-7to1-llama3", "opt-before", "bloom-residual-after-norm")]
SCARCE = {"block_size": 8, "num_device_blocks_override": 60, "max_model_len": 256}


@pytest.fixture
def recorded_as_by_the_engine() -> Iterator[None]:
    with torch.inference_mode():
        yield


as_by_the_engine = pytest.mark.usefixtures("recorded_as_by_the_engine")


def recording_bytes(llm: LLM) -> int:
    """What the recorded decode steps take, by the ledger; 0 if there are none."""
    (ledger,) = llm.llm_engine.stats().ledgers
    return ledger.graphs_bytes


def crowd(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns requests of many lengths, so that the rows change from step to step."""
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
        params.append(SamplingParams(max_tokens=rng.randint(1, 32), ignore_eos=True, **kind))
    return prompts, params


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *only(DIAGONAL, [(name, {}) for name in (*ZOO, *FAMILIES)]),
        ("d64-4to1-tied", {"dtype": "bfloat16"}),
        ("d64-4to1-tied", {"quantization": "int8"}),
        ("d64-4to1-tied", {"quantization": "int4"}),
        ("d64-4to1-tied", SCARCE),
        ("d64-4to1-tied", {"max_num_seqs": 5}),
        *only((), [(name, {"dtype": "bfloat16"}) for name in FAMILIES]),
        ("opt-before", {"quantization": "int8"}),
        ("bloom-residual-after-norm", SCARCE),
    ],
    ids=str,
)
def test_same_bits(models: ModelShop, subjects: Subjects, name: str, args: dict[str, Any]) -> None:
    """Many requests at once, of all kinds, with swaps where the cache is small."""
    folder = models.folder(ZOO[name]) if name in ZOO else subjects.folder(BY_NAME[name])
    answers = []
    for enforce_eager in (True, False):
        with open_llm(folder, enforce_eager=enforce_eager, **args) as llm:
            assert (recording_bytes(llm) == 0) == enforce_eager
            outputs = generate(llm, *crowd(llm.llm_engine.get_model_config().vocab_size))
        assert (preemptions(outputs) > 0) == (args == SCARCE)
        answers.append([bits(output) for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "args",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "float32", "quantization": "int8"}],
    ids=str,
)
def test_layers_share_their_memory(args: dict[str, Any]) -> None:
    """A model of the same sizes with more layers takes no more, by the ledger."""
    dtype = args["dtype"]
    with LLM(EMBEDDED_MODEL, max_num_seqs=16, **args) as llm:
        num_bytes = recording_bytes(llm)
        config = llm.llm_engine.get_model_config()
    hidden = config.hf_config["hidden_size"]
    widest = 2 * config.hf_config["intermediate_size"]
    inputs = 16 * 4 * (4 + config.max_model_len // 16)
    per_row = (num_bytes - inputs) / 16 / getattr(torch, dtype).itemsize
    assert config.num_layers >= 4
    assert hidden + widest <= per_row < 3 * (hidden + widest)


def arrays(num_rows: int) -> StepArrays:
    ones = np.ones(num_rows, np.int32)
    table = np.zeros((num_rows, 1), np.int32)
    return StepArrays(ones, ones, ones, table, ones, ones[:1], num_rows, ones)


class TinyModel:
    """A product and a norm, with an op of the test between them."""

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


@as_by_the_engine
@pytest.mark.parametrize("num_rows", [1, 4, ROWS])
def test_the_rows_that_a_step_has(num_rows: int) -> None:
    model = TinyModel()
    recording = DecodeRecording(model.forward, ROWS, 3)
    assert recording.num_calls == 3
    steps = arrays(num_rows)
    expected = model.forward(torch.ones(num_rows, dtype=torch.int32), None)  # type: ignore[arg-type]
    for _ in range(2):
        recording.write(steps, None)  # type: ignore[arg-type]
        assert torch.equal(recording.run(num_rows), expected)


NOT_RECORDED: dict[str, tuple[Any, str]] = {
    "sum": (lambda x: x + 1.0, "aten.add.Tensor"),
    "in place": (lambda x: x.mul_(2.0), "aten.mul_.Tensor"),
    "copy": (lambda x: x.t().contiguous().t(), r"aten\.(contiguous|clone)"),
    "reshape": (lambda x: x.view(ROWS, 2, -1).transpose(1, 2).reshape(x.shape), "reshape|clone"),
    "flatten": (lambda x: x.view(ROWS, 2, -1).transpose(1, 2).flatten(1), "flatten|reshape|clone"),
    "dtype": (lambda x: x.to(torch.bfloat16).float(), r"aten\.(to|_to_copy)"),
    "expand": (lambda x: x[:1].expand_as(x).contiguous(), r"aten\.(contiguous|clone)"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "aten.sum"),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (SIZE,)), "layer_norm"),
    "other rows": (lambda x: x.new_empty(3, SIZE), r"shape \[3, 32\]"),
    "some rows": (lambda x: x[:2], r"x has shape \[2, 32\]|expected 6"),
}
"""What stands between ops that can be recorded, and the word for it in the error."""


@as_by_the_engine
@pytest.mark.parametrize("name", NOT_RECORDED)
def test_what_a_recording_would_leave_out_is_refused(name: str) -> None:
    between, named = NOT_RECORDED[name]
    model = TinyModel(between)
    with pytest.raises(NotRecordableError, match=named):
        DecodeRecording(model.forward, ROWS, 3)
    model.between = lambda x: x  # ops run again after the refusal
    assert model.forward(torch.ones(2, dtype=torch.int32), None).any()  # type: ignore[arg-type]


@as_by_the_engine
def test_op_without_a_compiled_kernel_is_refused() -> None:
    """It would run as plain torch during the recording, and not in later runs."""
    cache, packed, block_ids = torch.zeros(4, 6, 8), torch.zeros(1, 4, 8), torch.tensor([1])

    def between(x: torch.Tensor) -> torch.Tensor:
        torch.ops.tpengine.pack_blocks.default(packed, cache, block_ids)
        return x

    with pytest.raises(NotRecordableError, match=r"pack_blocks.* has no compiled kernel"):
        DecodeRecording(TinyModel(between).forward, ROWS, 3)


@as_by_the_engine
def test_memory_is_used_again_only_when_no_tensor_uses_it() -> None:
    """A view keeps the memory, even after the tensor that it was made from is deleted."""
    kept = []

    def between(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        linear.packed_linear(y, x, model.weight, None)
        half = y.view(ROWS, 2, -1)[:, :1]
        kept.append(half)
        del y
        z = torch.empty_like(x)  # must not overlap with `half`
        linear.packed_linear(z, x, model.weight, None)
        assert z.data_ptr() != half.data_ptr()
        first = z.data_ptr()
        del z
        again = torch.empty_like(x)  # the memory of the previous one is free
        assert again.data_ptr() == first
        linear.packed_linear(again, x, model.weight, None)
        return again

    model = TinyModel(between)
    assert DecodeRecording(model.forward, ROWS, 3).num_calls == 6
    assert len(kept) == 1


@as_by_the_engine
def test_wrong_inputs_are_named() -> None:
    recording = DecodeRecording(TinyModel().forward, ROWS, 3)
    steps = arrays(2)
    steps.token_ids = steps.token_ids + 8
    recording.write(steps, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"embedding: token_ids\[0\] is 9.*rows 0 to 8"):
        recording.run(2)


DAEMON_THREAD = """
import threading, time
from tpengine import LLM, SamplingParams
llm = LLM(dtype="float32", cpu_kv_cache_space=0.05, disable_log_stats=True, max_num_seqs=16)
params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
def work():
    while True:
        llm.generate(["A"] * 16, params, use_tqdm=False)
threading.Thread(target=work, daemon=True).start()
time.sleep(1.0)
print("over", flush=True)
"""


def test_program_that_ends_in_the_middle_of_a_step() -> None:
    """A daemon thread that still runs a step must not use a recording that was deleted."""
    done = subprocess.run(
        [sys.executable, "-c", DAEMON_THREAD], capture_output=True, text=True, timeout=280.0
    )
    assert done.stdout.endswith("over\n")
    # Python itself may abort a daemon thread that wakes up in its last moment.
    assert done.returncode in (0, -signal.SIGABRT), done.stderr[-2000:]
