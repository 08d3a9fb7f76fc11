"""Definition of ops; loading of the native libraries; choice of instruction set.

The way of one op to its kernel: `ops/fused_ops.py` (`rms_norm`, made by `op` here), torch's
dispatcher, on CPU `register_fused` and `rms_norm` in `csrc/cpu/fused_ops.cpp`, which call the
pointer `kernels().norm` of the instruction set, filled by `csrc/cpu/isa/table.cpp` from
`isa/fused.inc`; on a GPU `csrc/cuda/fused_ops.cu` and `csrc/cuda/fused/rms_norm.cuh`.

The instruction set: `current()` in `csrc/cpu/bindings.cpp` takes the best one that runs here;
`TPENGINE_CPU_ISA` chooses another.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import torch

from tpengine import envs
from tpengine.errors import NativeLibraryError
from tpengine.logger import init_logger

_logger = init_logger(__name__)

_P = ParamSpec("_P")
REFERENCES: dict[str, Callable[..., None]] = {}
"""The plain-torch form of each op that `op` has defined, by its name."""
_definitions = torch.library.Library("tpengine", "FRAGMENT")  # deleting it removes the ops


def op(reference: Callable[_P, None], *written: str) -> Callable[_P, None]:
    """Defines `torch.ops.tpengine.<name of the reference>` and returns it.

    Args:
        reference: its signature is the op's schema, its docstring the contract. It runs on devices
            for which no kernel is registered, and if the library was not built.
        written: the parameters that the op writes into. It has no other output.
    """
    name = reference.__name__
    schema = torch.library.infer_schema(reference, op_name=name, mutates_args=written)
    _definitions.define(schema.replace("SymInt", "int"))  # the kernels take plain numbers
    _definitions.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpengine::{name}", _fake, lib=_definitions)
    REFERENCES[name] = reference
    defined: Callable[_P, None] = getattr(torch.ops.tpengine, name).default
    return defined


def _fake(*_: object) -> None:
    """Does nothing: an op only writes into its arguments and has no output with a shape."""


def _find_library(name: str) -> Path | None:
    # An editable install puts the libraries into site-packages while this file stays in the
    # source tree, so all folders of the package are searched, not only that of __file__.
    paths = (Path(folder) / "lib" / name for folder in sys.modules["tpengine"].__path__)
    return next((path for path in paths if path.exists()), None)


def _load(name: str) -> ctypes.CDLL | None:
    path = _find_library(name)
    if path is None:
        return None
    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"{path} cannot be loaded with torch {torch.__version__} ({error}); "
            "reinstall tpengine in this environment"
        ) from error


def _load_cpu() -> ctypes.CDLL | None:
    cpu = _load("libtpengine_cpu.so")
    if cpu is None:
        _logger.warning(
            "libtpengine_cpu.so is not installed: every op runs as slow plain torch; "
            "`pip install .` builds it"
        )
        return None
    cpu.tpengine_cpu_isa.restype = ctypes.c_char_p
    cpu.tpengine_cpu_isa_at.restype = ctypes.c_char_p
    cpu.tpengine_cpu_isa_at.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)]
    cpu.tpengine_set_cpu_isa.argtypes = [ctypes.c_int32]
    cpu.tpengine_set_cpu_isa.restype = None
    return cpu


def _load_cuda() -> ctypes.CDLL | None:
    cuda = _load("libtpengine_cuda.so")
    if cuda is None:
        if torch.cuda.is_available():
            _logger.warning(
                "libtpengine_cuda.so is not installed: on a GPU every op runs as slow plain torch; "
                "install the CUDA toolkit (nvcc) and run `TPENGINE_CUDA=ON pip install .`"
            )
        return None
    cuda.tpengine_cuda_decode_wave.restype = ctypes.c_int32
    cuda.tpengine_cuda_decode_wave.argtypes = [ctypes.c_int32] * 5
    return cuda


_cpu = _load_cpu()
cuda_library = _load_cuda() if torch.version.cuda is not None else None


def has_cpu_kernels() -> bool:
    """Whether the compiled CPU kernels are loaded; otherwise the references run."""
    return _cpu is not None


def has_cuda_kernels() -> bool:
    """Whether the compiled CUDA kernels are loaded; otherwise the references run."""
    return cuda_library is not None


def decode_wave(
    device_index: int, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> int:
    """Returns how many work items per kv head the decode kernel runs at once on a GPU.

    Args:
        dtype: of the KV cache.

    Raises:
        NativeLibraryError: the CUDA kernels do not run on this GPU.
    """
    codes = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
    assert cuda_library is not None, "the CUDA kernels are not installed"
    wave: int = cuda_library.tpengine_cuda_decode_wave(
        device_index, codes[dtype], head_dim, num_heads, num_kv_heads
    )
    if wave < 1:
        major, minor = torch.cuda.get_device_capability(device_index)
        card = f"{torch.cuda.get_device_name(device_index)}, compute capability {major}.{minor}"
        raise NativeLibraryError(
            f"the CUDA kernels do not run on GPU {device_index} ({card}): they need "
            "compute capability 8.0 or later and a driver for CUDA 13 or later; torch "
            f"{torch.__version__}"
        )
    return wave


def cpu_functions(prefix: str, types: Mapping[str, tuple[Any, list[Any]]]) -> ctypes.CDLL | None:
    """Returns plain C functions of the compiled CPU library; None: it is not installed.

    They keep `errno` (`ctypes.get_errno`), and release Python's lock while they run.

    Args:
        prefix: common prefix of the names.
        types: result type and argument types, by the rest of the name.

    Raises:
        NativeLibraryError: the library has no such function, since it is older than this code.
    """
    if _cpu is None:
        return None
    # A new object for each caller, because use_errno and the types belong to the object.
    functions = ctypes.CDLL(_cpu._name, use_errno=True)
    for name, (result, arguments) in types.items():
        if (function := getattr(functions, prefix + name, None)) is None:
            raise NativeLibraryError(
                f"{_cpu._name} has no function {prefix}{name}. The compiled library is older than "
                "the Python code: build it again with `make setup` or `pip install .`"
            )
        function.restype, function.argtypes = result, arguments
    return functions


EMULATED_CPU_ISA = "emulated_amx"
"""Kernels of amx with its tiles in plain C: for tests on any CPU, and far too slow for all else."""


class IsaState(enum.IntEnum):
    """What can be done with an instruction set for which there are CPU kernels."""

    NOT_HERE = 0  # this CPU does not run it
    NOT_BUILT = 1  # its kernels are not in the library
    USABLE = 2


def _cpu_isas() -> dict[str, IsaState]:
    """All instruction sets, best first; none without the library."""
    isas: dict[str, IsaState] = {}
    state = ctypes.c_int32()
    while _cpu is not None and (name := _cpu.tpengine_cpu_isa_at(len(isas), ctypes.byref(state))):
        isas[name.decode()] = IsaState(state.value)
    return isas


def supported_cpu_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this CPU runs and the library has, best first."""
    usable = (name for name, state in _cpu_isas().items() if state is IsaState.USABLE)
    return tuple(name for name in usable if name != EMULATED_CPU_ISA)


def cpu_isa() -> str:
    """Returns the instruction set in use, a name as in `envs.cpu_isa`, or reference: no library."""
    return _cpu.tpengine_cpu_isa().decode() if _cpu is not None else "reference"


def set_cpu_isa(name: str) -> None:
    """Makes the CPU kernels use the instruction set `name` from the next call on.

    Raises:
        NativeLibraryError: this CPU or the library does not support it.
    """
    isas = _cpu_isas()
    state = isas.get(name, IsaState.NOT_HERE)
    if _cpu is not None and state is IsaState.USABLE:
        _cpu.tpengine_set_cpu_isa(list(isas).index(name))
        return
    supported = ", ".join(supported_cpu_isas()) or "none, as the native library is not installed"
    how = ""
    if state is IsaState.NOT_BUILT:
        how = "; this CPU runs it too, but it was not built: `make setup` or `pip install .` does"
    raise NativeLibraryError(
        f"the CPU instruction set {name!r} (TPENGINE_CPU_ISA) cannot be used; choose one of "
        f"{supported}{how}"
    )


if (_wanted := envs.cpu_isa()) is not None:
    set_cpu_isa(_wanted)
