"""Two pipeline stages beside two ranks that share each layer, over a slow wire, a fast one and
shared memory; needs root and Ray.

Two "machines" are made of namespaces of this one (`support/machines.py`), with a rank in each; the
driver is in the first. The fast wire is a bridge. On the slow one the interface of each machine has
`tc qdisc` tbf, and a relay holds each Ethernet frame for the delay, one way
(`delaying_relay.py`). Both carry frames of 9,000 bytes. With memory both ranks are children of the
driver. Rounds alternate all of these. Decodes are counted from the moment when all streams have
their first token; a round trip is that of a TCP handshake, before each measurement.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from executor.driver_process import DriverProcess
from support.machines import Machines

from benchmarks.common import add_numbers, add_shape_argument, alternate
from tpengine.bench.harness import Workload, report_head, shape_folder
from tpengine.errors import EngineError

_HERE = Path(__file__).parent
_RAY = "ray start {} --num-cpus=2 --object-store-memory=80000000 --disable-usage-stats 2>&1"
_SHELL = {"TPENGINE_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
_LIMIT_S, _LINE_S = 3600.0, 300.0
_PROMPT_LEN, _CACHE_GIB = 32, 0.25
_TAPS = ("wire0", "wire1")
# The second machine hangs on a bridge of its own while the wire is slow.
_SET_UP = """
ip link add far type bridge && ip link set far up &&
for tap in {taps}; do ip tuntap add $tap mode tap; done &&
ip link set {taps[0]} master switch && ip link set {taps[1]} master far &&
for port in machine0 machine1 {taps}; do ip link set $port mtu 9000 up; done
"""
_BRIDGES = {"slow": "far", "fast": "switch"}
_RATES = {
    "slow": "tc qdisc replace dev eth0 root tbf rate 1gbit burst 10kb latency 50ms",
    "fast": "tc qdisc del dev eth0 root",
}
_ROUND_TRIP = """
import socket, statistics, time
times = []
for _ in range(20):
    start = time.perf_counter()
    socket.create_connection(("{address}", 22)).close()
    times.append(time.perf_counter() - start)
print(statistics.median(times) * 1e3)
"""
_WAYS = {"PP 2": "pipeline_parallel_size", "TP 2": "tensor_parallel_size"}
_PLACES = {"slow": "ray", "fast": "ray", "memory": "processes"}
Kind = tuple[str, str, str]
"""Where, how, and of what: a key of `_PLACES`, of `_WAYS`, of `workloads`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_shape_argument(parser)
    add_numbers(
        parser,
        delay_ms=(0.5, "of the slow wire, one way"),
        streams=(32, "requests at once; a case of one request is measured, too"),
        tokens=(32, "output tokens of each"),
        prompt_len=(1000, "tokens of the prompt whose first token is waited for"),
        rounds=(5, "rounds"),
    )
    parser.add_argument("--dtype", default="auto")


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    with ExitStack() as stack:
        folder = stack.enter_context(shape_folder(args.shape, 2 * args.prompt_len))
        machines = stack.enter_context(Machines(2, _SHELL, [Path(folder)]))
        stack.enter_context(_wires(machines, args.delay_ms / 1e3))
        _start_ray(machines)
        drivers = {
            (executor, way): stack.enter_context(_driver(machines, folder, executor, way, args))
            for executor in sorted(set(_PLACES.values()))
            for way in _WAYS
        }
        cases = ["1 stream", f"{args.streams} streams", "prompt"]
        kinds = [(place, way, case) for place in _PLACES for case in cases for way in _WAYS]
        trips: dict[str, list[float]] = {place: [] for place in _BRIDGES}

        def measure(kind: Kind, number: int) -> float:
            place, way, case = kind
            if place in _BRIDGES:
                trips[place].append(_choose(machines, place))
            driver = drivers[_PLACES[place], way]
            driver.say(*_workload(case, args, number))
            return _speed(driver.hear(_LINE_S), case, args)

        measured = alternate(kinds, args.rounds, measure, warm_ups=1)
    _report(measured, trips)
    return 0


def _report(measured: dict[Kind, list[float]], trips: dict[str, list[float]]) -> None:
    results = {}
    for place, times in trips.items():
        spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        results[f"round trip, {place}"] = f"{spread} ms"
    for place, way, case in measured:
        if way == "PP 2":
            sides = measured[place, way, case], measured[place, "TP 2", case]
            ratios = [stages / ranks for stages, ranks in zip(*sides, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            medians = "PP 2 {:.1f}, TP 2 {:.1f}".format(*map(statistics.median, sides))
            results[f"{place}, {case}"] = f"{medians} tokens/s, PP / TP {spread}"
    print(report_head(None, results, 24))


def _workload(case: str, args: argparse.Namespace, number: int) -> Workload:
    count, length, num_output = 1, args.prompt_len, 1
    if case != "prompt":
        count, length, num_output = int(case.split()[0]), _PROMPT_LEN, args.tokens
    return [
        ([3 + (7 * stream + 5 * place + 11 * number) % 1000 for place in range(length)], num_output)
        for stream in range(count)
    ]


def _speed(times: dict[str, Any], case: str, args: argparse.Namespace) -> float:
    """Output tokens/s after the first ones; of a prompt its own tokens/s."""
    if case == "prompt":
        return float(args.prompt_len / times["first_s"])
    return float((times["tokens"] - times["first_tokens"]) / (times["total_s"] - times["first_s"]))


@contextmanager
def _wires(machines: Machines, delay_s: float) -> Iterator[None]:
    """Both wires; the fast one is in use."""
    taps = " ".join(_TAPS)
    _do(machines, None, _SET_UP.replace("{taps}", taps).format(taps=_TAPS))
    for machine in range(2):
        _do(machines, machine, "ip link set eth0 mtu 9000")
    relay = f"exec python {_HERE / 'delaying_relay.py'} {delay_s} {taps}"
    process = DriverProcess(machines.command(None, relay, _LIMIT_S))
    try:
        yield
    finally:
        process.end()


def _choose(machines: Machines, wire: str) -> float:
    """Takes a wire into use; returns the milliseconds of a round trip on it."""
    _do(machines, None, f"ip link set machine1 master {_BRIDGES[wire]}")
    for machine in range(2):
        machines.run(machine, _RATES[wire])  # there may be none to remove
    command = _ROUND_TRIP.format(address=machines.addresses[1])
    return float(_do(machines, 0, f"python -c {shlex.quote(command)}"))


def _start_ray(machines: Machines) -> None:
    head, other = machines.addresses
    address = f"--node-ip-address={head} --port=6379 --include-dashboard=false"
    _do(machines, 0, _RAY.format(f"--head {address}"))
    _do(machines, 1, _RAY.format(f"--address={head}:6379 --node-ip-address={other}"))


@contextmanager
def _driver(
    machines: Machines, folder: str, executor: str, way: str, args: argparse.Namespace
) -> Iterator[DriverProcess]:
    """A process on the first machine that has an engine; see `engine_process.py`."""
    ray = {"ray_address": "auto", "ray_placement_strategy": "STRICT_SPREAD"}
    options = {
        _WAYS[way]: 2,
        "executor": executor,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": args.dtype,
        "cpu_kv_cache_space": _CACHE_GIB,
        "enable_prefix_caching": False,
        **(ray if executor == "ray" else {}),
    }
    settings = json.dumps({"engine": "tpengine", "model": folder, "options": options})
    command = f"exec python {_HERE / 'engine_process.py'} {shlex.quote(settings)}"
    process = DriverProcess(machines.command(0, command, _LIMIT_S), stdin=subprocess.PIPE)
    try:
        process.hear(_LINE_S)
        yield process
    finally:
        process.end()


def _do(machines: Machines, machine: int | None, command: str) -> str:
    done = machines.run(machine, command, _LINE_S)
    if done.returncode != 0:
        raise EngineError(f"{command.strip()} failed: {done.stdout}")
    return done.stdout
