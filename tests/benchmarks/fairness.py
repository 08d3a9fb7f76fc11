"""What one client loses when another floods the engine, with and without `--fairness owner`.

B asks for half of what the engine can do, at random moments. A sends long prompts: in the first
run the other half, in the second all at once, so that they wait. The goals for B in the second run:
time to first token, p50 and p99, at most twice that of the first run, throughput at least 0.9 of
it. Both runs are repeated without fairness.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

from benchmarks.common import add_engine_arguments, add_numbers, dummy_model, random_prompt
from tpengine.async_engine.admission import QueueLimits
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.bench.harness import report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import GenerateRequest
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
    """What one client got; times in seconds.

    Attributes:
        whole_s: from arrival to end.
        tokens: moments, each with the number of tokens that came then.
        tokens_per_s: while it sent requests, without the first quarter of this time, in which the
            first of them run.
    """

    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    num_late: int = 0
    tokens: list[tuple[float, int]] = field(default_factory=list)
    tokens_per_s: float = 0.0

    def first(self, quantile: float) -> float:
        """The time to the first token at place `quantile * count`, rounded down, from 0, in
        ascending order; requests without a token count as infinite. `load.percentiles` instead
        interpolates, which it cannot do between infinite times."""
        times = sorted(self.first_token_s) + self.num_late * [math.inf]
        return times[min(len(times) - 1, int(quantile * len(times)))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_engine_arguments(parser)
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


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    a = Client(Owner("A", "A"), args.long_tokens, args.long_outputs)
    b = Client(Owner("B", "B"), args.tokens, args.outputs)
    longest = args.long_tokens + args.long_outputs
    costs: list[float] = []
    for fairness in ("owner", "none"):
        with dummy_model(args, max(2048, longest), fairness=fairness) as settings:
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
) -> tuple[Service, Service]:
    """What B gets while A asks for half, and while A floods the engine.

    Args:
        costs: of a request of A and of B; see `_costs_s`.
    """
    name = engine.llm_engine._config.scheduler.fairness
    found = []
    for is_flood in (False, True):
        async with contextlib.AsyncExitStack() as stack:
            if is_flood:
                await stack.enter_async_context(_flooding(engine, a, args.flood))
            else:
                await stack.enter_async_context(_offering(engine, a, 2 * costs[0]))
            service = await _serve(engine, b, 2 * costs[1], args.seconds, patience_s)
        kind = f"{args.flood} waiting prompts" if is_flood else "half of the load"
        print(f"fairness {name}, A {kind}: {_line(service)}", flush=True)
        found.append(service)
    return found[0], found[1]


async def _costs_s(engine: AsyncLLMEngine, clients: tuple[Client, ...], count: int) -> list[float]:
    """Seconds of the whole engine that a request of each client takes when many are served; the
    better of two measurements."""
    found = []
    for client in clients:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            asking = (_ask(engine, client, Service()) for _ in range(count))
            await asyncio.gather(*asking)
            times.append((time.perf_counter() - start) / count)
        found.append(min(times))
        rate = 1 / found[-1]
        print(f"{client.owner.name} alone: {rate:.2f} requests of {client.num_prompt} tokens a s")
    return found


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
        service.whole_s.append(time.perf_counter() - start)
    except DeadlineExceededError:
        service.num_late += not has_begun


async def _serve(
    engine: AsyncLLMEngine, client: Client, pause_s: float, seconds: float, patience_s: float
) -> Service:
    """Sends requests at random moments, with this mean pause, and reads all answers. It takes more
    seconds if fewer than `_LEAST_REQUESTS` are due in these."""
    rng, service = random.Random(0), Service()
    arrivals = list(
        itertools.accumulate(rng.expovariate(1 / pause_s) for _ in range(_LEAST_REQUESTS))
    )
    seconds = max(seconds, arrivals[-1])
    while (due := arrivals[-1] + rng.expovariate(1 / pause_s)) < seconds:
        arrivals.append(due)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due in arrivals:
            await asyncio.sleep(start + due - time.perf_counter())
            group.create_task(_ask(engine, client, service, patience_s))
    begin, end = start + seconds / 4, start + seconds
    num_tokens = sum(count for moment, count in service.tokens if begin <= moment < end)
    service.tokens_per_s = num_tokens / (end - begin)
    return service


@contextlib.asynccontextmanager
async def _offering(engine: AsyncLLMEngine, client: Client, pause_s: float) -> AsyncIterator[None]:
    """Requests at random moments, for as long as the context is open."""
    rng, tasks = random.Random(1), []

    async def send() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / pause_s))
            tasks.append(asyncio.create_task(_ask(engine, client, Service())))

    tasks.append(asyncio.create_task(send()))
    try:
        yield
    finally:
        await _cancel(tasks)


@contextlib.asynccontextmanager
async def _flooding(engine: AsyncLLMEngine, client: Client, count: int) -> AsyncIterator[None]:
    """So many requests wait, or run, for as long as the context is open."""
    service = Service()
    tasks = [asyncio.create_task(_ask(engine, client, service)) for _ in range(count)]
    try:
        while engine.stats().queues.num_waiting < count // 2 and not service.tokens:
            await asyncio.sleep(0.1)
        yield
        assert sum(not task.done() for task in tasks) > 8, "the flood ended: make it larger"
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _line(service: Service) -> str:
    late = f", {service.num_late} never" if service.num_late else ""
    num_requests = len(service.first_token_s) + service.num_late
    return (
        f"B's {num_requests} requests got their first token after p50 {service.first(0.5):.2f} s, "
        f"p99 {service.first(0.99):.2f} s{late}; {service.tokens_per_s:.1f} output tokens/s; a "
        f"request took {statistics.median(service.whole_s or [math.inf]):.2f} s"
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
