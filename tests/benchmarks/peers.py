"""`bench throughput` beside transformers, which serves the same requests in turn, in the same run.

After each run of tpengine every engine of `--against` serves the workload of that run, greedily and
to the same number of tokens. The median ratio of the times of one run counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from tpengine.bench import throughput
from tpengine.bench.harness import Workload, bench_engine, median_of, report_head
from tpengine.bench.throughput import RunResult, ThroughputOptions, make_workloads, run_once
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.worker.device import detect_device, resolve_dtype

_STATIC_BATCH = 16
_BLOCK_TOKENS = 256
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_RESULT_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0

Peer = Callable[[Workload], float]
"""Another engine: serves all requests greedily, ignores end tokens and returns the seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench throughput`, and the engines to compare with."""
    throughput.add_arguments(parser)
    parser.add_argument(
        "--against",
        metavar="PEERS",
        default="hf,hf-cb",
        help="engines to compare with, separated by commas: hf (transformers' generate in batches "
        "of 16), hf-cb (its continuous batching); default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    options = ThroughputOptions.parse(args)
    with bench_engine(args) as (engine_args, engine):
        folder = engine.get_model_config().model
        peers = load_peers(args.against, engine_args, folder)
        warm_up, *workloads = make_workloads(options, engine)
        run_once(engine, warm_up, options.params())
        for peer in peers.values():
            peer(warm_up)
        own: list[RunResult] = []
        others: dict[str, list[float]] = {name: [] for name in peers}
        for workload in tqdm(workloads, desc="runs", unit="run"):
            own.append(run_once(engine, workload, options.params()))
            for name, peer in peers.items():
                others[name].append(peer(workload))
        print(report_head(engine_args, {"model": args.shape or folder}))
        throughput.print_runs(own, workloads[0])
        _print_others(own, others, workloads[0])
    return 0


def load_peers(against: str, engine_args: EngineArgs, folder: str) -> dict[str, Peer]:
    """The engines that `--against` names, with a model of their own."""
    names = [name for name in against.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"--against must name {' or '.join(PEERS)}, got {unknown[0]!r}")
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


def _print_others(own: list[RunResult], others: dict[str, list[float]], workload: Workload) -> None:
    """Prints each peer's rates, and the median ratio of its time to ours in the same run."""
    num_output = sum(wanted for _, wanted in workload)
    for name, elapsed in others.items():
        rates = median_of([num_output / seconds for seconds in elapsed], " output tokens/s", 1)
        ratio = statistics.median(
            theirs / ours.elapsed_s for ours, theirs in zip(own, elapsed, strict=True)
        )
        print(f"{name:<19} {rates}; tpengine does {ratio:.2f} x that")


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
