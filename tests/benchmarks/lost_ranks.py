"""The time of a recovery: ranks are killed while they decode. They go on with the memory of the
lost rank, or not; Ray has spares, or not.

For each kill: the time until the engine found the loss, the time until it could schedule a step
again, by phase, and the longest gap on a stream. For comparison: the time that the same engine then
takes to compute as many tokens as the streams had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.waiting import wait_until
from tqdm import tqdm

from benchmarks.common import local_ray, write_weights
from tpengine import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tpengine.bench import harness
from tpengine.engine.stats import EngineState, RecoveryRecord
from tpengine.errors import ConfigError, EngineError
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch.chosen_executor import create_executor
from tpengine.options import option

_FIRST_ID = 5
"""Lowest id of a prompt; those below it are special tokens."""
_SPARES_S = 60.0
"""Longest wait for the spares."""
_SERVE_S = 300.0
"""Longest time of each part of a measurement, for example until all streams have continued."""
_NUM_TOKENS = 8
"""Output tokens that each stream gets before the kill, and again after it, at least."""
_MAX_TOKENS = 72
"""Most output tokens of a stream. Those that continue first after a kill get more than the last."""
_STREAM = SamplingParams(
    temperature=0.0,
    max_tokens=1 << 20,
    ignore_eos=True,
    output_kind=RequestOutputKind.DELTA,
    detokenize=False,
)


@dataclass(frozen=True)
class Kill:
    """One kill, in seconds.

    Attributes:
        found_s: from the signal until the engine found the loss.
        recompute_s: time of as many tokens in as many requests, measured later on the new ranks.
        step_s: of an undisturbed step, the median before the kill.
        tokens_s: when the last stream got tokens, from its first on; negative before the signal.
    """

    found_s: float
    recompute_s: float
    step_s: float
    record: RecoveryRecord
    tokens_s: list[float]

    @property
    def gap_s(self) -> float:
        """The longest time between two tokens of a stream."""
        return self.record.longest_gap_s or 0.0

    def as_data(self) -> dict[str, Any]:
        """Returns this kill as an entry of the JSON file."""
        return {
            "found_s": round(self.found_s, 4),
            "ready_s": round(self.record.ready_s, 4),
            "phases_s": {name: round(s, 4) for name, s in self.record.phases_s.items()},
            "longest_gap_s": round(self.gap_s, 4),
            "step_s": round(self.step_s, 4),
            "is_resumed": self.record.is_resumed,
            "tokens_s": [round(moment, 4) for moment in self.tokens_s],
        }


@dataclass
class _Streams:
    """The requests that run.

    Attributes:
        lengths: tokens of each, prompt included, by id.
        moments: when the last of them got tokens: it is computed last, also after a loss.
    """

    lengths: dict[str, int]
    moments: list[float] = field(default_factory=list)


@dataclass
class RecoveryOptions(harness.BenchOptions):
    """The engine, and what each kill meets."""

    ranks: int = option(2, at_least=1)
    """Ranks that share each layer."""
    stages: int = option(1, at_least=1)
    """Stages of a pipeline."""
    shape: str = option("llama-124m", tuple(harness.SHAPES))
    """Shape of the model, which has random weights."""
    executor: str = option("both", ("both", "processes", "ray"))
    """Who starts the ranks."""
    kills: int = option(7, at_least=1)
    """Kills of each kind."""
    num_streams: int = option(8, at_least=1)
    """Streams that decode when a rank is killed."""
    input_len: int = option(128, at_least=1)
    """Prompt tokens of a stream."""
    cache_gib: float = option(0.5, more_than=0, unit=" GiB")
    """KV cache of all ranks together."""
    dtype: str = option("auto")
    """Dtype of weights and activations."""
    json: str | None = option(None, metavar="PATH")
    """Write every kill to this file, with machine, date and command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    RecoveryOptions.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    options = RecoveryOptions.parse(args)
    executors = ["processes", "ray"] if options.executor == "both" else [options.executor]
    with ExitStack() as stack:
        folder = stack.enter_context(harness.shape_folder(options.shape))
        if "ray" in executors:
            stack.enter_context(local_ray(options.ranks * options.stages))
        num_ranks = options.ranks * options.stages
        sizes = {"cpu_kv_cache_space": options.cache_gib / num_ranks, "swap_space": 0.0}
        sizes |= {"pipeline_parallel_size": options.stages}
        sizes |= {"tensor_parallel_size": options.ranks, "max_recoveries": options.kills}
        engine_args = EngineArgs(
            folder, device="cpu", dtype=options.dtype, disable_log_stats=True, **sizes
        )
        write_weights(engine_args, Path(folder))
        work = (
            f"{options.shape} on {options.stages} x {options.ranks} ranks, "
            f"{options.num_streams} streams with "
            f"prompts of {options.input_len} tokens, {options.kills} kills of each kind"
        )
        print(harness.report_head(engine_args, {"work": work}))
        data: dict[str, Any] = harness.report_facts(engine_args) | {"work": work}
        for name, fields in _kinds(executors, num_ranks).items():
            kills = measure(name, replace(engine_args, **fields), options)
            _report(name, kills)
            data[name] = [kill.as_data() for kill in kills]
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        data["machine's load"] = load
        if options.json is not None:
            Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    print(f"machine's load      {load}")
    return 0


def _kinds(executors: list[str], num_ranks: int) -> dict[str, dict[str, Any]]:
    """What is compared, by name: fields of `EngineArgs`."""
    kinds: dict[str, dict[str, Any]] = {}
    counts = {"processes": [0], "ray": [0, num_ranks]}
    for executor, count, keep_kv in (
        (e, c, keep_kv) for e in executors for c in counts[e] for keep_kv in ("never", "safe")
    ):
        name = executor if executor == "processes" else f"{executor}, {count} spares"
        fields = {"executor": executor, "spare_workers": count, "keep_kv": keep_kv}
        kinds[f"{name}, keep_kv {keep_kv}"] = fields
    return kinds


def measure(name: str, engine_args: EngineArgs, options: RecoveryOptions) -> list[Kill]:
    """Kills ranks of an engine, one after another."""
    rng = random.Random(0)
    config, executor = create_executor(engine_args)
    with LLMEngine(config, executor, log_stats=not engine_args.disable_log_stats) as engine:
        longest = config.model.max_model_len - _MAX_TOKENS
        if options.input_len > longest:
            raise ConfigError(
                f"--input-len must be at most {longest}, got {options.input_len}: the model takes "
                f"{longest + _MAX_TOKENS} tokens, and the streams must continue after a kill"
            )
        lens = [options.input_len] * options.num_streams
        return [_kill(engine, executor, rng, lens) for _ in tqdm(range(options.kills), desc=name)]


def _kill(engine: LLMEngine, executor: GroupExecutor, rng: random.Random, lens: list[int]) -> Kill:
    """Kills a rank while streams decode, whose prompts have these lengths."""
    _wait_for_spares(executor)
    streams = _start(engine, _random_prompts(engine, rng, lens), _STREAM)
    lengths = streams.lengths
    _step_until(engine, streams, lambda: min(lengths.values()) >= max(lens) + _NUM_TOKENS)
    step_s = statistics.median(b - a for a, b in pairwise(streams.moments))
    num_recoveries = len(engine.recoveries)

    def is_found() -> bool:  # one that was resumed is over by then
        is_resumed = len(engine.recoveries) > num_recoveries
        return is_resumed or engine.health().state is not EngineState.RUNNING

    os.kill(rng.choice(executor.places).pid, signal.SIGKILL)
    killed_at = time.monotonic()
    _step_until(engine, streams, is_found)
    found_s = time.monotonic() - killed_at
    if len(engine.recoveries) > num_recoveries:
        found_s -= engine.recoveries[-1].ready_s
    before = dict(lengths)
    # The record's longest gap includes a stream's gap only when that stream has continued.
    goal = {name: length + _NUM_TOKENS for name, length in lengths.items()}
    _step_until(engine, streams, lambda: all(lengths[name] >= goal[name] for name in goal))
    record = engine.recoveries[-1]
    engine.abort_request(list(lengths))
    _step_until(engine, streams, lambda: not engine.has_unfinished_requests())
    _wait_for_spares(executor)  # their start would slow the next measurement
    prompts = _random_prompts(engine, rng, list(before.values()))
    start = time.monotonic()
    again = _start(engine, prompts, replace(_STREAM, max_tokens=1))
    _step_until(engine, again, lambda: not engine.has_unfinished_requests())
    recompute_s = time.monotonic() - start
    moments = [moment - killed_at for moment in streams.moments]
    return Kill(found_s, recompute_s, step_s, record, moments)


def _wait_for_spares(executor: GroupExecutor) -> None:
    """For the template, too."""
    spares = executor.home.spares

    def count_ready() -> int:
        return sum(spare.is_prepared() for spare in spares._spares)

    wait_until(lambda: count_ready() >= spares.count, _SPARES_S, f"fewer than {spares.count}")


def _random_prompts(engine: LLMEngine, rng: random.Random, lens: list[int]) -> list[list[int]]:
    vocab_size = engine.get_model_config().vocab_size
    return [[rng.randrange(_FIRST_ID, vocab_size) for _ in range(length)] for length in lens]


def _start(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> _Streams:
    """Adds a request for each prompt."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), None, params, prompt_token_ids=prompt)
    return _Streams({str(number): len(prompt) for number, prompt in enumerate(prompts)})


def _step_until(engine: LLMEngine, streams: _Streams, done: Callable[[], bool]) -> None:
    """Steps the engine until `done`, and notes the new tokens."""
    deadline = time.monotonic() + _SERVE_S
    last = next(reversed(streams.lengths))
    while not done():
        if time.monotonic() > deadline:
            raise EngineError(f"streams did not continue within {_SERVE_S:g} s: {streams.lengths}")
        for output in engine.step():
            count = len(output.outputs[0].token_ids)
            streams.lengths[output.request_id] += count
            if count and output.request_id == last:
                streams.moments.append(time.monotonic())


def _report(name: str, kills: list[Kill]) -> None:
    print(name)
    print(f"  found after       {harness.median_of([kill.found_s for kill in kills], ' s')}")
    print(f"  ready after that  {harness.median_of([kill.record.ready_s for kill in kills], ' s')}")
    phases = {
        phase: statistics.median(kill.record.phases_s.get(phase, 0.0) for kill in kills)
        for phase in kills[0].record.phases_s
    }
    print(f"    median by phase {', '.join(f'{phase} {s:.2f}' for phase, s in phases.items())}")
    print(f"  longest gap       {harness.median_of([kill.gap_s for kill in kills], ' s')}")
    pauses = [kill.gap_s - 2 * kill.step_s for kill in kills]
    print(f"    less two steps  {harness.median_of(pauses, ' s')}")
    print(f"  recompute alone   {harness.median_of([kill.recompute_s for kill in kills], ' s')}")
    rests = [(kill.gap_s - kill.found_s - kill.record.ready_s) / kill.recompute_s for kill in kills]
    print(f"  rest of the gap   {harness.median_of(rests, ' x the time of recompute')}", flush=True)
