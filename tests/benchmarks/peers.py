"""`bench throughput` beside transformers' continuous batching, on the same requests in one run.

After each run of tpengine transformers serves the workload of that run, greedily and to the same
number of tokens. The median ratio of the times of one run counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from tqdm import tqdm

from tpengine.bench import throughput
from tpengine.bench.harness import Workload, bench_engine, median_of, report_head
from tpengine.bench.throughput import RunResult, ThroughputOptions, make_workloads, run_once
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.worker.device import detect_device, resolve_dtype

_BLOCK_TOKENS = 256
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_RESULT_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench throughput`."""
    throughput.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    options = ThroughputOptions.parse(args)
    with bench_engine(args) as (engine_args, engine):
        folder = engine.get_model_config().model
        model = load_model(engine_args, folder)
        warm_up, *workloads = make_workloads(options, engine)
        run_once(engine, warm_up, options.params())
        serve_continuously(model, warm_up)
        own: list[RunResult] = []
        theirs_s: list[float] = []
        for workload in tqdm(workloads, desc="runs", unit="run"):
            own.append(run_once(engine, workload, options.params()))
            theirs_s.append(serve_continuously(model, workload))
        print(report_head(engine_args, {"model": args.shape or folder}))
        throughput.print_runs(own, workloads[0])
    num_output = sum(wanted for _, wanted in workloads[0])
    rates = median_of([num_output / seconds for seconds in theirs_s], " output tokens/s", 1)
    ratios = (seconds / ours.elapsed_s for ours, seconds in zip(own, theirs_s, strict=True))
    print(f"{'transformers':<19} {rates}; tpengine does {statistics.median(ratios):.2f} x that")
    return 0


def load_model(args: EngineArgs, folder: str) -> Any:
    """transformers' model of the engine's folder, with random weights if the engine has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = detect_device(args.device)
    options = {"dtype": resolve_dtype(args.dtype, device), "attn_implementation": "sdpa"}
    try:
        if args.load_format != "dummy":
            return AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
        torch.manual_seed(0)
        with torch.device(device):  # random numbers are made faster on a GPU
            config = AutoConfig.from_pretrained(folder)
            return AutoModelForCausalLM.from_config(config, **options).eval()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for the engine and transformers ({error}); lower "
            "--gpu-memory-utilization until the model and its cache fit a second time"
        ) from error


def serve_continuously(model: Any, workload: Workload) -> float:
    """Serves all requests greedily, without end tokens, with a cache that holds the whole workload
    at once; returns the seconds."""
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
