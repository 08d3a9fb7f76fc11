"""Ctrl-C between steps rather than inside them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Notes a Ctrl-C, and raises it when the context ends.

    A step changes scheduler, worker and outputs together; an exception in its middle would leave
    them disagreeing. A second Ctrl-C is raised at once, for whoever cannot wait. Outside the main
    thread, which alone gets signals, the context does nothing.

    Attributes:
        pending: whether a Ctrl-C came so far.
    """

    def __init__(self) -> None:
        self.pending = False
        self._replaced: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> DeferredInterrupt:
        # Only Python's own handler is replaced: one that the user set knows better.
        handler = signal.default_int_handler
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, self._note)
            self._replaced = handler
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._replaced is not None:
            signal.signal(signal.SIGINT, self._replaced)
        if self.pending and kind is None:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
