"""Tokens per second of the whole engine (scheduling, model, sampling, text) on a mixed workload.

All requests arrive at the start. Prompt and output lengths are lognormal (median 67, 4 to 512) and
seeded; end tokens are ignored, so that every run does the same work. "outside the model" is the
share of the time that is not in forward, logits and sampling. With --against, other engines serve
the same requests in turn, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from tpengine.bench.harness import (
    BenchOptions,
    Workload,
    add_model_arguments,
    median_of,
    mixed_requests,
    model_args,
    report_head,
)
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.stats import StepStats
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.options import option
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.worker.device import detect_device, resolve_dtype

_WARM_UP_REQUESTS = 4
_WARM_UP_OUTPUT = 4
_STATIC_BATCH = 16
_BLOCK_TOKENS = 256
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_RESULT_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0

Peer = Callable[[Workload], float]
"""Another engine: serves all requests greedily, ignores end tokens and returns the seconds."""


@dataclass
class ThroughputOptions(BenchOptions):
    """The workload, and the engines to compare with."""

    num_requests: int = option(32, at_least=1)
    """Requests of a run."""
    runs: int = option(3, at_least=1)
    """Runs; the figures are those of the median run."""
    workload_seed: int = option(0)
    """Seed of the lengths and token ids."""
    temperature: float = option(0.0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = option(1.0)
    """Draw from the most likely tokens whose probabilities reach this sum; 1 draws from all."""
    against: str = option("", metavar="PEERS")
    """Engines to compare with, separated by commas: hf (transformers' generate in batches of 16),
    hf-cb (its continuous batching); default: none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    ThroughputOptions.add_cli_args(parser)
    add_model_arguments(parser)


@dataclass(frozen=True)
class RunResult:
    """One pass over the workload."""

    elapsed_s: float
    steps: list[StepStats]

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return sum(step.num_output_tokens for step in self.steps) / self.elapsed_s


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    options = ThroughputOptions.parse(args)
    with (
        model_args(args) as engine_args,
        LLMEngine.from_engine_args(replace(engine_args, disable_log_stats=True)) as engine,
    ):
        model = engine.get_model_config()
        size = model.vocab_size, options.workload_seed, model.max_model_len
        count = options.num_requests
        workloads = [mixed_requests(count, *size, run) for run in range(options.runs + 1)]
        params = SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        peers = _load_peers(options.against, engine_args, model.model)
        warm_up = [(prompt, _WARM_UP_OUTPUT) for prompt, _ in workloads[-1][:_WARM_UP_REQUESTS]]
        run_once(engine, warm_up, params)
        for peer in peers.values():
            peer(warm_up)
        own: list[RunResult] = []
        others: dict[str, list[float]] = {name: [] for name in peers}
        for workload in tqdm(workloads[:-1], desc="runs", unit="run"):
            own.append(run_once(engine, workload, params))
            for name, peer in peers.items():
                others[name].append(peer(workload))
        num_output = sum(n for _, n in workloads[0])
        print(report_head(engine_args, {"model": args.shape or model.model}))
        _print_own(own, count, num_output)
        _print_others(own, others, num_output)
    return 0


def run_once(engine: LLMEngine, workload: Workload, params: SamplingParams) -> RunResult:
    """Serves all requests; returns the figures of every step."""
    start = time.perf_counter()
    for i, (prompt, num_output) in enumerate(workload):
        engine.add_request(
            str(i), None, replace(params, max_tokens=num_output), prompt_token_ids=prompt
        )
    steps = list(run_steps(engine))
    return RunResult(time.perf_counter() - start, steps)


def _load_peers(against: str, engine_args: EngineArgs, folder: str) -> dict[str, Peer]:
    """The engines that `--against` names, with a model of their own."""
    names = [name for name in against.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"--against must name {' or '.join(PEERS)}, got {unknown[0]!r}")
    if not names:
        return {}
    device = detect_device(engine_args.device)
    dtype = resolve_dtype(engine_args.dtype, device)
    try:
        model = load_peer_model(folder, engine_args.load_format == "dummy", dtype, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for the engine and {' and '.join(names)} ({error}); "
            "lower --gpu-memory-utilization until the model and its cache fit a second time"
        ) from error
    return {name: partial(PEERS[name], model) for name in names}


def _print_own(results: list[RunResult], num_requests: int, num_output: int) -> None:
    """Prints the figures of the median run, and the rate of every run."""
    median = sorted(results, key=lambda result: result.elapsed_s)[len(results) // 2]
    steps, elapsed_s = median.steps, median.elapsed_s
    prefill = sum(step.num_prefill_tokens for step in steps)
    times_ms = [1000 * step.step_s for step in steps]
    cuts = statistics.quantiles(times_ms, n=100) if len(times_ms) > 1 else times_ms * 99
    outside = max(0.0, 1 - sum(step.model_s for step in steps) / elapsed_s)
    rates = median_of([num_output / result.elapsed_s for result in results], "", 1)
    print(f"requests            {num_requests}, {len(steps)} steps, {elapsed_s:.2f} s")
    print(f"output tokens/s     {rates}")
    print(f"prefill tokens/s    {prefill / elapsed_s:.1f}")
    print(f"step, ms            median {cuts[49]:.2f}, p90 {cuts[89]:.2f}, p99 {cuts[98]:.2f}")
    print(f"outside the model   {100 * outside:.2f} %")


def _print_others(own: list[RunResult], others: dict[str, list[float]], num_output: int) -> None:
    """Prints each peer's rates, and the median ratio of its time to ours in the same run."""
    for name, elapsed in others.items():
        rates = median_of([num_output / seconds for seconds in elapsed], " output tokens/s", 1)
        ratio = statistics.median(
            theirs / ours.elapsed_s for ours, theirs in zip(own, elapsed, strict=True)
        )
        print(f"{name:<19} {rates}; tpengine does {ratio:.2f} x that")


def run_steps(engine: LLMEngine) -> Iterator[StepStats]:
    """Steps the engine until no request is unfinished; yields the figures of each computed step.

    A step that only reports an end (an abort, a request that cannot be served) leaves the figures
    of an earlier step in `last_step`, which must not be counted twice.
    """
    while engine.has_unfinished_requests():
        before = engine.last_step
        engine.step()
        if engine.last_step is not None and engine.last_step is not before:
            yield engine.last_step


def load_peer_model(folder: str, dummy: bool, dtype: torch.dtype, device: str) -> Any:
    """transformers' model of `folder`, with random weights if `dummy`, attention by SDPA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if not dummy:
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
    torch.manual_seed(0)
    with torch.device(device):  # random numbers are made faster on a GPU
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **options)
    return model.eval()


def serve_static_batches(model: Any, workload: Workload) -> float:
    """`generate` on batches of 16 in the order of arrival, padded on the left. A batch takes as
    long as its longest request."""
    start = time.perf_counter()
    for first in range(0, len(workload), _STATIC_BATCH):
        batch = workload[first : first + _STATIC_BATCH]
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(num_output for _, num_output in batch)
        with torch.inference_mode():
            model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def serve_continuously(model: Any, workload: Workload) -> float:
    """transformers' continuous batching, with a cache that holds the whole workload at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum(-(-(len(p) + n) // _BLOCK_TOKENS) + 1 for p, n in workload)
    config = ContinuousBatchingConfig(
        page_size=_BLOCK_TOKENS,
        num_blocks=max(blocks, 16),
        max_batch_tokens=_BATCH_TOKENS[model.device.type],
    )
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=max(n for _, n in workload), eos_token_id=-1
    )
    with model.continuous_batching_context_manager(
        generation, timeout=_STOP_TIMEOUT_S, continuous_batching_config=config
    ) as manager:
        start = time.perf_counter()
        for prompt, wanted in workload:
            manager.add_request(prompt, max_new_tokens=wanted, eos_token_id=-1)
        finished = num_output = 0
        while finished < len(workload):
            result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is None:
                raise EngineError(
                    f"transformers' continuous batching gave no result for "
                    f"{_RESULT_TIMEOUT_S:.0f} s, {finished} of {len(workload)} requests ended"
                )
            if result.is_finished():
                finished += 1
                num_output += len(result.generated_tokens)
        elapsed_s = time.perf_counter() - start
    expected = sum(n for _, n in workload)
    if num_output != expected:
        raise EngineError(
            f"transformers' continuous batching made {num_output} tokens instead of {expected}; "
            "its time cannot be compared"
        )
    return elapsed_s


PEERS: dict[str, Callable[[Any, Workload], float]] = {
    "hf": serve_static_batches,
    "hf-cb": serve_continuously,
}
"""Names for `--against`."""
