"""What adapters cost an engine: the output rate beside that of the same requests without them.

First: streams that run side by side and share a few adapters, which are all in slots. Second
(`--in-host`): many adapters in host memory and few slots; requests choose theirs by Zipf's law, and
a client sends its next request when it has its answer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import (
    add_engine_arguments,
    add_numbers,
    alternate,
    dummy_model,
    print_rates,
)
from tpengine import LoRARequest
from tpengine.bench.harness import GREEDY, report_head
from tpengine.checkpoint.adapter_files import CONFIG_FILE, TENSOR_FILE
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.executor.local_executor import LocalExecutor
from tpengine.layers.adapter_parts import Targets

_NUM_FILES = 8
"""Files of tensors; more adapters than these differ in `lora_alpha` only."""
Choice = Callable[[random.Random], LoRARequest | None]
"""The adapter of a new request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        streams=(32, "requests at a time"),
        prompt_tokens=(32, "of a request"),
        output_tokens=(64, "of a request"),
        rank=(16, "of each adapter"),
        adapters=(8, "in slots"),
        rounds=(9, "of runs of each kind, in turn"),
        in_host=(256, "adapters in host memory; 0: skip this part"),
        zipf=(1.0, "exponent: adapter k has a share of 1 / k^exponent of the requests"),
        requests=(384, "of a run of the second part"),
    )
    help_text = "rates by the CPU time of one thread (OMP_NUM_THREADS=1), beside other work"
    parser.add_argument("--cpu-time", action="store_true", help=help_text)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    with dummy_model(args, enable_prefix_caching=False) as settings:
        print(report_head(settings, {"work": args.shape}))
        count = max(args.adapters, args.in_host)
        slots = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        with (
            open_engine(settings) as (without, _),
            open_engine(settings, **slots, max_cpu_loras=count) as (engine, targets),
            tempfile.TemporaryDirectory() as folder,
        ):
            requests = write_adapters(Path(folder), targets, count, args.rank)
            show_rates(args, without, engine, requests[: args.adapters])
            if args.in_host:
                show_many(args, without, engine, requests)
    return 0


@contextmanager
def open_engine(settings: EngineArgs, **changes: Any) -> Iterator[tuple[LLMEngine, Targets]]:
    """An engine, and the layers that can have adapters."""
    config = replace(settings, **changes).create_engine_config("cpu")
    executor = LocalExecutor(config)
    with LLMEngine(config, executor, log_stats=False) as engine:
        yield engine, executor._run_workers("adapter_targets")[0]


def write_adapters(root: Path, targets: Targets, count: int, rank: int) -> list[LoRARequest]:
    """Random adapters of all layers, in PEFT's form and in bfloat16."""
    requests = []
    names = [name.rsplit(".", 1)[1] for name in targets]
    config = {"peft_type": "LORA", "r": rank, "target_modules": sorted(set(names))}
    for number in range(count):
        folder = root / str(number)
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": 16 + number}))
        if number < _NUM_FILES:
            save_file(random_tensors(targets, rank), folder / TENSOR_FILE)
        else:
            (folder / TENSOR_FILE).symlink_to(root / str(number % _NUM_FILES) / TENSOR_FILE)
        requests.append(LoRARequest(str(number), number + 1, str(folder)))
    return requests


def random_tensors(targets: Targets, rank: int) -> dict[str, torch.Tensor]:
    """A and B of each layer."""
    tensors = {}
    for name, (outputs, inputs) in targets.items():
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensor = torch.randn(shape).mul_(0.01).bfloat16()
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = tensor
    return tensors


class Clients:
    """Requests of one length, of which `streams` run at a time."""

    def __init__(self, args: argparse.Namespace, seed: int, choose: Choice) -> None:
        self._args = args
        self._rng = random.Random(seed)
        self._choose = choose
        self._num_sent = 0
        self._first: dict[str, float] = {}

    def run(self, engine: LLMEngine, num_requests: int) -> tuple[float, list[float]]:
        """Serves this number of requests; returns output tokens/s, and the seconds of each to its
        first token."""
        clock = time.process_time if self._args.cpu_time else time.perf_counter
        start, running, first = clock(), 0, []
        while self._num_sent < num_requests or engine.has_unfinished_requests():
            while self._num_sent < num_requests and running < self._args.streams:
                self._send(engine)
                running += 1
            for output in engine.step():
                assert output.error is None, output.error
                if output.finished:
                    running -= 1
                    assert output.metrics is not None
                    assert output.metrics.first_token_time is not None
                    first.append(output.metrics.first_token_time - output.metrics.arrival_time)
        elapsed = clock() - start
        return num_requests * self._args.output_tokens / elapsed, first

    def _send(self, engine: LLMEngine) -> None:
        vocab_size, rng = engine.get_model_config().vocab_size, self._rng
        prompt = [rng.randrange(5, vocab_size) for _ in range(self._args.prompt_tokens)]
        params = replace(GREEDY, max_tokens=self._args.output_tokens)
        engine.add_request(
            str(self._num_sent),
            None,
            params,
            prompt_token_ids=prompt,
            lora_request=self._choose(rng),
        )
        self._num_sent += 1


def show_rates(
    args: argparse.Namespace, without: LLMEngine, engine: LLMEngine, adapters: Sequence[LoRARequest]
) -> None:
    """Prints the first part: all streams at once, each adapter for as many of them."""
    numbers = iter(range(1 << 30))
    kinds: dict[str, tuple[LLMEngine, Choice]] = {
        "enable_lora off": (without, lambda _: None),
        "no adapter": (engine, lambda _: None),
        "adapters": (engine, lambda _: adapters[next(numbers) % len(adapters)]),
    }

    def rate(name: str, number: int) -> float:
        serving, choose = kinds[name]
        return Clients(args, number, choose).run(serving, args.streams)[0]

    rates = alternate(list(kinds), args.rounds, rate, warm_ups=1)  # it loads the adapters
    print(f"{args.streams} streams, {len(adapters)} adapters of rank {args.rank}, in slots")
    print_rates(rates, "enable_lora off")


def show_many(
    args: argparse.Namespace, without: LLMEngine, engine: LLMEngine, adapters: Sequence[LoRARequest]
) -> None:
    """Prints the second part."""
    weights = [1 / (rank + 1) ** args.zipf for rank in range(len(adapters))]

    def choose(rng: random.Random) -> LoRARequest:
        return rng.choices(adapters, weights)[0]

    print(
        f"{args.requests} requests, {args.streams} at a time, {len(adapters)} adapters in host "
        f"memory, {args.adapters} slots, Zipf's exponent {args.zipf}"
    )
    kinds: dict[str, tuple[LLMEngine, Choice]] = {
        "enable_lora off": (without, lambda _: None),
        "adapters, first use": (engine, choose),
        "adapters, in host": (engine, choose),
    }
    for adapter in adapters:  # the driver's own check of the folder
        engine.add_lora(adapter)
    for name, (serving, chosen) in kinds.items():
        if name == "adapters, in host":
            for adapter in adapters:
                Clients(args, 0, lambda _, one=adapter: one).run(engine, 1)  # type: ignore[misc]
        rate, first = Clients(args, 7, chosen).run(serving, args.requests)
        cuts = statistics.quantiles(first, n=100) if len(first) > 1 else first * 99
        print(
            f"{name:<20s} {rate:8.1f} output tokens/s; first token p50 {1e3 * cuts[49]:.0f} ms, "
            f"p99 {1e3 * cuts[98]:.0f} ms"
        )
