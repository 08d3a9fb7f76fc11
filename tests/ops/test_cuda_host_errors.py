"""Which operation the launchers name for an error of CUDA, and the error of the engine."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tpengine.errors import is_device_fault

from .cuda_host_library import load_host, needs_compiler

SUCCESS, OUT_OF_MEMORY, CAPTURE_UNSUPPORTED = 0, 2, 900
LAUNCH_ERRORS = {"invalid value": 1, "configuration": 9, "function": 98, "image": 209,
                 "resources": 701, "memory": 2, "driver": 35, "PTX version": 222,
                 "capture": 900}  # fmt: skip
FAULTS = {"illegal address": 700, "time-out": 702, "launch failure": 719}


def message_of(error: int) -> str:
    library = load_host("launch")
    library.message_of.restype = ctypes.c_char_p
    return library.message_of(error).decode()


@needs_compiler
def test_a_launch_that_cuda_refuses_is_blamed_for_it() -> None:
    assert message_of(SUCCESS) == ""
    for error in LAUNCH_ERRORS.values():
        message = message_of(error)
        assert message.startswith("tpengine::argmax: launch failed: ")
        assert not is_device_fault(RuntimeError(message))


@needs_compiler
def test_a_fault_may_be_of_an_operation_before() -> None:
    for error in FAULTS.values():
        message = message_of(error)
        assert "in this operation or one before it; CUDA_LAUNCH_BLOCKING=1 shows" in message
        assert is_device_fault(RuntimeError(message))
    assert "an illegal memory access" in message_of(FAULTS["illegal address"])


@pytest.mark.parametrize(
    ("code", "is_fault"),
    [(700, True), (719, True), (214, True), (OUT_OF_MEMORY, False), (CAPTURE_UNSUPPORTED, False)],
)
def test_torch_tells_a_fault_by_its_code(code: int, is_fault: bool) -> None:
    error = torch.AcceleratorError("CUDA error: something")
    assert not is_device_fault(error)
    error.error_code = code
    assert is_device_fault(error) == is_fault
