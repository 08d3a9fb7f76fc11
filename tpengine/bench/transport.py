"""A step without a model: from the driver to Ray actors and back, with encoding and decoding.

In the same run and with the same bytes: the engine's own channel, `ray.get` of actor calls, and
Ray's compiled graph. Scheduling is not included.
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tpengine.bench.harness import BenchOptions, local_ray, report_head
from tpengine.executor.channel import FrameKind, Listener, connect
from tpengine.executor.codec import decode_output, decode_step, encode
from tpengine.executor.watch import StepExchange
from tpengine.messages import NewSequence, StepInput, StepOutput
from tpengine.options import option
from tpengine.sampling_params import SamplingParams

TIMEOUT_S = 30.0
BLOCK_SIZE = 16
PROMPT_TOKENS = 200
WINDOW = 200
"""Calls in a row; on a shared machine the fastest of these windows shows the time of the code."""


@dataclass
class TransportOptions(BenchOptions):
    """The size of the measurement."""

    ranks: int = option(2, at_least=1)
    """Ray actors."""
    running: int = option(256, at_least=1)
    """Running sequences."""
    steps: int = option(3000, at_least=1)
    """Decode steps to measure."""
    compiled_graph: bool = option(True)
    """Measure Ray's compiled graph, which keeps a core busy for each actor."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    TransportOptions.add_cli_args(parser)


Exchange = Callable[[int, bytes], bytes]
"""Sends a step's bytes to every actor; takes its number too, and returns the answer of rank 0."""


class EchoRank:
    """Answers steps like a rank, without a model."""

    def join(self, rank: int, address: tuple[str, int], secret: bytes) -> int:
        """Serves steps from the channel in a thread until it closes; returns the process id."""
        channel = connect(address, secret, rank, 1, TIMEOUT_S)

        def serve() -> None:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            while True:
                poll.poll(TIMEOUT_S * 1e3)
                while (frame := channel.take()) is not None:
                    answer = self.step(frame.payload, rank)
                    channel.send(FrameKind.OUTPUT, frame.step, answer, TIMEOUT_S)

        threading.Thread(target=serve, daemon=True).start()
        return os.getpid()

    def step(self, payload: bytes, rank: int = 0) -> bytes:
        """Decodes a step and encodes its answer: samples at rank 0, none at other ranks."""
        step = decode_step(payload)
        return encode(decode_step_output(step.step, len(step.sample_slots) if rank == 0 else 0))


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


def decode_step_output(step: int, count: int) -> StepOutput:
    """Its answer: an id and its log probability for each of `count` sequences."""
    return StepOutput(step, [31_337] * count, chosen_logprobs=array("f", bytes(4 * count)))


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints medians and 99th percentiles in microseconds."""
    import ray

    options = TransportOptions.parse(args)
    with local_ray(options.ranks):
        work = f"{options.ranks} ranks, {options.running} running sequences, {options.steps} steps"
        print(report_head(None, {"work": work, "ray": ray.__version__}))
        step = decode_step_input(1, options.running)
        answer = decode_step_output(1, options.running)
        print(f"step {len(encode(step))} bytes, answer {len(encode(answer))} bytes")
        _report_codec(options)
        actors = [ray.remote(num_cpus=0)(EchoRank).remote() for _ in range(options.ranks)]
        for name, exchange in _exchanges(options, actors):

            def call(number: int, exchange: Exchange = exchange) -> None:
                step.step = number
                decode_output(exchange(number, encode(step)))

            _report(name, _times(call, options.steps))
    return 0


def _report_codec(options: TransportOptions) -> None:
    step, output = decode_step_input(1, options.running), decode_step_output(1, options.running)
    new = NewSequence(
        0, list(range(PROMPT_TOKENS)), PROMPT_TOKENS, 0, [1] * 13, SamplingParams(), 1, 0, [2]
    )
    entering = StepInput(1, [0] * 64, [8] * 64, new_sequences=[new] * 64)
    for name, work in {
        "encode + decode of a step of decodes": lambda _: decode_step(encode(step)),
        "encode + decode of its answer": lambda _: decode_output(encode(output)),
        "encode + decode of 64 new sequences": lambda _: decode_step(encode(entering)),
    }.items():
        _report(name, _times(work, min(options.steps, 1000)))


def _exchanges(options: TransportOptions, actors: list[Any]) -> Iterator[tuple[str, Exchange]]:
    """The ways to send a step, by name. Prints the idle time of the first after its measurement."""
    import ray
    from ray.dag import InputNode, MultiOutputNode

    secret = secrets.token_bytes(32)
    listener = Listener(ray.util.get_node_ip_address(), secret, 1)
    refs = [actor.join.remote(rank, listener.address, secret) for rank, actor in enumerate(actors)]
    channels = StepExchange(listener.accept(options.ranks, TIMEOUT_S), 1)
    listener.close()
    pids = ray.get(refs, timeout=TIMEOUT_S)
    yield "own channel", lambda number, payload: channels.run(number, payload, TIMEOUT_S)[0]
    before = [cpu_s(pid) for pid in pids]
    time.sleep(2.0)
    idle = sum(cpu_s(pid) for pid in pids) - sum(before)
    print(f"  idle: {idle / 2.0 * 100:.2f} % of a core in {len(pids)} actors over 2 s")

    def call(_: int, payload: bytes) -> Any:
        refs = [actor.step.remote(payload, rank) for rank, actor in enumerate(actors)]
        return ray.get(refs, timeout=TIMEOUT_S)[0]

    yield "ray.get of actor calls", call
    if options.compiled_graph:
        with InputNode() as node:
            steps = [actor.step.bind(node, rank) for rank, actor in enumerate(actors)]
        graph = MultiOutputNode(steps).experimental_compile()
        yield "compiled graph", lambda _, data: ray.get(graph.execute(data), timeout=TIMEOUT_S)[0]


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


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
