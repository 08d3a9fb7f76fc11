"""What one client loses when another floods the engine, with and without `--fairness owner`.

B asks for half of what the engine can do, at random moments. A sends long prompts: in the first
run the other half, in the second all at once, so that they wait. The goals for B in the second run:
time to first token, p50 and p99, at most twice that of the first run, throughput at least 0.9 of
it. Both runs are repeated without fairness.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.common import add_numbers, random_prompt
from tpengine.async_engine.admission import QueueLimits
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.bench.harness import ModelOptions, model_args, report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import GenerateRequest
from tpengine.engine_args import EngineArgs
from tpengine.errors import DeadlineExceededError
from tpengine.inputs import Owner
from tpengine.sampling_params import RequestOutputKind, SamplingParams

MOST_LATER, LEAST_TOKENS = 2.0, 0.9
_LEAST_REQUESTS = 8
"""B sends so many, however long this takes."""
_SEEDS = itertools.count()
"""Of prompts: none is found in the prefix cache."""
_LIMITS = QueueLimits(max_requests=1 << 20, max_tokens=1 << 40)


@dataclass(frozen=True)
class Client:
    """Requests of one kind."""

    owner: Owner
    num_prompt: int
    num_output: int


@dataclass
class Service:
    """What one client got.

    Attributes:
        first_token_s: of each request, from arrival on; infinite: it was given up before.
        tokens: moments, each with the number of tokens that came then.
        tokens_per_s: while it sent requests, without the first quarter of this time, in which the
            first of them run.
    """

    first_token_s: list[float] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    tokens_per_s: float = 0.0

    def first(self, quantile: float) -> float:
        """The time to the first token at place `quantile * count`, rounded down, from 0, in
        ascending order. `load.percentiles` instead interpolates, which it cannot do between
        infinite times."""
        return sorted(self.first_token_s)[int(quantile * len(self.first_token_s))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_numbers(
        parser,
        flood=(1000, "prompts that A sends at once"),
        long_tokens=(2000, "of each prompt of A"),
        long_outputs=(16, "output tokens of each request of A"),
        tokens=(256, "of each prompt of B"),
        outputs=(32, "output tokens of each request of B"),
        seconds=(60.0, "in which B sends requests"),
        patience=(30.0, "seconds after which B gives a request up, without fairness"),
        calibration=(24, "requests of each client that measure what the engine can do"),
    )
    ModelOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    a = Client(Owner("A", "A"), args.long_tokens, args.long_outputs)
    b = Client(Owner("B", "B"), args.tokens, args.outputs)
    costs: list[float] = []
    for fairness in ("owner", "none"):
        with model_args(args) as settings:
            settings = replace(settings, fairness=fairness, disable_log_stats=True)
            build = partial(LLMEngine.from_engine_args, settings)
            engine = AsyncLLMEngine(build, _LIMITS, log_requests=False)
            try:
                if fairness == "owner":
                    print(report_head(settings), flush=True)
                    costs = asyncio.run(_costs_s(engine, (a, b), args.calibration))
                    print(_verdict(*asyncio.run(_measure(engine, args, a, b, costs, math.inf))))
                else:
                    asyncio.run(_measure(engine, args, a, b, costs, args.patience))
            finally:
                asyncio.run(engine.shutdown())
    return 0


async def _measure(
    engine: AsyncLLMEngine,
    args: argparse.Namespace,
    a: Client,
    b: Client,
    costs: list[float],
    patience_s: float,
) -> list[Service]:
    """What B gets while A asks for half, and while A floods the engine.

    Args:
        costs: of a request of A and of B; see `_costs_s`.
    """
    fairness = engine.llm_engine._config.scheduler.fairness
    services = []
    for beside in ("half of the load", f"{args.flood} waiting prompts"):
        is_flood, of_a = bool(services), Service()
        work = _flood(engine, a, args.flood, of_a) if is_flood else _serve(engine, a, 2 * costs[0])
        task = asyncio.create_task(work)
        while is_flood and not of_a.tokens and engine.stats().queues.num_waiting < args.flood // 2:
            await asyncio.sleep(0.1)
        service = await _serve(engine, b, 2 * costs[1], args.seconds, patience_s)
        assert not task.done(), "A has ended: make the flood larger"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print(f"fairness {fairness}, A {beside}: {_line(service)}", flush=True)
        services.append(service)
    return services


async def _costs_s(engine: AsyncLLMEngine, clients: tuple[Client, ...], count: int) -> list[float]:
    """Seconds of the whole engine that a request of each client takes when many are served; the
    better of two measurements."""
    costs = []
    for client in clients:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            await _flood(engine, client, count, Service())
            times.append((time.perf_counter() - start) / count)
        costs.append(min(times))
        rate = 1 / costs[-1]
        print(f"{client.owner.name} alone: {rate:.2f} requests of {client.num_prompt} tokens a s")
    return costs


async def _ask(
    engine: AsyncLLMEngine,
    client: Client,
    service: Service,
    patience_s: float = math.inf,
) -> None:
    prompt = random_prompt(engine.llm_engine, client.num_prompt, next(_SEEDS))
    start = time.perf_counter()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=client.num_output,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    deadline = None if math.isinf(patience_s) else time.monotonic() + patience_s
    request = GenerateRequest(
        prompt_token_ids=prompt, params=params, owner=client.owner, deadline=deadline
    )
    has_begun = False
    try:
        async with engine.open(request) as mailbox:
            while not mailbox.closed:
                output = await mailbox.take()
                if not has_begun:
                    service.first_token_s.append(time.perf_counter() - start)
                has_begun = True
                service.tokens.append((time.perf_counter(), len(output.outputs[0].token_ids)))
                if output.finished:
                    break
    except DeadlineExceededError:
        if not has_begun:
            service.first_token_s.append(math.inf)


async def _serve(
    engine: AsyncLLMEngine,
    client: Client,
    pause_s: float,
    seconds: float = math.inf,
    patience_s: float = math.inf,
) -> Service:
    """Sends requests at random moments, with this mean pause, and reads all answers. It takes more
    seconds if fewer than `_LEAST_REQUESTS` are due in these."""
    rng, service, num_sent = random.Random(client.owner.name), Service(), 0
    start = due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while (
            following := due + rng.expovariate(1 / pause_s)
        ) < start + seconds or num_sent < _LEAST_REQUESTS:
            due, num_sent = following, num_sent + 1
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(_ask(engine, client, service, patience_s))
    end = max(start + seconds, due)
    begin = start + (end - start) / 4
    num_tokens = sum(count for moment, count in service.tokens if begin <= moment < end)
    service.tokens_per_s = num_tokens / (end - begin)
    return service


async def _flood(engine: AsyncLLMEngine, client: Client, count: int, service: Service) -> None:
    """Sends so many requests at once, and reads all answers."""
    await asyncio.gather(*(_ask(engine, client, service) for _ in range(count)))


def _line(service: Service) -> str:
    return (
        f"B's {len(service.first_token_s)} requests got their first token after p50 "
        f"{service.first(0.5):.2f} s, p99 {service.first(0.99):.2f} s, "
        f"{service.first_token_s.count(math.inf)} never; {service.tokens_per_s:.1f} output tokens/s"
    )


def _verdict(half: Service, flood: Service) -> str:
    if not half.tokens_per_s:
        return "not measured: B got no token in the measured time of the first run; raise --seconds"
    later = [flood.first(quantile) / half.first(quantile) for quantile in (0.5, 0.99)]
    tokens = flood.tokens_per_s / half.tokens_per_s
    holds = max(later) <= MOST_LATER and tokens >= LEAST_TOKENS
    return (
        f"first token of B during the flood: {later[0]:.2f} x (p50) and {later[1]:.2f} x (p99), "
        f"throughput {tokens:.2f} ({'holds' if holds else 'MISSES THE GOAL'})"
    )
