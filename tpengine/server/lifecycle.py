"""A server from its first phase to its exit code: start, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

from tpengine.engine.async_llm_engine import AsyncLLMEngine
from tpengine.engine.generate_request import GenerateRequest
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError, TPEngineError
from tpengine.logger import init_logger
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.server.auth import Authenticator
from tpengine.server.grpc_server import listen, make_server
from tpengine.server.health import HealthServicer
from tpengine.server.metrics_port import MetricsPort
from tpengine.server.server_args import ServerArgs, join_address
from tpengine.server.servicer import GenerationServicer
from tpengine.server.state import ServerState, State

logger = init_logger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
_LOOK_S = 0.2
"""How often the engine is asked how it is."""
_WRITE_S = 2.0
"""What a finished request's last words get to leave the server, at least."""
_ENGINE_END_S = 40.0
_EXIT_S = 10.0

T = TypeVar("T")


def run_server(
    args: ServerArgs,
    authenticator: Authenticator,
    engine_args: EngineArgs,
    phases: Mapping[str, float],
) -> int:
    """Serves until a signal, Drain or the engine's death; returns the exit code.

    Args:
        phases: what of the start is over already, in seconds.

    Raises:
        ConfigError: the port is taken, or the certificates cannot be used.
    """

    async def serve() -> int:  # grpc wants its loop from the beginning
        return await _Server(args, authenticator, engine_args, phases).run()

    code = asyncio.run(serve())
    _end_within(_EXIT_S, code)
    return code


class _Server:
    """One run of the server."""

    def __init__(
        self,
        args: ServerArgs,
        authenticator: Authenticator,
        engine_args: EngineArgs,
        phases: Mapping[str, float],
    ) -> None:
        self._args = args
        self._engine_args = engine_args
        self._limits = args.limits()
        self._state = ServerState(args.model_name(engine_args.model), args.drain_timeout)
        self._health = HealthServicer()
        self._phases = dict(phases)
        self._phase = ""
        servicer = GenerationServicer(self._state, self._limits)
        self._authenticator = authenticator
        self._grpc = make_server(servicer, self._health, authenticator, self._limits)

    async def run(self) -> int:
        """The whole life."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        with contextlib.ExitStack() as closing:
            metrics = ""
            with self._timed("listen"):
                port = listen(self._grpc, self._args.address(), self._args.tls_files())
                if self._args.metrics_port is not None:
                    metrics_port = MetricsPort(self._args.metrics_port, self._metrics_text)
                    closing.callback(metrics_port.close)
                    metrics = f"; metrics on http://127.0.0.1:{metrics_port.port}/metrics"
                await self._grpc.start()
            return await self._serve(port, metrics)

    def _metrics_text(self) -> bytes:
        engine = self._state.engine
        return b"" if engine is None else engine.metrics_text(self._state.model)

    async def _serve(self, port: int, metrics: str) -> int:
        # Health answers from here on: alive, and not ready.
        try:
            engine = await asyncio.wait_for(self._start_engine(), self._args.startup_timeout)
        except asyncio.TimeoutError:
            self._leave(
                EXIT_FAILED,
                f"not ready within startup_timeout = {self._args.startup_timeout:g} s: still in "
                f"phase {self._phase!r}; raise it, or see above for what takes so long",
            )
        except TPEngineError as error:
            await self._grpc.stop(0)
            logger.error("the server cannot start: %s: %s", type(error).__name__, error)
            return EXIT_FAILED
        self._announce(port, metrics)
        code = await self._watch(engine)
        return await self._end(engine, code)

    async def _start_engine(self) -> AsyncLLMEngine:
        """Loads the model and proves with one token that the engine gets on.

        Raises:
            EngineError: it cannot be built, or that token does not come.
        """
        build = partial(LLMEngine.from_engine_args, self._engine_args)
        with self._timed("engine"):
            engine = await _in_thread(
                partial(
                    AsyncLLMEngine,
                    build,
                    self._limits.queue,
                    start_timeout_s=self._args.startup_timeout,
                )
            )
        with self._timed("first token"):
            params = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            request = GenerateRequest(prompt_token_ids=[0], params=params, request_id="start-up")
            async for _ in engine.serve(request):
                pass
        self._state.serve(engine)
        return engine

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._phase = phase
        start = time.monotonic()
        yield
        self._phases[phase] = time.monotonic() - start
        logger.info("start-up: %s took %.2f s", phase, self._phases[phase])

    def _announce(self, port: int, metrics: str) -> None:
        args = self._args
        guards = []
        if args.tls_cert is not None:
            guards.append("mutual TLS" if args.tls_client_ca is not None else "TLS")
        if self._authenticator.wants_token:
            guards.append("tokens")
            if args.tls_cert is None:
                logger.warning("tokens travel unencrypted; give --tls-cert and --tls-key")
        phases = ", ".join(f"{name} {took:.2f} s" for name, took in self._phases.items())
        print(
            f"tpengine is ready on {join_address(args.host, port)}: model {self._state.model!r}, "
            f"{' and '.join(guards) or 'no TLS, no tokens'}{metrics}; started in "
            f"{sum(self._phases.values()):.2f} s ({phases})",
            flush=True,
        )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._state.state is State.LOADING:
            self._leave(EXIT_OK, f"{name} during start-up: nothing runs yet")
        if self._state.state is State.DRAINING:
            self._leave(128 + number, f"{name} while draining: ending at once")
        self._state.ask_to_end(name)

    async def _watch(self, engine: AsyncLLMEngine) -> int:
        """Follows the engine's health until the server is to end; returns the exit code so far."""
        while True:
            health = engine.health()
            is_running = self._state.state is State.RUNNING
            self._health.set(alive=health.alive, ready=health.ready and is_running)
            if not health.alive:
                logger.error("the engine is dead: %s; the server ends", health.reason)
                return EXIT_FAILED
            if not is_running:
                return EXIT_OK
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state.ending.wait(), _LOOK_S)

    async def _end(self, engine: AsyncLLMEngine, code: int) -> int:
        """Lets requests finish, as long as there is an engine, and closes everything."""
        state = self._state
        end = time.monotonic()
        if code == EXIT_OK:
            end += state.drain_timeout_s
            logger.info(
                "%s: no new requests; %d calls have %.1f s to finish",
                state.why,
                state.num_open_calls,
                state.drain_timeout_s,
            )
            num_cut = await engine.drain(state.drain_timeout_s)
            if num_cut:
                logger.warning("%d requests had not finished and were aborted", num_cut)
            if not engine.health().alive:
                code = EXIT_FAILED
        # What is generated has still to be read; a reader that is slow has the rest of the time.
        end = max(end, time.monotonic() + _WRITE_S)
        while state.num_open_calls and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._health.close()
        await self._grpc.stop(0.5)
        try:
            await asyncio.wait_for(engine.shutdown(), _ENGINE_END_S)
        except (EngineError, asyncio.TimeoutError) as error:
            self._leave(code or EXIT_FAILED, f"the engine does not end ({error}); leaving it")
        logger.info("the server has ended, exit code %d", code)
        return code

    def _leave(self, code: int, why: str) -> NoReturn:
        """Ends the process at once: a thread that hangs in native code cannot be ended."""
        logger.warning("%s", why)
        _exit_now(code)


def _exit_now(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _end_within(seconds: float, code: int) -> None:
    """The interpreter joins threads when it ends; one that hangs must not keep the process."""
    timer = threading.Timer(seconds, _exit_now, (code,))
    timer.daemon = True
    timer.start()


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs something slow beside the loop; unlike asyncio's own threads, none is waited for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(finish, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(finish, done.set_result, result)

    threading.Thread(target=run, name="tpengine-load", daemon=True).start()
    return await done
