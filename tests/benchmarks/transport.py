"""A step without a model: from the driver to ranks and back, with encoding and decoding.

In the same run and with the same bytes: the engine's own channel to child processes and to Ray's
actors, `ray.get` of actor calls, and Ray's compiled graph. Scheduling is not included.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from benchmarks.common import local_ray
from benchmarks.echo_rank import TIMEOUT_S, EchoRank, echo
from tpengine.bench.harness import BenchOptions, report_head
from tpengine.executor.channel import Listener
from tpengine.executor.codec import decode_output, decode_step, encode
from tpengine.executor.launch.children import Starter
from tpengine.executor.launch.processes import RankProcess
from tpengine.executor.watch import Exchange
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.options import option

_IDLE_S = 2.0
BLOCK_SIZE = 16
PROMPT_TOKENS = 200
WINDOW = 200
"""Calls in a row; on a shared machine the fastest of these windows shows the time of the code."""


@dataclass
class TransportOptions(BenchOptions):
    """The size of the measurement."""

    ranks: int = option(2, at_least=1)
    """Ranks without a model."""
    running: int = option(256, at_least=1)
    """Running sequences."""
    steps: int = option(3000, at_least=1)
    """Decode steps to measure."""
    executor: str = option("both", ("both", "processes", "ray"))
    """Who starts the ranks."""
    compiled_graph: bool = option(True)
    """Measure Ray's compiled graph, which keeps a core busy for each actor."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    TransportOptions.add_cli_args(parser)


SendStep = Callable[[int, bytes], bytes]
"""Sends a step's bytes to every rank; takes its number too, and returns the answer of rank 0."""
Way = tuple[str, SendStep, list[int]]
"""A way to send a step: its name, what does it, and the ranks' processes."""


def decode_step_input(step: int, num_running: int) -> StepInput:
    """A step in which every sequence decodes one token, and every 16th gets a new block."""
    slots = list(range(num_running))
    return StepInput(
        step=step,
        slots=slots,
        num_scheduled_tokens=[1] * num_running,
        new_block_ids=[(slot, [1000 + slot]) for slot in slots if (slot + step) % BLOCK_SIZE == 0],
        sample_rows=slots.copy(),
        sample_slots=slots.copy(),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints medians and 99th percentiles in microseconds."""
    options = TransportOptions.parse(args)
    work = f"{options.ranks} ranks, {options.running} running sequences, {options.steps} steps"
    print(report_head(None, {"work": work}))
    step = decode_step_input(1, options.running)
    answer = echo(1, options.running)
    print(f"step {len(encode(step))} bytes, answer {len(encode(answer))} bytes")
    _report_codec(options)
    with contextlib.ExitStack() as stack:
        for name, exchange, pids in _ways(options, stack):

            def call(number: int, exchange: SendStep = exchange) -> None:
                step.step = number
                decode_output(exchange(number, encode(step)))

            _report(name, _times(call, options.steps))
            _report_idle(pids)
    return 0


def _report_codec(options: TransportOptions) -> None:
    step, output = decode_step_input(1, options.running), echo(1, options.running)
    new = NewSequence(
        0, list(range(PROMPT_TOKENS)), PROMPT_TOKENS, 0, [1] * 13, SamplingRules(), 1, 0, [2]
    )
    entering = StepInput(1, [0] * 64, [8] * 64, new_sequences=[new] * 64)
    for name, work in {
        "encode + decode of a step of decodes": lambda _: decode_step(encode(step)),
        "encode + decode of its answer": lambda _: decode_output(encode(output)),
        "encode + decode of 64 new sequences": lambda _: decode_step(encode(entering)),
    }.items():
        _report(name, _times(work, min(options.steps, 1000)))


def _ways(options: TransportOptions, stack: contextlib.ExitStack) -> Iterator[Way]:
    """Each begins only when the one before was measured: a compiled graph keeps cores busy."""
    if options.executor != "ray":
        yield from _processes(options, stack)
    if options.executor != "processes":
        stack.enter_context(local_ray(options.ranks))
        yield from _actors(options)


def _processes(options: TransportOptions, stack: contextlib.ExitStack) -> Iterator[Way]:
    """The engine's own channel to children of this process."""
    starter = Starter()
    stack.callback(starter.stop)
    start = partial(starter.start_process, "benchmarks.echo_rank")
    processes = [RankProcess(f"rank {rank}", start) for rank in range(options.ranks)]
    exchange = Exchange([process.channels[0] for process in processes])
    exchange.call({rank: bytes([rank]) for rank in range(options.ranks)}, TIMEOUT_S)
    pids = [process.pid for process in processes]
    yield "own channel, child processes", partial(_run_step, exchange), pids


def _run_step(exchange: Exchange, number: int, payload: bytes) -> bytes:
    exchange.send_step(number, [payload] * len(exchange._channels), TIMEOUT_S)
    return exchange.take_answers(number, TIMEOUT_S)[0]


def _actors(options: TransportOptions) -> Iterator[Way]:
    """The engine's own channel to Ray's actors, and Ray's own ways to them."""
    import ray
    from ray.dag import InputNode, MultiOutputNode

    actors = [ray.remote(num_cpus=0)(EchoRank).remote() for _ in range(options.ranks)]
    listener = Listener(ray.util.get_node_ip_address(), secrets.token_bytes(32), 1)
    refs = [actor.join.remote(rank, listener.invitation) for rank, actor in enumerate(actors)]
    exchange = Exchange(listener.accept(options.ranks, TIMEOUT_S))
    listener.close()
    pids = ray.get(refs, timeout=TIMEOUT_S)
    yield "own channel, Ray's actors", partial(_run_step, exchange), pids

    def call(_: int, payload: bytes) -> Any:
        refs = [actor.step.remote(payload, rank) for rank, actor in enumerate(actors)]
        return ray.get(refs, timeout=TIMEOUT_S)[0]

    yield "ray.get of actor calls", call, pids
    if options.compiled_graph:
        with InputNode() as node:
            steps = [actor.step.bind(node, rank) for rank, actor in enumerate(actors)]
        graph = MultiOutputNode(steps).experimental_compile()

        def execute(_: int, payload: bytes) -> Any:
            return ray.get(graph.execute(payload), timeout=TIMEOUT_S)[0]

        yield "compiled graph", execute, pids


def _report_idle(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(_IDLE_S)
    idle = sum(sum(process.cpu_times()[:2]) for process in processes) - before
    print(f"  idle: {idle / _IDLE_S * 100:.2f} % of a core in {len(pids)} ranks over {_IDLE_S:g} s")


def _times(work: Callable[[int], object], count: int) -> list[float]:
    """Microseconds of each call, in order, after a tenth as many calls that warm up."""
    times = []
    for number in range(1, count + count // 10 + 1):
        start = time.perf_counter()
        work(number)
        times.append(1e6 * (time.perf_counter() - start))
    return times[count // 10 :]


def _report(name: str, times_us: list[float]) -> None:
    ordered = sorted(times_us)
    median, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    windows = [times_us[at : at + WINDOW] for at in range(0, len(times_us) - WINDOW + 1, WINDOW)]
    best = min((statistics.median(window) for window in windows), default=median)
    print(
        f"{name}: median {median:.0f} us, p99 {p99:.0f} us, median of the quietest {WINDOW} in a "
        f"row {best:.0f} us",
        flush=True,
    )
