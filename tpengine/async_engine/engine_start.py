"""Building an engine on one thread, with the right of another to call it off."""

from __future__ import annotations

import threading

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError
from tpengine.executor.executor import Executor
from tpengine.executor.local_executor import create_executor

_END_S = 30.0


class EngineStart:
    """One start of an `LLMEngine`. Until its constructor returns nobody else knows the ranks, which
    may be processes on many machines: whoever gives up waiting for it could not end them."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._is_cancelled = threading.Event()
        self._has_ended = threading.Event()
        self._executor: Executor | None = None

    def build(self) -> LLMEngine:
        """Builds the engine.

        Raises:
            EngineError: an argument, the model or the memory does not allow it, see the message; or
                the start was called off.
        """
        config, executor = create_executor(self._args)
        self._executor = executor
        if self._is_cancelled.is_set():
            executor.shutdown()
            raise EngineError("the start of the engine was called off")
        try:
            return LLMEngine(config, executor, log_stats=not self._args.disable_log_stats)
        except BaseException:
            # A Ray that was started here is killed by the system when this thread ends, and would
            # leave processes behind that it ends itself when it is shut down in order.
            if self._is_cancelled.is_set():
                self._has_ended.wait(_END_S)
            raise

    def cancel(self) -> None:
        """Ends the ranks, however far they have come, also those of an engine that was built and
        hangs; `build` fails soon. Blocks meanwhile."""
        self._is_cancelled.set()
        try:
            if self._executor is not None:
                self._executor.shutdown()
        finally:
            self._has_ended.set()
