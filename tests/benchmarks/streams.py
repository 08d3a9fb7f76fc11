"""What streams cost the engine: its step with many readers of `AsyncLLMEngine` in one event loop,
against the same requests offline, in turns in one run; and the event loop's own CPU time per token.

A step is counted from the end of the one before to its own, so that whatever the event loop takes
from the engine's thread is in it; only steps count that decode for all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from tqdm import tqdm

from benchmarks.common import add_numbers, random_prompt
from tpengine.async_engine.admission import QueueLimits
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.bench.harness import add_model_arguments, model_args, report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.errors import ConfigError
from tpengine.sampling_params import RequestOutputKind, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        num_streams=(256, "readers at once"),
        input_len=(16, "prompt tokens"),
        output_len=(32, "output tokens"),
        runs=(3, "of each kind"),
    )
    add_model_arguments(parser)


class StepClock:
    """Notes how long each full decode step of an engine takes, from end to end."""

    def __init__(self, engine: LLMEngine, num_rows: int) -> None:
        self._engine = engine
        self._num_rows = num_rows
        self._step = engine.step
        self._before: float | None = None
        self.seconds: list[float] = []
        engine.step = self._timed  # type: ignore[method-assign]

    def take(self) -> list[float]:
        """Those since the last call."""
        seconds, self.seconds = self.seconds, []
        return seconds

    def _timed(self) -> list:
        before = self._engine.last_step
        outputs = self._step()
        stats, now = self._engine.last_step, time.perf_counter()
        if stats is before or stats is None:
            return outputs
        is_full = stats.num_rows == self._num_rows and stats.num_prefill_tokens == 0
        if is_full and self._before is not None:
            self.seconds.append(now - self._before)
        self._before = now if is_full else None
        return outputs


def run(args: argparse.Namespace) -> int:
    """Measures both in turns, and prints medians."""
    if args.num_streams < 1 or args.output_len < 8 or args.runs < 1:
        raise ConfigError(
            "bench streams needs --num-streams and --runs of at least 1 and --output-len of at "
            f"least 8, got {args.num_streams}, {args.runs} and {args.output_len}"
        )
    with model_args(args) as engine_args:
        engine_args = replace(engine_args, disable_log_stats=True, max_num_seqs=args.num_streams)
        with LLMEngine.from_engine_args(engine_args) as offline:
            limits = QueueLimits(max_requests=args.num_streams)
            streams = AsyncLLMEngine.from_engine_args(engine_args, limits)
            try:
                figures = _measure(offline, streams, args)
            finally:
                asyncio.run(streams.shutdown())
    print(report_head(engine_args))
    print(f"{'model':<20s}{args.shape or engine_args.model}")
    _report(figures, args.num_streams)
    return 0


def _measure(
    offline: LLMEngine, streams: AsyncLLMEngine, args: argparse.Namespace
) -> list[tuple[float, float, float]]:
    """By run: median step offline and with streams in seconds, CPU seconds per token."""
    clocks = [StepClock(engine, args.num_streams) for engine in (offline, streams.llm_engine)]
    figures = []
    for run in tqdm(range(args.runs), desc="runs", unit="run"):
        # New prompts, so that no prefix is known.
        first = run * args.num_streams
        prompts = [
            random_prompt(offline, args.input_len, seed)
            for seed in range(first, first + args.num_streams)
        ]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=args.output_len,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        for index, prompt in enumerate(prompts):
            offline.add_request(str(index), None, params, prompt_token_ids=prompt)
        while offline.has_unfinished_requests():
            offline.step()
        start = time.thread_time()
        num_tokens = asyncio.run(_read_all(streams, prompts, params))
        cpu_s = (time.thread_time() - start) / num_tokens
        alone, beside = (_median(clock.take) for clock in clocks)
        figures.append((alone, beside, cpu_s))
    return figures


async def _read_all(
    streams: AsyncLLMEngine, prompts: list[list[int]], params: SamplingParams
) -> int:
    async def read(prompt: list[int]) -> int:
        outputs = streams.generate(None, params, prompt_token_ids=prompt)
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    return sum(await asyncio.gather(*map(read, prompts)))


def _median(take: Callable[[], list[float]]) -> float:
    seconds = take()
    if not seconds:
        raise ConfigError(
            "no step held all streams: the first had ended before the last began; raise "
            "--output-len, --max-num-batched-tokens or --cpu-kv-cache-space"
        )
    return statistics.median(seconds)


def _report(figures: list[tuple[float, float, float]], num_streams: int) -> None:
    for alone, beside, cpu_s in figures:
        print(
            f"step with {num_streams:>4d} streams {1000 * beside:8.2f} ms   offline "
            f"{1000 * alone:8.2f} ms   ratio {beside / alone:5.3f}   event loop "
            f"{1e6 * cpu_s:5.1f} µs of CPU per token"
        )
    ratio = statistics.median(beside / alone for alone, beside, _ in figures)
    print(f"{'median ratio':<20s}{ratio:.3f}")
