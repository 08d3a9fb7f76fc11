"""Tokens per second of the whole engine (scheduling, model, sampling, text) on a mixed workload.

All requests are there at the start; prompt and output lengths are lognormal (median 67, 4 to 512)
and seeded, end tokens are ignored so that every run does the same work. Besides rates it prints
where a step's time goes: "outside the model" is all but forward, logits and sampling. With
--against, other engines serve the same requests in the same run, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from tqdm import tqdm

from tpengine.bench.machine import report_head
from tpengine.bench.workload import SHAPES, Workload, mixed_requests, shape_folder
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.stats import StepStats
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.worker.device import detect_device, resolve_dtype

_WARM_UP_REQUESTS = 4
_WARM_UP_OUTPUT = 4
_STATIC_BATCH = 16
_BLOCK_TOKENS = 256
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_RESULT_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument(
        "--num-requests", type=int, default=32, help="of a run (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, help="median of these (default: 3)")
    parser.add_argument(
        "--workload-seed", type=int, default=0, help="fixes lengths and ids (default: 0)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="1 keeps all tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="dummy weights of this shape instead of a model"
    )
    parser.add_argument(
        "--against",
        metavar="PEERS",
        default="",
        help="comma-separated: hf (transformers' generate in batches of 16), hf-cb (its "
        "continuous batching); default: none",
    )
    EngineArgs.add_cli_args(parser)


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
    if args.num_requests < 1 or args.runs < 1:
        raise SystemExit("--num-requests and --runs must be at least 1")
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    with contextlib.ExitStack() as stack:
        if args.shape is not None:
            folder = stack.enter_context(shape_folder(args.shape))
            engine_args = replace(engine_args, model=folder, tokenizer=None, load_format="dummy")
        engine = stack.enter_context(LLMEngine.from_engine_args(engine_args))
        model = engine.get_model_config()
        workloads = [
            mixed_requests(
                args.num_requests, model.vocab_size, args.workload_seed, model.max_model_len, i
            )
            for i in range(args.runs + 1)
        ]
        params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        peers = _load_peers(args.against, engine_args, model.model)
        warm_up = [(prompt, _WARM_UP_OUTPUT) for prompt, _ in workloads[-1][:_WARM_UP_REQUESTS]]
        run_once(engine, warm_up, params)
        for peer in peers.values():
            peer.run(warm_up)
        own: list[RunResult] = []
        others: dict[str, list[float]] = {name: [] for name in peers}
        for workload in tqdm(workloads[:-1], desc="runs", unit="run"):
            own.append(run_once(engine, workload, params))
            for name, peer in peers.items():
                others[name].append(peer.run(workload))
        num_output = sum(n for _, n in workloads[0])
        _print_own(args, engine, own, num_output)
        _print_others(own, others, num_output)
    return 0


def run_once(engine: LLMEngine, workload: Workload, params: SamplingParams) -> RunResult:
    """Serves all requests and notes every step."""
    start = time.perf_counter()
    for i, (prompt, num_output) in enumerate(workload):
        engine.add_request(
            str(i), None, replace(params, max_tokens=num_output), prompt_token_ids=prompt
        )
    steps = list(run_steps(engine))
    return RunResult(time.perf_counter() - start, steps)


def _load_peers(against: str, engine_args: EngineArgs, folder: str) -> dict[str, Peer]:
    names = [name for name in against.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SystemExit(f"--against {unknown[0]}: no such peer; there are {', '.join(PEERS)}")
    if not names:
        return {}
    device = detect_device(engine_args.device)
    dtype = resolve_dtype(engine_args.dtype, device)
    try:
        model = load_peer_model(folder, engine_args.load_format == "dummy", dtype, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"beside the engine there is no room on the GPU for {' and '.join(names)} ({error}); "
            "lower --gpu-memory-utilization so that the model fits a second time, with its cache"
        ) from error
    return {name: PEERS[name](model) for name in names}


def _print_own(
    args: argparse.Namespace, engine: LLMEngine, results: list[RunResult], num_output: int
) -> None:
    """The figures of the median run, and the spread."""
    ordered = sorted(results, key=lambda result: result.elapsed_s)
    median = ordered[len(ordered) // 2]
    rates = ", ".join(f"{num_output / result.elapsed_s:.0f}" for result in results)
    steps = median.steps
    prefill = sum(step.num_prefill_tokens for step in steps)
    times_ms = [1000 * step.step_s for step in steps]
    cuts = statistics.quantiles(times_ms, n=100) if len(times_ms) > 1 else times_ms * 99
    outside = max(0.0, 1 - sum(step.model_s for step in steps) / median.elapsed_s)
    model = engine.get_model_config()
    print(report_head(EngineArgs.from_cli_args(args)))
    print(f"model               {args.shape or model.model}")
    print(f"requests            {args.num_requests}, {len(steps)} steps, {median.elapsed_s:.2f} s")
    print(f"output tokens/s     {num_output / median.elapsed_s:.1f}   (runs: {rates})")
    print(f"prefill tokens/s    {prefill / median.elapsed_s:.1f}")
    print(f"step, ms            median {cuts[49]:.2f}, p90 {cuts[89]:.2f}, p99 {cuts[98]:.2f}")
    print(f"outside the model   {100 * outside:.2f} %")


def _print_others(own: list[RunResult], others: dict[str, list[float]], num_output: int) -> None:
    """Each peer's rate, and how many times it takes ours: medians, and the ratio pair by pair."""
    for name, elapsed in others.items():
        rates = ", ".join(f"{num_output / seconds:.0f}" for seconds in elapsed)
        ratio = statistics.median(
            theirs / ours.elapsed_s for ours, theirs in zip(own, elapsed, strict=True)
        )
        rate = num_output / statistics.median(elapsed)
        print(f"{name:<19} {rate:.1f} output tokens/s   (runs: {rates}); we do {ratio:.2f} x that")


def run_steps(engine: LLMEngine) -> Iterator[StepStats]:
    """Steps until nothing is left, and yields the figures of each step that computed something.

    A step that only reports (an abort, a request that cannot be served) leaves the figures of the
    one before in `last_step`, which must not be counted twice.
    """
    while engine.has_unfinished_requests():
        before = engine.last_step
        engine.step()
        if engine.last_step is not None and engine.last_step is not before:
            yield engine.last_step


class Peer(Protocol):
    """Something that serves a workload."""

    def run(self, workload: Workload) -> float:
        """Serves all requests greedily, ignoring end tokens; returns seconds."""


def load_peer_model(folder: str, dummy: bool, dtype: torch.dtype, device: str) -> Any:
    """transformers' model of `folder`, with random weights if `dummy`, attention by SDPA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dummy:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):  # billions of random numbers are quicker made there
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().to(device)


class StaticBatches:
    """`generate` on batches of 16 in the order of arrival, padded on the left; a batch lasts as
    long as its longest request."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload) -> float:
        start = time.perf_counter()
        for first in range(0, len(workload), _STATIC_BATCH):
            self._generate(workload[first : first + _STATIC_BATCH])
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _generate(self, batch: Workload) -> None:
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(num_output for _, num_output in batch)
        device = self._model.device
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )


class ContinuousBatches:
    """transformers' continuous batching, with a cache that holds the whole workload at once."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        blocks = sum(-(-(len(p) + n) // _BLOCK_TOKENS) + 1 for p, n in workload)
        config = ContinuousBatchingConfig(
            page_size=_BLOCK_TOKENS,
            num_blocks=max(blocks, 16),
            max_batch_tokens=_BATCH_TOKENS[self._model.device.type],
        )
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=max(n for _, n in workload), eos_token_id=-1
        )
        manager_context = self._model.continuous_batching_context_manager(
            generation, timeout=_STOP_TIMEOUT_S, continuous_batching_config=config
        )
        with manager_context as manager:
            start = time.perf_counter()
            for prompt, wanted in workload:
                manager.add_request(prompt, max_new_tokens=wanted, eos_token_id=-1)
            finished = num_output = 0
            while finished < len(workload):
                result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
                if result is None:
                    raise EngineError(
                        f"transformers' continuous batching gave no result for "
                        f"{_RESULT_TIMEOUT_S:.0f} s, {finished} of {len(workload)} were finished"
                    )
                if result.is_finished():
                    finished += 1
                    num_output += len(result.generated_tokens)
            elapsed_s = time.perf_counter() - start
        expected = sum(n for _, n in workload)
        if num_output != expected:
            raise EngineError(
                f"transformers' continuous batching made {num_output} tokens where {expected} "
                "were asked for; the comparison would be of different work"
            )
        return elapsed_s


PEERS = {"hf": StaticBatches, "hf-cb": ContinuousBatches}
"""Names for `--against`."""
