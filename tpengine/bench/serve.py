"""Latency against load, over gRPC: requests arrive at random (Poisson), at several rates.

Prompt and output lengths are mixed and seeded as in `bench throughput`; token ids differ from rate
to rate. Each rate runs until its last request ends. The time to the first token begins when the
request is due, so that it includes waiting. The inter-token time is the time between two messages
over the number of tokens in the second. Goodput counts the requests per second that met both
objectives. Without --target the benchmark starts a server with the engine's arguments in a process
of its own, and ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from tpengine.bench import harness
from tpengine.cli import serve
from tpengine.cli.client import ConnectionOptions, open_client
from tpengine.client import load
from tpengine.client.generation_client import GenerationClient
from tpengine.engine_args import AsyncEngineArgs, EngineArgs
from tpengine.errors import ConfigError, ServerError
from tpengine.options import adder, option
from tpengine.proto import READINESS
from tpengine.sampling_params import SamplingParams
from tpengine.server.server_args import ServerArgs

_WARM_UP_REQUESTS = 4
_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 30.0
_POLL_S = 0.1


@dataclass
class LoadOptions(harness.ModelOptions):
    """The load, and the objectives of a request."""

    rates: str = option("1,2,4,8,inf")
    """Requests/s: one or more numbers with commas between them; inf sends all requests at once."""
    num_requests: int = option(64, at_least=1)
    """Requests at each rate."""
    objective_first_token_ms: float = option(1000.0)
    """Objective of goodput: most milliseconds to the first token."""
    objective_inter_token_ms: float = option(100.0)
    """Objective of goodput: most milliseconds between tokens, on average over a request."""
    workload_seed: int = option(0)
    """Seed of the lengths, token ids and arrivals."""
    plot: str | None = option(None, metavar="FILE")
    """Write a PNG of latency over throughput."""
    target: str | None = option(None, metavar="HOST:PORT")
    """Address of the server; default: the benchmark starts a server, and ends it."""


add_arguments = adder(LoadOptions, ConnectionOptions, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the statistics of each rate."""
    options = LoadOptions.parse(args)
    wanted = "numbers above 0, or inf"
    rates = harness.numbers("--rates", options.rates, lambda rate: rate > 0, wanted)
    if args.shape and options.target:
        raise ConfigError("--shape is for a server that is started here; leave out --target")
    with contextlib.ExitStack() as stack:
        if options.target is None:
            args.target = stack.enter_context(_own_server(args))
        model, summaries = asyncio.run(_measure(args, options, rates))
    lines = {"model": args.shape or model, "requests": f"{options.num_requests} at each rate"}
    if options.target is None:
        print(harness.report_head(EngineArgs.from_cli_args(args), lines))
    else:  # another server: this machine and the engine's options do not describe it
        lines = {"server": options.target, **lines}
        print("\n".join(f"{name:<20s}{text}" for name, text in lines.items()))
    for rate, summary in zip(rates, summaries, strict=True):
        print(f"\n{rate:g} requests/s\n{load.describe_load(summary)}")
    if options.plot:
        _plot(options.plot, lines["model"], rates, summaries)
    return 0


@contextlib.contextmanager
def _own_server(args: argparse.Namespace) -> Iterator[str]:
    """Runs a server with the engine's arguments; yields its HOST:PORT."""
    with harness.model_args(args) as engine_args:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server_args = ServerArgs(port=port, max_queued_requests=2 * args.num_requests)
        settings = vars(server_args) | vars(AsyncEngineArgs(**vars(engine_args)))
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(settings,))
        process.start()
        assert process.pid is not None
        try:
            asyncio.run(_wait_until_ready(f"127.0.0.1:{port}", process))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.join(_END_TIMEOUT_S)
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join(_END_TIMEOUT_S)


def _serve(settings: Mapping[str, Any]) -> NoReturn:
    """In the server's process: `tpengine serve` with these options."""
    os.setsid()  # Ctrl-C reaches the benchmark only, which then ends the server
    sys.exit(serve.run(argparse.Namespace(**settings)))


async def _wait_until_ready(target: str, process: BaseProcess) -> None:
    """Waits until the server is ready.

    Raises:
        ConfigError: the server ended, or was not ready in time; it has printed the reason.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    async with GenerationClient(target) as client:
        while process.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                if await client.health(READINESS) == "SERVING":
                    return
            await asyncio.sleep(_POLL_S)
    if not process.is_alive():
        code = process.exitcode
        raise ConfigError(f"the server ended with exit code {code} before it was ready; see above")
    raise ConfigError(f"the server at {target} was not ready within {_START_TIMEOUT_S:g} s")


async def _measure(
    args: argparse.Namespace, options: LoadOptions, rates: Sequence[float]
) -> tuple[str, list[load.LoadSummary]]:
    """Returns the model, and for each rate the summary."""
    first_s = options.objective_first_token_ms / 1000
    objective = load.Objective(first_s, options.objective_inter_token_ms / 1000)
    seed = options.workload_seed
    summaries = []
    async with await open_client(args) as client:
        info = await client.model_info()
        size = info.vocab_size, seed, info.max_model_len
        for run_number, rate in enumerate([math.inf, *rates]):  # the first one only warms up
            count = options.num_requests if run_number else _WARM_UP_REQUESTS
            prompts = [
                (ids, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output))
                for ids, num_output in harness.mixed_requests(count, *size, run_number)
            ]
            plan = load.poisson_plan(rate, prompts, seed)
            with tqdm(total=count, desc=f"{rate:g} requests/s", unit="request") as bar:
                outcomes = await load.run_load(client, plan, args.timeout, lambda _: bar.update())
            if run_number:
                summaries.append(load.summarise(*outcomes, objective))
    return info.model, summaries


def _plot(
    path: str, model: str, rates: Sequence[float], summaries: Sequence[load.LoadSummary]
) -> None:
    """Median and 99th percentile of both latencies over the output rate that was reached."""
    with harness.plot(path, Path(model).name, (10, 4), num_panels=2) as panels:
        for panel, title, field in (
            (panels[0], "first token", "first_token_s"),
            (panels[1], "inter-token", "token_gap_s"),
        ):
            points = [
                (rate, summary.output_rate, latency)
                for rate, summary in zip(rates, summaries, strict=True)
                if (latency := getattr(summary, field))
            ]
            xs = [output_rate for _, output_rate, _ in points]
            for percent, style in ((50, "o-"), (99, "s--")):
                ys = [1000 * latency[percent] for _, _, latency in points]
                panel.plot(xs, ys, style, label=f"p{percent}")
            for rate, x, latency in points:
                panel.annotate(f"{rate:g}/s", (x, 1000 * latency[50]), fontsize=7)
            panel.set_yscale("log")
            panel.set_xlabel("output tokens/s")
            panel.set_ylabel(f"{title}, ms")
            panel.legend()
