"""The lifecycle of a server: start, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.async_engine.engine_thread import EngineStart
from tpengine.checkpoint.model_defaults import sampling_defaults
from tpengine.checkpoint.model_files import read_generation_config, read_json
from tpengine.config import PICTURE_MODELS, SAMPLING_RATE
from tpengine.engine.picture_reader import MAX_URL_BYTES
from tpengine.engine.requests import GenerateRequest
from tpengine.engine_args import AsyncEngineArgs
from tpengine.errors import ConfigError, EngineError, ModelLoadError, TPEngineError, counted
from tpengine.host import EndSignals, allow_open_files, kept_end_handlers
from tpengine.inputs import PoolingParams
from tpengine.logger import STDOUT, flush_lines, init_logger, write_line, write_on_threads
from tpengine.sampling_params import SamplingParams
from tpengine.server.auth import Authenticator, CertificateReloader, is_own_host, wrong_host
from tpengine.server.grpc.server import GrpcServer, batch_wake_ups
from tpengine.server.limits import default_message_bytes
from tpengine.server.server_args import ServerArgs, join_address
from tpengine.server.state import METRICS_TYPE, ServerState, State

if TYPE_CHECKING:  # its packages are optional
    from tpengine.server.http.http_server import HttpServer

logger = init_logger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
_POLL_S = 0.2
"""Interval at which the engine's health is read."""
_WAIT_S = 0.01
"""Interval at which open calls are counted, until they have finished."""
_WRITE_S = 2.0
"""Minimum time for the last outputs of finished requests to be sent."""
_STEP_S = 5.0
"""Time for the running step after the drain; a longer step counts as hanging."""
_RANKS_S = 8.0
"""Time for the ranks of an engine that is given up to end in order."""
_AT_ONCE_S = 0.6
"""Time for everything after a second signal; the system needs some more to end the process."""
_AFTER_DRAIN_S = 30.0
"""Time for everything after the drain; then the process ends, whatever holds its loop up."""
_LINES_S = 0.1
"""Time for the last lines to be written."""
_EXIT_S = 10.0
Phases = dict[str, float]
_MAX_OPEN_FILES, _FEW_FILES = 1 << 20, 256


def run_server(
    args: ServerArgs, auth: Authenticator, engine_args: AsyncEngineArgs, phases: Phases
) -> int:
    """Serves until a signal, Drain or the engine's death; returns the exit code.

    Args:
        phases: seconds of the phases of the start that are over already.

    Raises:
        ConfigError: the port is taken, or the certificates cannot be used.
    """

    async def serve() -> int:  # grpc must be created in the loop that serves it
        return await _Server(args, auth, engine_args, phases).run()

    write_on_threads()
    with kept_end_handlers(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(serve())
        _exit_within(_EXIT_S, code)  # also if a thread of the loop hangs
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed; None: that of asyncio."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server:
    """One run of the server."""

    def __init__(
        self, args: ServerArgs, auth: Authenticator, engine_args: AsyncEngineArgs, phases: Phases
    ) -> None:
        self._args = args
        self._engine_args, self._start = engine_args, EngineStart(engine_args)
        self._log_requests = not engine_args.disable_log_requests
        max_files = allow_open_files(_MAX_OPEN_FILES)
        if max_files < _FEW_FILES:
            logger.warning(
                "this process may open %d files; a server and its ranks take about 100 before the "
                "first client comes: raise the limit (ulimit -n)",
                max_files,
            )
        limits = args.limits().within_files(max_files)
        if args.max_message_mib is None and _may_have_pictures(engine_args.model):
            most = limits.max_message_bytes + MAX_URL_BYTES
            limits = dataclasses.replace(limits, max_message_bytes=most)
        adapters = {adapter.lora_name: adapter for adapter in args.adapters()}
        own = args.drain_timeout, adapters, args.lora_folder, limits, args.salts_prefixes(auth)
        self._state = ServerState(engine_args.served_names, *own)
        self._phases = phases
        self._phase = ""
        self._signals: list[str] = []
        self._catching = EndSignals(self._on_signal, lambda number: _exit_now(128 + number))
        self._closing_at_once: asyncio.Task[NoReturn] | None = None  # since the second signal
        self._authenticator = auth
        self._loop = asyncio.get_running_loop()
        batch_wake_ups(self._loop)
        self._grpc = GrpcServer(self._state, auth)
        self._http: HttpServer | None = None

    async def run(self) -> int:
        """Starts, serves and ends the server."""
        self._catching.catch()
        with contextlib.ExitStack() as stack:
            with self._timed("listen"):
                addresses = await self._listen(stack)
            code = await self._serve(addresses)
            if self._closing_at_once is not None:  # it ends the process, with its own exit code
                await self._closing_at_once
            return code

    async def _listen(self, stack: contextlib.ExitStack) -> list[str]:
        """Opens all ports; returns the texts of the ready line about them, that of gRPC first."""
        args, tls = self._args, None
        if args.tls_cert is not None and args.tls_key is not None:
            tls = CertificateReloader(args.tls_cert, args.tls_key, args.tls_client_ca)
            stack.callback(asyncio.create_task(tls.follow()).cancel)
        port = await self._grpc.start(args.address(), tls)
        addresses = [join_address(args.host, port)]
        if args.http_port is not None:
            from tpengine.server.http.app import make_app
            from tpengine.server.http.http_server import HttpServer

            auth, hosts = self._authenticator, args.hosts(self._authenticator)
            app = make_app(self._state, auth, args.cors_origins(), hosts)
            self._http = HttpServer(app, self._state.limits)
            http_port = await self._http.start(args.host, args.http_port, tls)
            scheme = "http" if tls is None else "https"
            addresses.append(f"; OpenAI on {scheme}://{join_address(args.host, http_port)}/v1")
        if args.metrics_port is not None:
            # On a thread, since it looks up a name.
            place = args.metrics_port, self._state, args.names()
            port, close = await asyncio.to_thread(open_metrics_port, *place)
            stack.callback(close)
            addresses.append(f"; metrics on http://127.0.0.1:{port}/metrics")
        return addresses

    async def _close_doors(self, grace_s: float) -> None:
        doors = (self._grpc, self._http)
        await asyncio.gather(*(door.close(grace_s) for door in doors if door is not None))

    async def _serve(self, addresses: list[str]) -> int:
        # From here on health answers: alive, and not ready.
        starting = asyncio.create_task(self._start_engine())
        await self._wait_for_start(starting)
        try:
            engine = starting.result()
        except Exception as error:
            await self._close_doors(0)
            if isinstance(error, TPEngineError):
                logger.error("the server cannot start: %s: %s", type(error).__name__, error)
            else:  # a defect of ours or of a library: the traceback is needed
                logger.exception("the server cannot start")
            return EXIT_FAILED
        # The process is the server's own, and what libraries made while they were loaded stays for
        # good. A full garbage collection looks through it in 0.2 s, in which no thread runs.
        gc.freeze()
        self._announce(addresses)
        code = await self._watch(engine)
        return await self._close(engine, code)

    async def _wait_for_start(self, starting: asyncio.Task[AsyncLLMEngine]) -> None:
        """Returns when the start has succeeded or failed; ends the process if it is cancelled or
        takes too long."""
        end = time.monotonic() + self._args.startup_timeout
        while not starting.done():
            left_s = end - time.monotonic()
            if self._state.closing.is_set():
                why = f"{self._state.why} during start-up: nothing runs yet"
                await self._exit_without_engine(EXIT_OK, why)
            if left_s <= 0:
                limit = f"startup_timeout = {self._args.startup_timeout:g} s"
                why = f"in phase {self._phase!r}; raise it, or see above for what takes so long"
                why = f"not ready within {limit}: still {why}"
                await self._exit_without_engine(EXIT_FAILED, why)
            await asyncio.wait({starting}, timeout=min(left_s, _POLL_S))
            self._catching.catch()  # Ray, when it is initialised, replaces the handlers

    async def _start_engine(self) -> AsyncLLMEngine:
        """Loads the model, and generates one token to show that the engine works.

        Raises:
            EngineError: the engine cannot be built, or that token does not come.
        """
        with self._timed("engine"):
            folder = (await asyncio.to_thread(self._engine_args.read_model)).folder
            self._state.sampling = sampling_defaults(folder, read_generation_config(folder))[0]
            # Later than `_wait_for_start`, whose error names the option.
            limit_s = self._args.startup_timeout + _EXIT_S
            make = partial(AsyncLLMEngine, start_timeout_s=limit_s, log_requests=self._log_requests)
            engine = await asyncio.to_thread(make, self._start.build, self._state.limits.queue)
            for adapter in self._state.adapters.values():
                await asyncio.to_thread(engine.llm_engine.add_lora, adapter)
        with self._timed("first token"):
            params = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True
            )
            model = engine.model_config
            pooling = None if model.pooling is None else PoolingParams()
            prompt: Any = {"prompt_token_ids": [0]}
            if model.sound:
                silence = [0.0], SAMPLING_RATE
                prompt = {"prompt": None, "multi_modal_data": {"audio": silence}}
            own: dict[str, Any] = {"request_id": "start-up", "pooling_params": pooling}
            request = GenerateRequest(prompt, params=params, **own)
            async for _ in engine.serve(request):
                pass
        if self._args.max_message_mib is None:
            self._state.max_message_bytes = default_message_bytes(engine.llm_engine)
        self._state.serve(engine)
        return engine

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._phase = phase
        start = time.monotonic()
        yield
        self._phases[phase] = time.monotonic() - start
        logger.info("start-up: %s took %.2f s", phase, self._phases[phase])

    def _announce(self, addresses: list[str]) -> None:
        args = self._args
        guards = []
        if args.tls_cert is not None:
            guards.append("mutual TLS" if args.tls_client_ca is not None else "TLS")
        if self._authenticator.wants_token:
            guards.append("tokens")
            if args.tls_cert is None:
                logger.warning("tokens travel unencrypted; give --tls-cert and --tls-key")
        phases = ", ".join(f"{name} {took:.2f} s" for name, took in self._phases.items())
        write_line(
            STDOUT,
            f"tpengine is ready on {addresses[0]}: model {self._state.model!r}, "
            f"{' and '.join(guards) or 'no TLS, no tokens'}{''.join(addresses[1:])}; started in "
            f"{sum(self._phases.values()):.2f} s ({phases})",
        )

    def _on_signal(self, number: int) -> float:
        """The first signal drains the server, the second ends it within a second, the third now.
        Runs on the thread of signals; returns the seconds until the process ends in any case."""
        self._signals.append(signal.Signals(number).name)
        if len(self._signals) > 2:
            _exit_now(128 + number)
        is_first = len(self._signals) == 1
        with contextlib.suppress(RuntimeError):  # the loop has ended
            act = self._drain if is_first else self._begin_close_at_once
            self._loop.call_soon_threadsafe(act, number)
        return self._state.drain_timeout_s + _AFTER_DRAIN_S if is_first else _AT_ONCE_S

    def _drain(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._state.state is State.DRAINING:
            logger.info("%s: the server ends already; another signal ends it at once", name)
        self._state.ask_to_close(name)

    def _begin_close_at_once(self, number: int) -> None:
        logger.warning("%s after %s: ending at once", self._signals[1], self._signals[0])
        self._closing_at_once = asyncio.create_task(self._close_at_once(128 + number))

    async def _close_at_once(self, code: int) -> NoReturn:
        """Ends the process within a second, whatever the engine does. The clients of open calls are
        told why first; else they would see only a closed connection."""
        self._state.last_words = "the server was told to stop at once; ask another"
        engine = self._state.engine
        if engine is not None:  # readers get their error at once; the rest of drain awaits a step
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.drain(0.0), _AT_ONCE_S / 4)
        await self._close_doors(_AT_ONCE_S / 2)
        _exit_now(code)

    async def _watch(self, engine: AsyncLLMEngine) -> int:
        """Follows the engine's health until the server has to end; returns the exit code so far."""
        is_full = False
        while True:
            health, full = engine.health(), self._state.calls.why_full
            is_running = self._state.state is State.RUNNING
            self._grpc.health.set(alive=health.alive, ready=self._state.why_not_ready() is None)
            if full is not None and not is_full:
                logger.warning("not ready: %s", full)
            is_full = full is not None
            if not health.alive:
                logger.error("%s; the server ends", health.reason)
                return EXIT_FAILED
            if not is_running:
                return EXIT_OK
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state.closing.wait(), _POLL_S)

    async def _close(self, engine: AsyncLLMEngine, code: int) -> int:
        """Lets requests finish if the engine is alive, and closes everything."""
        state = self._state
        end = time.monotonic()
        if code == EXIT_OK:
            end += state.drain_timeout_s
            calls, left_s = counted(state.num_open_calls, "open call"), state.drain_timeout_s
            logger.info("%s: no new requests; %s, %.1f s to finish", state.why, calls, left_s)
            # The doors take no new calls; those that have begun may begin with all their prompts.
            while state.num_begun and time.monotonic() < end and engine.health().alive:
                await asyncio.sleep(_WAIT_S)
            num_cut = await engine.drain(max(0.0, end - time.monotonic()))
            if num_cut:
                logger.warning("aborted %s that had not finished", counted(num_cut, "request"))
            if not engine.health().alive:
                code = EXIT_FAILED
        # Clients have still to read what is generated; a slow one has the rest of the time.
        end = max(end, time.monotonic() + _WRITE_S)
        while (state.num_open_calls or state.kept.are_read) and time.monotonic() < end:
            await asyncio.sleep(_WAIT_S)
        await self._close_doors(0.5)
        try:
            await engine.shutdown(_STEP_S)
        except EngineError as error:
            why = f"the engine does not end ({error})"
            await self._exit_without_engine(code or EXIT_FAILED, why)
        logger.info("the server has ended, exit code %d", code)
        return code

    async def _exit_without_engine(self, code: int, why: str) -> NoReturn:
        """Ends the process although the engine's thread hangs; a thread in native code cannot be
        ended. Ends the ranks first: they would else stay until they miss the driver."""
        logger.warning("%s", why)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._start.cancel), _RANKS_S)
        except Exception as error:
            logger.warning("the ranks have not ended in order: %s: %s", type(error).__name__, error)
        _exit_now(code)


def _exit_now(code: int) -> NoReturn:
    flush_lines(_LINES_S)
    os._exit(code)


def _exit_within(seconds: float, code: int) -> None:
    """Ends the process after this time: at its end the interpreter joins threads, and one that
    hangs would keep the process."""
    timer = threading.Timer(seconds, _exit_now, (code,))
    timer.daemon = True
    timer.start()


_METRICS_END_S = 5.0


def _may_have_pictures(model: str) -> bool:
    """Whether prompts may have pictures, as far as it is known before the model is fetched: gRPC
    takes its bound of a message when the port is opened. `ModelConfig.reads_pictures` is exact, and
    known later."""
    try:
        return read_json(Path(model, "config.json")).get("model_type") in PICTURE_MODELS
    except (ModelLoadError, OSError):  # the engine's start reports it, unless it is on the hub
        return not Path(model).exists()


def open_metrics_port(
    port: int, state: ServerState, hosts: Sequence[str]
) -> tuple[int, Callable[[], None]]:
    """Serves metrics to Prometheus, over HTTP on loopback and on threads of their own.

    Args:
        port: 0: any free one.
        state: has the metrics at a moment.
        hosts: see `is_own_host`.

    Returns:
        The port on 127.0.0.1, and a function that closes it.

    Raises:
        ConfigError: the port is taken.
    """
    from prometheus_client import start_http_server

    def answer(environ: dict[str, Any], start: Any) -> list[bytes]:
        if not is_own_host(host := environ.get("HTTP_HOST", ""), hosts):
            start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [wrong_host(host).encode()]
        start("200 OK", [("Content-Type", METRICS_TYPE)])
        return [state.metrics_text()]

    try:
        server, thread = start_http_server(port, "127.0.0.1")
    except OSError as error:
        text = f"metrics_port = {port} cannot be had: {error}; choose another"
        raise ConfigError(text) from error
    server.set_app(answer)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(_METRICS_END_S)

    return int(server.server_port), close
