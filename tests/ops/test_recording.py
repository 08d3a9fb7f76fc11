"""Calls that are recorded once and run again with any number of rows."""

from __future__ import annotations

import threading

import pytest
import torch

from tpengine.ops import fused_ops as fused
from tpengine.ops import linear_ops as linear
from tpengine.ops.recording import Recording, has_recordings

pytestmark = pytest.mark.skipif(not has_recordings(), reason="the native library is not built")
ROWS, SIZE, OUTPUTS = 5, 64, 40


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(ROWS, SIZE),
        "scale": torch.randn(SIZE),
        "normed": torch.zeros(ROWS, SIZE),
        "weight": linear.pack_linear_weight(torch.randn(OUTPUTS, SIZE)),
        "out": torch.zeros(ROWS, OUTPUTS),
    }


def compute(tensors: dict[str, torch.Tensor]) -> None:
    fused.rms_norm(tensors["normed"], tensors["x"], tensors["scale"], 1e-6)
    linear.packed_linear(tensors["out"], tensors["normed"], tensors["weight"], None)


def record(tensors: dict[str, torch.Tensor], *rows: str) -> Recording:
    recording = Recording(ROWS)
    for name in rows:
        recording.declare_rows(tensors[name])
    with recording.noting():
        compute(tensors)
    return recording


def test_noting_does_nothing_else(tensors: dict[str, torch.Tensor]) -> None:
    assert record(tensors, "x", "normed", "out").num_calls == 2
    assert not tensors["normed"].any()
    assert not tensors["out"].any()
    compute(tensors)  # after the recording, ops run again
    assert tensors["out"].all()


@pytest.mark.parametrize("num_rows", [0, 1, 3, ROWS])
def test_as_many_rows_as_are_wanted(tensors: dict[str, torch.Tensor], num_rows: int) -> None:
    recording = record(tensors, "x", "normed", "out")
    for _ in range(2):
        tensors["x"].copy_(torch.randn(ROWS, SIZE))
        expected = {**tensors, "normed": torch.zeros(ROWS, SIZE), "out": torch.zeros(ROWS, OUTPUTS)}
        compute(expected)
        tensors["out"].fill_(7.0)
        recording.run(num_rows)
        assert torch.equal(tensors["out"][:num_rows], expected["out"][:num_rows])
        assert (tensors["out"][num_rows:] == 7.0).all()


def test_memory_that_was_not_declared_keeps_its_rows(tensors: dict[str, torch.Tensor]) -> None:
    recording = record(tensors, "x", "normed")
    recording.run(ROWS)
    with pytest.raises(RuntimeError, match=r"packed_linear.*out has shape \[5, 40\].*size 3"):
        recording.run(3)


def test_rows_are_the_first_dimension(tensors: dict[str, torch.Tensor]) -> None:
    tensors["scale"] = tensors["x"][0]
    with pytest.raises(RuntimeError, match=r"a tensor of rows has shape \[64\]; expected 5"):
        record(tensors, "x", "normed", "out")
    compute(tensors)  # runs again
    assert tensors["out"].any()


def test_other_threads_run_theirs(tensors: dict[str, torch.Tensor]) -> None:
    recording = Recording(ROWS)
    with recording.noting():
        thread = threading.Thread(target=compute, args=(tensors,))
        thread.start()
        thread.join(30.0)
    assert recording.num_calls == 0
    assert tensors["out"].all()


def test_it_keeps_what_it_needs(tensors: dict[str, torch.Tensor]) -> None:
    recording = record(tensors, "x", "normed", "out")
    compute(tensors)
    expected = tensors["out"].clone()
    out = tensors["out"]
    del tensors["weight"], tensors["normed"], tensors["scale"]
    garbage = [torch.full((OUTPUTS, SIZE), 3.0) for _ in range(100)]
    out.zero_()
    recording.run(ROWS)
    assert torch.equal(out, expected)
    assert len(garbage) == 100
