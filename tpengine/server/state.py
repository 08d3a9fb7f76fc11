"""Where a server is in its life; shared by its methods, its health and its signal handlers."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.server.limits import max_text_bytes


class State(enum.Enum):
    """The stations, in their order."""

    LOADING = "loading"
    RUNNING = "running"
    DRAINING = "draining"
    """No new requests; those that run may finish."""


class ServerState:
    """One server's life.

    Attributes:
        model: the name under which it is served.
        engine: None while it is loaded.
        max_text_bytes: longest text that can be tokenized into what fits; None: not known.
        ending: set when the server is to end.
        why: who asked for that.
        drain_timeout_s: how long running requests may go on then.
        last_words: what clients are told whose requests had not finished by then.
    """

    def __init__(self, model: str, drain_timeout_s: float) -> None:
        self.model = model
        self.drain_timeout_s = drain_timeout_s
        self.engine: AsyncLLMEngine | None = None
        self.max_text_bytes: int | None = None
        self.state = State.LOADING
        self.ending = asyncio.Event()
        self.why = ""
        self.last_words = (
            "the server ends, and the time that running requests had is up; ask another"
        )
        self._start = time.monotonic()
        self._num_open_calls = 0

    @property
    def uptime_s(self) -> float:
        """Seconds since the server began to load."""
        return time.monotonic() - self._start

    @property
    def num_open_calls(self) -> int:
        """Calls of Generate and GenerateStream that have not ended."""
        return self._num_open_calls

    @property
    def is_draining(self) -> bool:
        """Whether no new request is taken."""
        return self.state is State.DRAINING

    @contextmanager
    def open_call(self) -> Iterator[None]:
        """Counts a call while it is served."""
        self._num_open_calls += 1
        try:
            yield
        finally:
            self._num_open_calls -= 1

    def serve(self, engine: AsyncLLMEngine) -> None:
        """The engine is up."""
        self.max_text_bytes = max_text_bytes(
            engine.llm_engine.tokenizer, engine.get_model_config().max_model_len
        )
        self.engine = engine
        if self.state is State.LOADING:
            self.state = State.RUNNING

    def ask_to_end(self, why: str, drain_timeout_s: float | None = None) -> None:
        """New requests are refused from now on, and the server ends when the running ones have.

        Args:
            drain_timeout_s: None: what the server was started with.
        """
        if self.state is State.DRAINING:
            return
        self.state = State.DRAINING
        self.why = why
        if drain_timeout_s is not None:
            self.drain_timeout_s = min(drain_timeout_s, self.drain_timeout_s)
        self.ending.set()

    def stop_at_once(self) -> None:
        """A server that is ending already gives running requests no more time."""
        self.last_words = "the server was told to stop at once; ask another"
