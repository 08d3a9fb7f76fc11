"""A step without a model: from the driver to Ray actors and back, with encoding and decoding.

Beside the engine's own channel, in the same run: `ray.get` of actor calls, and Ray's compiled
graph, both with the same bytes. Scheduling is not included.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import select
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from tpengine.bench.machine import describe_commit
from tpengine.executor.channel import FrameKind, Listener, connect
from tpengine.executor.codec import decode_output, decode_step, encode
from tpengine.executor.watch import StepExchange
from tpengine.messages import NewSequence, StepInput, StepOutput
from tpengine.sampling_params import SamplingParams

TIMEOUT_S = 30.0
BLOCK_SIZE = 16
PROMPT_TOKENS = 200
WINDOW = 200
"""Calls; on a machine that others use, the quietest of them say what the code itself takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    parser.add_argument("--ranks", type=int, default=2, help="Ray actors (default: 2)")
    parser.add_argument(
        "--running", type=int, default=256, help="sequences that run (default: 256)"
    )
    parser.add_argument(
        "--steps", type=int, default=3000, help="decode steps to measure (default: 3000)"
    )
    parser.add_argument(
        "--no-compiled-graph",
        action="store_true",
        help="leave out Ray's compiled graph, which keeps a core busy for each actor",
    )


class EchoRank:
    """Answers steps as rank 0 would, without a model."""

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
        """Decodes a step and encodes an answer to it: the samples at rank 0, elsewhere a sign."""
        step = decode_step(payload)
        sampled = [31_337] * len(step.sample_slots) if rank == 0 else []
        return encode(StepOutput(step.step, sampled))


def decode_step_input(step: int, num_running: int) -> StepInput:
    """A step of decodes: every sequence one token, every 16th a new block."""
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
    import ray

    ray.init(address="local", num_cpus=args.ranks, include_dashboard=False, log_to_driver=False)
    try:
        print(
            f"transport: {args.ranks} ranks, {args.running} running sequences, {args.steps} steps; "
            f"{platform.machine()}, {os.cpu_count()} cores, Ray {ray.__version__}, "
            f"{describe_commit()}"
        )
        step = decode_step_input(1, args.running)
        sizes = len(encode(step)), len(encode(StepOutput(1, [31_337] * args.running)))
        print(f"step {sizes[0]} bytes, answer {sizes[1]} bytes")
        _report_codec(args)
        actor_class = ray.remote(num_cpus=0)(EchoRank)
        actors = [actor_class.remote() for _ in range(args.ranks)]
        _measure_channels(args, actors)
        _measure_calls(args, actors)
        if not args.no_compiled_graph:
            _measure_graph(args, actors)
    finally:
        ray.shutdown()
    return 0


def _report_codec(args: argparse.Namespace) -> None:
    step, output = decode_step_input(1, args.running), StepOutput(1, [31_337] * args.running)
    new = NewSequence(
        0, list(range(PROMPT_TOKENS)), PROMPT_TOKENS, 0, [1] * 13, SamplingParams(), 1, 0, [2]
    )
    entering = StepInput(1, [0] * 64, [8] * 64, new_sequences=[new] * 64)
    for name, work in (
        ("encode + decode of a step of decodes", lambda: decode_step(encode(step))),
        ("encode + decode of its answer", lambda: decode_output(encode(output))),
        ("encode + decode of 64 new sequences", lambda: decode_step(encode(entering))),
    ):
        _report(name, _times(lambda _, work=work: work(), min(args.steps, 1000)))


def _measure_channels(args: argparse.Namespace, actors: list[Any]) -> None:
    import ray

    secret = secrets.token_bytes(32)
    listener = Listener(ray.util.get_node_ip_address(), secret, 1)
    refs = [actor.join.remote(rank, listener.address, secret) for rank, actor in enumerate(actors)]
    exchange = StepExchange(listener.accept(args.ranks, TIMEOUT_S), 1)
    listener.close()
    pids = ray.get(refs, timeout=TIMEOUT_S)

    message = decode_step_input(1, args.running)

    def step(number: int) -> None:
        message.step = number
        answers = exchange.run(number, encode(message), TIMEOUT_S)
        decode_output(answers[0])

    _report("own channel", _times(step, args.steps))
    before = [cpu_s(pid) for pid in pids]
    time.sleep(2.0)
    idle = sum(cpu_s(pid) for pid in pids) - sum(before)
    print(f"  idle: {idle / 2.0 * 100:.2f} % of a core in {len(pids)} actors over 2 s")


def _measure_calls(args: argparse.Namespace, actors: list[Any]) -> None:
    import ray

    message = decode_step_input(1, args.running)

    def step(_: int) -> None:
        payload = encode(message)
        refs = [actor.step.remote(payload, rank) for rank, actor in enumerate(actors)]
        decode_output(ray.get(refs, timeout=TIMEOUT_S)[0])

    _report("ray.get of actor calls", _times(step, min(args.steps, 1000)))


def _measure_graph(args: argparse.Namespace, actors: list[Any]) -> None:
    import ray
    from ray.dag import InputNode, MultiOutputNode

    with InputNode() as payload:
        graph = MultiOutputNode(
            [actor.step.bind(payload, rank) for rank, actor in enumerate(actors)]
        )
    compiled = graph.experimental_compile()
    message = decode_step_input(1, args.running)

    def step(_: int) -> None:
        answers = ray.get(compiled.execute(encode(message)), timeout=TIMEOUT_S)
        decode_output(answers[0])

    _report("compiled graph", _times(step, args.steps))


def _times(work: Callable[[int], None], count: int) -> list[float]:
    """Microseconds of each call, in order; the first tenth warms up."""
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
