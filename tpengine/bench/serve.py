"""Latency against load, over gRPC: requests arrive at random (Poisson), at several rates.

Prompt and output lengths are mixed and seeded as in `bench throughput`; ids differ from rate to
rate. Each rate runs until its last request is done. First token: from when a request was due, so
that waiting counts. Inter-token: time between messages, divided by the tokens that the later one
brings. Goodput: requests per second that met both objectives. Without --target a server is started
with the engine's arguments in a process of its own, and ended; its CPU time by thread and output
token is told too, the engine's apart from that of all else: gRPC, conversion and delivery, and what
each request costs before its first token and after its last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from tpengine.bench.machine import describe_machine, import_pyplot, report_head
from tpengine.bench.workload import SHAPES, mixed_requests, shape_folder
from tpengine.cli.client import ConnectionOptions, open_client
from tpengine.client.generation_client import GenerationClient
from tpengine.client.load import LoadSummary, Objective, poisson_plan, run_load, summarise
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, ServerError
from tpengine.sampling_params import SamplingParams
from tpengine.server.grpc.proto import READINESS

EVENT_LOOP = "event loop"
ENGINE = "engine"
_ENGINE_THREADS = "tpengine-engine"
"""What the engine's thread calls itself; those that it starts for its kernels inherit the name."""

_WARM_UP_REQUESTS = 4
_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 30.0
_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options, the connection's and the engine's."""
    parser.add_argument(
        "--rates",
        default="1,2,4,8,inf",
        help="requests/s, comma-separated; inf: all at once (default: %(default)s)",
    )
    parser.add_argument(
        "--num-requests", type=int, default=64, help="at each rate (default: %(default)s)"
    )
    parser.add_argument(
        "--objective-first-token-ms",
        type=float,
        default=1000.0,
        help="of goodput: most milliseconds to the first token (default: %(default)s)",
    )
    parser.add_argument(
        "--objective-inter-token-ms",
        type=float,
        default=100.0,
        help="of goodput: most milliseconds between tokens, mean of a request "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--workload-seed", type=int, default=0, help="fixes lengths, ids, arrivals (default: 0)"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="dummy weights of this shape instead of a model"
    )
    parser.add_argument("--plot", metavar="FILE", help="PNG of latency over throughput")
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="the server; default: one that is started for this, and ended",
    )
    ConnectionOptions.add_cli_args(parser)
    parser.set_defaults(server_pid=None)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per rate."""
    rates = _check(args)
    with contextlib.ExitStack() as stack:
        own = args.target is None
        if own:
            args.target, args.server_pid = stack.enter_context(_own_server(args))
        model, summaries, costs = asyncio.run(_measure(args, rates))
    # Of another's server, this machine and the options given here say nothing.
    print(report_head(EngineArgs.from_cli_args(args)) if own else f"{'server':<20s}{args.target}")
    print(f"model               {args.shape or model}")
    print(f"requests            {args.num_requests} at each rate")
    for rate, summary, cost in zip(rates, summaries, costs, strict=True):
        print(_line(rate, summary))
        print(f"{'':>16s}  {summary.tokens_per_message:.2f} tokens a message{cost and '; '}{cost}")
    if args.plot:
        _plot(args.plot, args.shape or model, rates, summaries)
    return 0


def _check(args: argparse.Namespace) -> list[float]:
    """The rates.

    Raises:
        ConfigError: what is asked for cannot be measured, found out before anything is.
    """
    rates = []
    for word in args.rates.split(","):
        try:
            rates.append(float(word))
        except ValueError:
            rates.append(math.nan)
        if not rates[-1] > 0:
            raise ConfigError(f"--rates must be numbers above 0, or inf; got {word!r}")
    if args.num_requests < 1:
        raise ConfigError(f"--num-requests must be at least 1, got {args.num_requests}")
    if args.plot:
        import_pyplot()
    if args.shape and args.target:
        raise ConfigError("--shape is for a server that is started here; leave out --target")
    return rates


@contextlib.contextmanager
def _own_server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A server with the engine's arguments; yields its HOST:PORT and process id."""
    with contextlib.ExitStack() as stack:
        engine_args = EngineArgs.from_cli_args(args)
        if args.shape is not None:
            folder = stack.enter_context(shape_folder(args.shape))
            engine_args = dataclasses.replace(engine_args, model=folder, load_format="dummy")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tpengine.cli", "serve", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--max-queued-requests", str(2 * args.num_requests), *_words(engine_args)],
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        try:
            asyncio.run(_wait_until_ready(f"127.0.0.1:{port}", process))
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_TIMEOUT_S)


def _words(engine_args: EngineArgs) -> list[str]:
    """The options that make an engine of these arguments; defaults are left out."""
    words = []
    for spec in dataclasses.fields(engine_args):
        value = getattr(engine_args, spec.name)
        if value == spec.default:
            continue
        option = spec.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{option}", *map(str, values)]
    return words


async def _wait_until_ready(target: str, process: subprocess.Popen[bytes]) -> None:
    """Raises:
    ConfigError: the server ended, or took too long; it has said why.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    async with GenerationClient(target) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                if await client.health(READINESS) == "SERVING":
                    return
            await asyncio.sleep(_POLL_S)
    if process.poll() is not None:
        raise ConfigError(
            f"the server ended with exit code {process.returncode} before it was ready; see above"
        )
    raise ConfigError(f"the server at {target} was not ready within {_START_TIMEOUT_S:g} s")


async def _measure(
    args: argparse.Namespace, rates: Sequence[float]
) -> tuple[str, list[LoadSummary], list[str]]:
    """The model, and by rate what came of it and what it cost the server, if that is our own."""
    objective = Objective(
        args.objective_first_token_ms / 1000, args.objective_inter_token_ms / 1000
    )
    pid: int | None = args.server_pid
    summaries, costs = [], []
    async with open_client(args) as client:
        info = await client.model_info()
        for run_number, rate in enumerate([math.inf, *rates]):  # the first one only warms up
            count = args.num_requests if run_number else _WARM_UP_REQUESTS
            workload = mixed_requests(
                count, info.vocab_size, args.workload_seed, info.max_model_len, run_number
            )
            prompts = [
                (ids, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output))
                for ids, num_output in workload
            ]
            plan = poisson_plan(rate, prompts, args.workload_seed)
            with tqdm(total=count, desc=f"{rate:g} requests/s", unit="request") as bar:
                before = Counter() if pid is None else thread_times(pid)
                outcomes = await run_load(client, plan, args.timeout, lambda _: bar.update())
            if run_number:
                summaries.append(summarise(*outcomes, objective))
                num_tokens = sum(one.num_output_tokens for one in outcomes[0])
                cost = "" if pid is None else per_token(before, thread_times(pid), num_tokens)
                costs.append(cost)
    return info.model, summaries, costs


def _line(rate: float, summary: LoadSummary) -> str:
    firsts, gaps = summary.first_token_s, summary.token_gap_s
    ends = ", ".join(f"{count} {end}" for end, count in summary.ends.most_common())
    return (
        f"{rate:>6g} requests/s  {summary.output_rate:8.1f} tokens/s   first token, ms: "
        f"p50 {_ms(firsts, 50)} p99 {_ms(firsts, 99)}   inter-token, ms: p50 {_ms(gaps, 50)} "
        f"p99 {_ms(gaps, 99)}   goodput {summary.goodput:6.2f}/s   {ends}"
    )


def _ms(seconds: dict[int, float], percent: int) -> str:
    return f"{1000 * seconds[percent]:7.1f}" if seconds else "      -"


def _plot(path: str, model: str, rates: Sequence[float], summaries: Sequence[LoadSummary]) -> None:
    """Median and 99th percentile of both latencies over the output rate that was reached."""
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for panel, title, pick in (
        (panels[0], "first token", lambda summary: summary.first_token_s),
        (panels[1], "inter-token", lambda summary: summary.token_gap_s),
    ):
        points = [
            (summary.output_rate, pick(summary), rate)
            for rate, summary in zip(rates, summaries, strict=True)
            if pick(summary)
        ]
        for percent, style in ((50, "o-"), (99, "s--")):
            xs = [output_rate for output_rate, _, _ in points]
            ys = [1000 * latency[percent] for _, latency, _ in points]
            panel.plot(xs, ys, style, label=f"p{percent}")
        for output_rate, latency, rate in points:
            panel.annotate(f"{rate:g}/s", (output_rate, 1000 * latency[50]), fontsize=7)
        panel.set_yscale("log")
        panel.set_xlabel("output tokens/s")
        panel.set_ylabel(f"{title}, ms")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{Path(model).name}, {describe_machine()}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def thread_times(pid: int) -> Counter[str]:
    """CPU seconds since the start, by name of thread; those of one name are added up.

    The first thread of a Python process, where a server's event loop runs, is `EVENT_LOOP`; threads
    without a name of their own have the program's, as gRPC's poller has.
    """
    times: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            ran_ns = int((task / "schedstat").read_text().split()[0])
            name = (task / "comm").read_text().strip()
            if task.name == str(pid):
                name = EVENT_LOOP
            times[ENGINE if name == _ENGINE_THREADS else name] += ran_ns / 1e9
    return times


def per_token(before: Counter[str], after: Counter[str], num_tokens: int) -> str:
    """What each thread spent between two moments, in µs a token: the engine's, and all others
    together and, if they matter, apart."""
    spent = {name: 1e6 * (after[name] - before[name]) / max(num_tokens, 1) for name in after}
    engine = spent.pop(ENGINE, 0.0)
    parts = sorted(spent.items(), key=lambda item: (item[0] != EVENT_LOOP, -item[1]))
    told = [f"{name} {cost:.1f}" for name, cost in parts if name == EVENT_LOOP or cost >= 0.5]
    return (
        f"server's CPU, µs per output token: {sum(spent.values()):.1f} outside the engine "
        f"({', '.join(told)}), engine {engine:.1f}"
    )
