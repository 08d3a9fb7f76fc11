"""What a recovery takes: ranks are killed in the middle of decoding, with and without spares.

Of each kill: how soon it was found; how long until a step could be scheduled again, by phase; and
the longest gap on a stream, beside the time that the same engine takes, undisturbed, to compute as
many tokens as were lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from tpengine import envs
from tpengine.bench.machine import report_head
from tpengine.bench.workload import SHAPES, shape_folder
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.stats import EngineState, RecoveryRecord
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError, WorkerDiedError
from tpengine.executor.launch.ray_executor import RayExecutor
from tpengine.layers.weights import Weights
from tpengine.models.registry import build_model
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_WEIGHTS_STD = 0.02

_CACHE_GIB = 0.5
_FIRST_ID = 5
_SPARES_S = 60.0
_SERVE_S = 300.0
"""Bound of whatever one kill is followed by."""
_BEFORE, _AFTER = 8, 64
"""Tokens of a stream before the kill; room for those after it."""
_POLL_S = 0.05
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
        found_s: from the signal until the engine knew.
        recompute_s: of as many tokens in as many requests, measured afterwards on the new ranks.
    """

    found_s: float
    recompute_s: float
    record: RecoveryRecord

    @property
    def gap_s(self) -> float:
        """The longest between two tokens of a stream."""
        return self.record.longest_gap_s or 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-124m",
        help="random weights of this shape (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="of the engine (default: %(default)s)")
    parser.add_argument(
        "--kills", type=int, default=7, help="with spares, and without (default: %(default)s)"
    )
    parser.add_argument(
        "--num-streams", type=int, default=8, help="that a kill meets (default: %(default)s)"
    )
    parser.add_argument(
        "--input-len", type=int, default=128, help="prompt tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="auto", help="of weights and activations (default: auto)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    import ray

    if min(args.ranks, args.kills, args.num_streams, args.input_len) < 1:
        raise ConfigError("--ranks, --kills, --num-streams and --input-len must be at least 1")
    envs.prepare_local_ray()
    ray.init(address="local", num_cpus=args.ranks, include_dashboard=False, log_to_driver=False)
    try:
        with shape_folder(args.shape) as folder:
            engine_args = EngineArgs(
                folder,
                device="cpu",
                dtype=args.dtype,
                tensor_parallel_size=args.ranks,
                executor="ray",
                cpu_kv_cache_space=_CACHE_GIB / args.ranks,
                swap_space=0.0,
                max_recoveries=args.kills,
                disable_log_stats=True,
            )
            write_weights(engine_args, Path(folder))
            print(report_head(engine_args))
            print(
                f"work                {args.shape} on {args.ranks} ranks, {args.num_streams} "
                f"streams with prompts of {args.input_len} tokens, {args.kills} kills of each kind"
            )
            for spare_workers in (0, args.ranks):
                kills = measure(replace(engine_args, spare_workers=spare_workers), args)
                _report(f"{spare_workers} spares", kills)
    finally:
        ray.shutdown()
    print(f"machine's load      {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0


def measure(engine_args: EngineArgs, args: argparse.Namespace) -> list[Kill]:
    """Kills ranks of an engine, one after another."""
    rng = random.Random(0)
    with LLMEngine.from_engine_args(engine_args) as engine:
        longest = engine.get_model_config().max_model_len - _BEFORE - _AFTER
        if args.input_len > longest:
            raise ConfigError(
                f"--input-len must be at most {longest}, got {args.input_len}: the model takes "
                f"{longest + _BEFORE + _AFTER} tokens, and streams are to go on after a kill"
            )
        return [
            _kill(engine, rng, args.num_streams, args.input_len, engine_args.spare_workers)
            for _ in tqdm(range(args.kills), desc=f"{engine_args.spare_workers} spares")
        ]


def _kill(
    engine: LLMEngine, rng: random.Random, num_streams: int, input_len: int, spare_workers: int
) -> Kill:
    """Kills a rank under streams that decode."""
    executor = engine._executor
    assert isinstance(executor, RayExecutor)
    _wait_for_spares(executor, spare_workers)
    lengths = _serve_until_decoding(engine, rng, num_streams, input_len)
    os.kill(rng.choice(executor.places).pid, signal.SIGKILL)
    start = time.monotonic()
    _step_until(engine, lengths, lambda: engine.health().state is not EngineState.RUNNING)
    found_s = time.monotonic() - start
    before = dict(lengths)
    # Until each stream has gone on: the record's gap is then that of the slowest.
    _step_until(engine, lengths, lambda: all(lengths[name] > before[name] for name in lengths))
    record = engine.recoveries[-1]
    engine.abort_request(list(lengths))
    _step_until(engine, lengths, lambda: not engine.has_unfinished_requests())
    _wait_for_spares(executor, spare_workers)  # whose start would slow what is measured next
    return Kill(found_s, _recompute_s(engine, rng, list(before.values())), record)


def _wait_for_spares(executor: RayExecutor, count: int) -> None:
    deadline = time.monotonic() + _SPARES_S
    while len(executor._spares.places()) < count:
        if time.monotonic() > deadline:
            raise WorkerDiedError(f"{count} spares were not ready within {_SPARES_S:g} s")
        time.sleep(_POLL_S)


def _serve_until_decoding(
    engine: LLMEngine, rng: random.Random, num_streams: int, input_len: int
) -> dict[str, int]:
    """Starts streams; returns the tokens of each so far, prompt included."""
    lengths = {}
    for number in range(num_streams):
        lengths[str(number)] = input_len
        prompt = _random_prompt(engine, rng, input_len)
        engine.add_request(str(number), None, _STREAM, prompt_token_ids=prompt)
    _step_until(engine, lengths, lambda: min(lengths.values()) >= input_len + _BEFORE)
    return lengths


def _step_until(engine: LLMEngine, lengths: dict[str, int], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SERVE_S
    while not done():
        if time.monotonic() > deadline:
            raise EngineError(f"the streams did not go on within {_SERVE_S:g} s: {lengths}")
        for output in engine.step():
            lengths[output.request_id] += len(output.outputs[0].token_ids)


def _recompute_s(engine: LLMEngine, rng: random.Random, lengths: list[int]) -> float:
    """Seconds until as many new requests of these lengths have each had a token."""
    params = replace(_STREAM, max_tokens=1)
    prompts = [_random_prompt(engine, rng, length) for length in lengths]
    made: dict[str, int] = {}
    start = time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"again {number}", None, params, prompt_token_ids=prompt)
        made[f"again {number}"] = 0
    _step_until(engine, made, lambda: not engine.has_unfinished_requests())
    return time.monotonic() - start


def _random_prompt(engine: LLMEngine, rng: random.Random, num_tokens: int) -> list[int]:
    vocab_size = engine.get_model_config().vocab_size
    return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(num_tokens)]


def _report(name: str, kills: list[Kill]) -> None:
    print(name)
    _line("  found after", [kill.found_s for kill in kills])
    _line("  ready after that", [kill.record.ready_s for kill in kills])
    phases = {
        phase: statistics.median(kill.record.phases_s.get(phase, 0.0) for kill in kills)
        for phase in kills[0].record.phases_s
    }
    listed = ", ".join(f"{phase} {spent:.2f}" for phase, spent in phases.items())
    print(f"    median by phase {listed}")
    _line("  longest gap", [kill.gap_s for kill in kills])
    _line("  recompute alone", [kill.recompute_s for kill in kills])
    rests = [(kill.gap_s - kill.found_s - kill.record.ready_s) / kill.recompute_s for kill in kills]
    listed = ", ".join(f"{rest:.2f}" for rest in rests)
    print(
        f"  rest of the gap   {statistics.median(rests):.2f} x the time of recompute "
        f"(all: {listed})",
        flush=True,
    )


def _line(name: str, seconds: list[float]) -> None:
    listed = ", ".join(f"{one:.2f}" for one in seconds)
    print(f"{name:<20}{statistics.median(seconds):.2f} s (all: {listed})")


def write_weights(args: EngineArgs, folder: Path) -> None:
    """A checkpoint of the shape, random, in bfloat16 as most are."""
    config = args.create_engine_config("cpu").model
    weights = Weights(torch.bfloat16, torch.device("cpu"), ParallelState())
    build_model(config, weights)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shard in weights.shards.items():
        tensor = torch.ones(shard.full_shape, dtype=torch.bfloat16)
        tensors[name] = (
            tensor if tensor.dim() == 1 else tensor.normal_(0, _WEIGHTS_STD, generator=generator)
        )
    save_file(tensors, folder / "model.safetensors")
