"""Recordings of calls of the compiled CPU ops, which run again without Python.

This is the Python interface of `csrc/cpu/recording.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

from tpengine.ops.library import cpu_functions

_MESSAGE_BYTES = 1024
_ALL_RAN, _REFUSED = -1, -2
"""What a run returns in place of the number of the call that failed."""
_here = threading.local()

_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64
_functions = cpu_functions(
    "tpengine_recording_",
    {
        "new": (_POINTER, [_I64]),
        "delete": (None, [_POINTER]),
        "declare_rows": (None, [_POINTER, _POINTER, _I64]),
        "select": (None, [_POINTER]),
        "num_calls": (_I64, [_POINTER]),
        "run": (_I64, [_POINTER, _I64, ctypes.c_char_p, _I64]),
    },
)


def has_recordings() -> bool:
    """Whether the compiled library is loaded; only its ops can be recorded."""
    return _functions is not None


class Recording:
    """A list of calls with their arguments. It keeps the memory of their tensors alive.

    Args:
        num_rows: first dimension of the tensors that are declared; a run may use fewer rows.
    """

    def __init__(self, num_rows: int) -> None:
        assert _functions is not None, "the compiled library is not installed"
        self.num_rows = num_rows
        self._functions = _functions
        self._handle = _functions.tpengine_recording_new(num_rows)
        end = weakref.finalize(self, _functions.tpengine_recording_delete, self._handle)
        end.atexit = False  # at exit a daemon thread may still be in a run
        self._failures: dict[int, Callable[[int], Exception]] = {}
        self._kept: list[object] = []

    @staticmethod
    def here() -> Recording | None:
        """The recording in which this thread notes its calls; None: it executes them."""
        return getattr(_here, "recording", None)

    @property
    def num_calls(self) -> int:
        """Number of ops that a run calls."""
        return int(self._functions.tpengine_recording_num_calls(self._handle))

    def declare_rows(self, tensor: Tensor) -> None:
        """Declares that tensors which begin in the memory of this contiguous tensor have `num_rows`
        as their first dimension."""
        place = tensor.data_ptr(), tensor.nbytes
        self._functions.tpengine_recording_declare_rows(self._handle, *place)

    def expect(self, x: Tensor, out: Tensor | None, failure: Callable[[int], Exception]) -> None:
        """Prepares for a call that is no op and is noted next.

        Args:
            x, out: `[num_rows, ...]`, which the call reads and writes.
            failure: makes the error of a run with that many rows in which the call fails.

        Raises:
            RuntimeError: `x` has another number of rows.
        """
        if x.shape[0] != self.num_rows:
            raise RuntimeError(f"a call takes shape {list(x.shape)}; expected {self.num_rows} rows")
        self._failures[self.num_calls] = failure
        # Their memory: tensors would count as users of the workspace for as long.
        self._kept += [tensor.untyped_storage() for tensor in (x, out) if tensor is not None]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Within the block, ops that this thread calls are recorded and not executed."""
        self._functions.tpengine_recording_select(self._handle)
        _here.recording = self
        try:
            yield
        finally:
            _here.recording = None
            self._functions.tpengine_recording_select(None)

    def run(self, num_rows: int) -> None:
        """Executes all calls, in order, with tensors of `num_rows` rows.

        Raises:
            RuntimeError: an op's arguments do not fit, as in a direct call.
            Exception: the one of a call that failed, see `expect`.
        """
        assert 0 <= num_rows <= self.num_rows
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        place = self._handle, num_rows, message, len(message)
        failed = self._functions.tpengine_recording_run(*place)
        if failed == _REFUSED:
            raise RuntimeError(message.value.decode(errors="replace"))
        if failed != _ALL_RAN:
            raise self._failures[failed](num_rows)
