"""Calls of the compiled CPU ops, noted once to be run again and again: the Python face of
`csrc/cpu/recording.h`."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator

from torch import Tensor

from tpengine.ops.library import cpu_functions

_MESSAGE_BYTES = 1024


def _declare() -> ctypes.CDLL | None:
    library = cpu_functions()
    if library is None:
        return None
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "new": (pointer, [i64]),
        "delete": (None, [pointer]),
        "declare_rows": (None, [pointer, pointer, i64]),
        "select": (None, [pointer]),
        "num_calls": (i64, [pointer]),
        "run": (i32, [pointer, i64, ctypes.c_char_p, i64]),
    }
    functions = ctypes.CDLL(library)
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, f"tpengine_recording_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


_functions = _declare()


def has_recordings() -> bool:
    """Whether the compiled library, whose ops alone can be recorded, is there."""
    return _functions is not None


class Recording:
    """Holds the arguments of the calls that it notes, with the memory of their tensors.

    Args:
        num_rows: first dimension of the tensors whose memory is declared; a run may ask for fewer.
    """

    def __init__(self, num_rows: int) -> None:
        assert _functions is not None, "the compiled library is not installed"
        self.num_rows = num_rows
        self._functions = _functions
        self._handle = _functions.tpengine_recording_new(num_rows)
        end = weakref.finalize(self, _functions.tpengine_recording_delete, self._handle)
        end.atexit = False  # a thread that is forgotten may be in a run then

    @property
    def num_calls(self) -> int:
        """Ops that a run calls."""
        return int(self._functions.tpengine_recording_num_calls(self._handle))

    def declare_rows(self, tensor: Tensor) -> None:
        """Tensors that begin in the memory of this one, which is contiguous, have `num_rows` as
        their first dimension."""
        self._functions.tpengine_recording_declare_rows(
            self._handle, tensor.data_ptr(), tensor.nbytes
        )

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """In which this thread's calls of tpengine's ops are noted, and do nothing else."""
        self._functions.tpengine_recording_select(self._handle)
        try:
            yield
        finally:
            self._functions.tpengine_recording_select(None)

    def run(self, num_rows: int) -> None:
        """Makes all calls, in order, with tensors of `num_rows` rows.

        Raises:
            RuntimeError: an op's arguments do not fit, as when it is called by itself.
        """
        assert 0 <= num_rows <= self.num_rows
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._functions.tpengine_recording_run(self._handle, num_rows, message, len(message)):
            raise RuntimeError(message.value.decode(errors="replace"))
