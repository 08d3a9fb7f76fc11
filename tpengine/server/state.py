"""`ServerState`: the phase of a server; its doors and its lifecycle share it."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpengine import errors
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.async_engine.mailbox import Mailbox
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import LoRARequest
from tpengine.server.kept_streams import KeptStreams
from tpengine.server.limits import Limits, OpenCalls, max_text_bytes

_LAST_WORDS = "the server ends, and the time that running requests had is up; ask another"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `ServerState.metrics_text`."""


class State(enum.Enum):
    """The phases of a server, in their order."""

    LOADING = "loading"
    RUNNING = "running"
    DRAINING = "draining"
    """New requests are refused; running ones may finish."""


@dataclass(eq=False, repr=False)
class ServerState:
    """The phase of one server, and access to its engine.

    Attributes:
        calls: the open calls of all doors.
        kept: the streams of all doors that can be resumed.
        names: under which the model is served.
        adapters: by the name under which each is served.
        adapter_folder: whose subfolders `load_adapter` may load; None: nothing is loaded later.
        engine: None while it loads.
        sampling: the model's defaults of sampling parameters, read before it is loaded.
        closing: set when the server has to close.
        why: what asked the server to close.
        drain_timeout_s: seconds that running requests get to finish.
        last_words: error text for clients whose requests have not finished by then.
        created: time in seconds since 1970 at which the server began to load.
        num_open_calls: calls that generate and have not ended.
        num_begun: calls whose prompts may not all have reached the engine; see `begun`.
        limits: bounds of requests, calls and connections, for all doors.
        max_message_bytes: of a request; by default the model's length decides it.
        salts_prefixes: whether a request finds only prompts of its own client in the prefix cache.
    """

    names: Sequence[str]
    drain_timeout_s: float
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    adapter_folder: str | None = None
    limits: Limits = field(default_factory=Limits)
    salts_prefixes: bool = False
    engine: AsyncLLMEngine | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    state: State = State.LOADING
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    last_words: str = _LAST_WORDS
    num_open_calls: int = 0
    num_begun: int = 0
    _max_text_bytes: int | None = None

    def __post_init__(self) -> None:
        self.calls = OpenCalls(self.limits)
        self.kept = KeptStreams(self.limits, self.calls)
        self.max_message_bytes = self.limits.max_message_bytes
        self._adapter_ids = itertools.count(len(self.adapters) + 1)
        self.created, self._start = int(time.time()), time.monotonic()

    @property
    def model(self) -> str:
        """The name of the model in answers."""
        return self.names[0]

    @property
    def uptime_s(self) -> float:
        """Seconds since the server began to load."""
        return time.monotonic() - self._start

    def serve(self, engine: AsyncLLMEngine) -> None:
        """Begins to serve with an engine that is ready."""
        model, tokenizer = engine.model_config, engine.llm_engine.tokenizer
        longest = model.max_model_len if model.encoder is None else model.encoder.max_len
        self._max_text_bytes = max_text_bytes(tokenizer, longest)
        self.engine = engine
        if self.state is State.LOADING:
            self.state = State.RUNNING

    def why_not_ready(self) -> str | None:
        """Why a request that comes now is refused, or waits without progress; None: neither."""
        if self.engine is None or self.state is not State.RUNNING:
            return self.state.value
        health = self.engine.health()
        return self.calls.why_full if health.ready else health.reason or health.state

    def metrics_text(self) -> bytes:
        """The metrics for Prometheus, in its text format; none while the model loads."""
        return b"" if self.engine is None else self.engine.metrics_text(self.model)

    def ask_to_close(self, why: str, drain_timeout_s: float | None = None) -> None:
        """Refuses new requests from now on, and ends the server when the running ones have ended.

        Args:
            drain_timeout_s: at most the value that the server was started with; None: that value.
        """
        if self.state is State.DRAINING:
            return
        self.state = State.DRAINING
        self.why = why
        if drain_timeout_s is not None:
            self.drain_timeout_s = min(drain_timeout_s, self.drain_timeout_s)
        self.closing.set()

    def loaded_engine(self) -> AsyncLLMEngine:
        """The engine.

        Raises:
            EngineLoadingError: it is not loaded yet.
        """
        if self.engine is None:
            hint = "watch /ready, or grpc.health.v1 under 'readiness'"
            raise errors.EngineLoadingError(f"the server loads its model; {hint}")
        return self.engine

    @contextmanager
    def begun(self) -> Iterator[None]:
        """In the context a call has begun: a server that is told to end waits until it has handed
        all its prompts in."""
        self.num_begun += 1
        try:
            yield
        finally:
            self.num_begun -= 1

    def check_open(self, model: str | None) -> LoRARequest | None:
        """Checks that requests for a model are taken; returns the adapter of that name, if it is
        one.

        Args:
            model: its name in the request, or that of an adapter; None: any.

        Raises:
            EngineDrainingError: the server ends.
            ModelNotFoundError: another model is served.
        """
        if self.state is State.DRAINING:
            text = "the server ends and takes no new requests; ask another"
            raise errors.EngineDrainingError(text)
        if model is None or model in self.names:
            return None
        if model not in self.adapters:
            raise errors.ModelNotFoundError(
                f"model {model[:200]!r} is not served here, but {self.model!r} is; give that name, "
                "or none, or have the server take yours as well with --served-model-name, or as a "
                "LoRA adapter with --lora-modules",
                field="model",
            )
        return self.adapters[model]

    async def load_adapter(self, name: str, path: str) -> None:
        """Serves an adapter from now on.

        Args:
            path: of its folder, in `adapter_folder`.

        Raises:
            InvalidAdapterError: the name is taken, the path leads out of the folder, or the
                adapter cannot be served.
        """
        self._check_free(name)
        folder = await asyncio.to_thread(self._adapter_path, path)
        adapter = LoRARequest(name, next(self._adapter_ids), folder)
        await asyncio.to_thread(self.loaded_engine().llm_engine.add_lora, adapter)
        self._check_free(name)  # another call may have taken it in the meantime
        self.adapters[name] = adapter

    def _check_free(self, name: str) -> None:
        if not name or name in (*self.names, *self.adapters):
            hint = "choose another, or unload the adapter of this name"
            text = f"= {name!r:.200} is empty or taken; {hint}"
            raise errors.InvalidAdapterError.of_field("lora_name", text)

    def _adapter_path(self, path: str) -> str:
        """The path of an adapter, without links; see `load_adapter`."""
        assert self.adapter_folder is not None
        try:
            root = Path(self.adapter_folder).resolve()
            folder = (root / path).resolve()
            is_inside = root in folder.parents
        except (OSError, RuntimeError, ValueError):  # a loop of links; no path at all
            is_inside = False
        if not is_inside:
            text = f"= {path!r:.200} is not in the folder of adapters (--lora-folder)"
            raise errors.InvalidAdapterError.of_field("lora_path", f"{text}; name a folder in it")
        return str(folder)

    def unload_adapter(self, name: str) -> None:
        """Stops serving an adapter to new requests; its running requests go on.

        Raises:
            ModelNotFoundError: there is no adapter of this name.
        """
        if self.adapters.pop(name, None) is None:
            text = f"{name!r:.200} is no adapter here; see /v1/models"
            raise errors.ModelNotFoundError(text, field="lora_name")

    def check_text(self, name: str, texts: Iterable[str]) -> None:
        """Refuses a text that cannot fit before it is tokenized: one thread tokenizes for all.

        Args:
            name: of the field, for the message.
            texts: all its parts.

        Raises:
            RequestIgnoredError: it is longer than any text of `max_model_len` tokens.
        """
        length = sum(len(text.encode()) for text in texts)
        if self._max_text_bytes is not None and length > self._max_text_bytes:
            max_model_len = self.loaded_engine().model_config.max_model_len
            limit = f"{self._max_text_bytes}, which is more than max_model_len = {max_model_len}"
            text = f"has {length} bytes, more than {limit} tokens; shorten it"
            raise errors.RequestIgnoredError.of_field(name, text)

    def check_num_tokens(self, num_prompt_tokens: int) -> None:
        """Refuses a prompt of ids that is too long, before any of them is looked at.

        Raises:
            RequestIgnoredError: neither the model nor the cache has room for it.
        """
        engine = self.loaded_engine().llm_engine
        # The ids of a model with an encoder are its prompt, whose length it checks itself.
        is_encoders = engine.get_model_config().encoder is not None
        why = None if is_encoders else engine.why_too_long(num_prompt_tokens)
        if why is not None:
            raise errors.RequestIgnoredError(why)

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[Mailbox]:
        """Serves a request; see `AsyncLLMEngine.open`. Counts the call while it is open.

        Raises:
            RequestError, EngineError: as there; EngineDrainingError if the end of the server has
                aborted the request.
        """
        if self.salts_prefixes:
            owner = request.owner
            request = replace(request, owner=replace(owner, cache_salt=owner.name))
        self.num_open_calls += 1
        try:
            async with self.loaded_engine().open(request) as mailbox:
                yield mailbox
        except errors.RequestAbortedError:
            if self.state is State.DRAINING:
                raise errors.EngineDrainingError(self.last_words) from None
            raise
        finally:
            self.num_open_calls -= 1
