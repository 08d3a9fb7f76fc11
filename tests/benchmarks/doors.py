"""What a token costs at each door of one server: OpenAI's HTTP beside gRPC, in one run.

A process of cheap clients opens streams, all at once, that get a message for each token, and counts
the messages. Rounds alternate which door comes first. The CPU time of the server's process has the
model in it; without the engine's threads it is that of the doors, conversion and delivery.
`tpengine bench serve` measures times to the first token.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from support.server_process import ServerProcess
from support.tiny_llama import byte_level_tokenizer

from benchmarks.common import ENGINE, add_numbers, add_shape_argument, alternate, thread_times
from benchmarks.door_load import Load, LoadResult, run_load
from tpengine.bench.harness import SHAPES, report_head, shape_folder

DOORS = ("gRPC", "HTTP")
_START_S = 600.0
_WARM_UP_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_shape_argument(parser)
    parser.add_argument("--model", help="run this model instead of --shape")
    parser.add_argument(
        "--server", default="--dtype bfloat16", help="options of the server (default: %(default)s)"
    )
    add_numbers(
        parser,
        streams=(256, "streams at a time"),
        prompt_tokens=(32, "tokens of a prompt"),
        output_tokens=(64, "tokens of a stream"),
        rounds=(3, "median of these"),
    )


class Cost(NamedTuple):
    """A round at one door; CPU times in µs per token, `tokens_a_message` is 1 unless the clients
    are late."""

    rate: float
    cpu: float
    cpu_of_doors: float
    cpu_of_clients: float
    tokens_a_message: float


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    with (
        _model(args) as (folder, vocab_size, options),
        tempfile.TemporaryDirectory() as logs,
        multiprocessing.get_context("spawn").Pool(1) as clients,
        ServerProcess(
            *("--model", folder, "--http-port", "0", "--max-num-seqs", str(args.streams)),
            *("--disable-log-requests", *options, *shlex.split(args.server)),
            log=Path(logs) / "log",
            start_timeout_s=_START_S,
        ) as server,
    ):
        addresses = {"gRPC": server.target, "HTTP": server.http_address.removeprefix("http://")}
        sizes = (args.streams, args.prompt_tokens, args.output_tokens, vocab_size)
        loads = {door: Load(door, addresses[door], *sizes) for door in DOORS}
        for door in DOORS:  # touches all memory
            clients.apply(run_load, (replace(loads[door], num_output=_WARM_UP_TOKENS),))
        costs = alternate(
            DOORS,
            args.rounds,
            lambda door, i: _measure(server.pid, clients, replace(loads[door], seed=i + 1)),
        )
    work = f"{args.model or args.shape}, {args.streams} streams of {args.output_tokens} tokens"
    print(report_head(None, {"work": work, "server": args.server}))
    for door in DOORS:
        print(_line(door, costs[door]))
    for field in ("rate", "cpu", "cpu_of_doors"):
        pairs = zip(costs["HTTP"], costs["gRPC"], strict=True)
        ratios = [getattr(http, field) / getattr(grpc, field) for http, grpc in pairs]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"HTTP / gRPC, {field}: median {statistics.median(ratios):.2f} ({listed})")
    return 0


def _measure(pid: int, clients: Pool, load: Load) -> Cost:
    before = thread_times(pid)
    result: LoadResult = clients.apply(run_load, (load,))
    spent = {name: end - before.get(name, 0.0) for name, end in thread_times(pid).items()}
    num_tokens = load.num_streams * load.num_output
    cpu_s = sum(spent.values())
    times_s = (cpu_s, cpu_s - spent.get(ENGINE, 0.0), result.own_s)
    per_token = [1e6 * time_s / num_tokens for time_s in times_s]
    return Cost(num_tokens / result.elapsed_s, *per_token, num_tokens / result.num_messages)


def _line(door: str, costs: list[Cost]) -> str:
    rate, cpu, cpu_of_doors, clients_cpu, tokens = map(statistics.median, zip(*costs, strict=True))
    return (
        f"{door}: {rate:.1f} tokens/s; server's CPU, µs per token: {cpu:.1f}, without the engine "
        f"{cpu_of_doors:.1f}; clients {clients_cpu:.1f}; {tokens:.2f} tokens a message"
    )


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """Folder of the model, size of its vocabulary, and the server's options for it."""
    if args.model:
        yield args.model, _SMALL_VOCAB, []
        return
    with shape_folder(args.shape) as folder:
        vocab_size = SHAPES[args.shape]["vocab_size"]
        _write_tokenizer(folder, vocab_size)
        yield folder, vocab_size, ["--load-format", "dummy"]


_SMALL_VOCAB = 500
"""Ids that every model has."""
_NUM_OTHER_IDS = 259
"""Bytes and special tokens."""


def _write_tokenizer(folder: str, vocab_size: int) -> None:
    """A tokenizer with a word of five letters for each id, so that each message has a text."""
    letters = str.maketrans("0123456789", "abcdefghij")
    words = [f"{number:05d}".translate(letters) for number in range(vocab_size)]
    byte_level_tokenizer(words[_NUM_OTHER_IDS:]).save_pretrained(folder)
