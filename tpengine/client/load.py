"""Open-loop load: each request is sent at its planned time, however slow the answers are.

A closed loop (a fixed number at a time) slows down with the server, so it hides the waiting that
independent users see. `tpengine client load` and `tpengine bench serve` use this module.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tpengine.client.client_messages import Sampling
from tpengine.client.generation_client import GenerationClient
from tpengine.errors import TPEngineError

PERCENTILES = (50, 90, 99)
COMPLETE = "complete"
"""End of a request that got its whole output; any other end is the name of an error."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan.

    Attributes:
        start_s: when it is due, in seconds from the start of the run.
        prompt: text, or token ids.
    """

    start_s: float
    prompt: str | Sequence[int]
    params: Sampling


@dataclass(slots=True)
class Outcome:
    """The outcome of a request; times are in seconds.

    Attributes:
        end: `COMPLETE`, or the name of the error that it ended with.
        first_token_s: from its due time, not from sending, to its first token, so that a late load
            generator does not make the server look faster; None: no token came.
        token_gaps_s: time between messages with tokens, divided by the number of tokens of the
            later one; one entry per message.
        total_s: from its due time to its end.
        lateness_s: from its due time to sending.
    """

    end: str = ""
    first_token_s: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    total_s: float = 0.0
    lateness_s: float = 0.0

    @property
    def mean_gap_s(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return 0.0
        return (self.total_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Objective:
    """Bounds that both hold for a good request, in seconds."""

    first_token_s: float
    token_gap_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request was complete and within both bounds."""
        return (
            outcome.end == COMPLETE
            and outcome.first_token_s is not None
            and outcome.first_token_s <= self.first_token_s
            and outcome.mean_gap_s <= self.token_gap_s
        )


@dataclass(frozen=True)
class LoadSummary:
    """Statistics of one run; times in seconds, by percentile.

    Attributes:
        elapsed_s: from the start to the last answer.
        ends: number of requests by their end.
        output_rate: output tokens per second.
        goodput: requests per second that met the objective.
        tokens_per_message: mean over all streams; 0 without messages.
    """

    elapsed_s: float
    ends: Counter[str]
    output_rate: float
    goodput: float
    first_token_s: dict[int, float]
    token_gap_s: dict[int, float]
    lateness_s: float
    tokens_per_message: float


def poisson_plan(
    rate: float, prompts: Sequence[tuple[str | Sequence[int], Sampling]], seed: int
) -> list[PlannedRequest]:
    """A plan whose arrivals are a Poisson process.

    Args:
        rate: requests per second; infinite: all at once.
        prompts: one entry per request, in order of arrival.
        seed: fixes the arrivals.
    """
    rng, now, plan = random.Random(seed), 0.0, []
    for prompt, params in prompts:
        plan.append(PlannedRequest(now, prompt, params))
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
    return plan


async def run_load(
    client: GenerationClient,
    plan: Sequence[PlannedRequest],
    timeout_s: float | None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Sends each request at its due time and reads each stream to its end.

    Args:
        timeout_s: deadline of each request; None: the client's own.
        on_end: called with each outcome.

    Returns:
        The outcomes in the plan's order, and the seconds of the whole run.
    """
    start = time.perf_counter()

    async def send(request: PlannedRequest) -> Outcome:
        outcome = await _send(client, request, start + request.start_s, timeout_s)
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(request)) for request in plan]
    return [task.result() for task in tasks], time.perf_counter() - start


async def _send(
    client: GenerationClient, request: PlannedRequest, due: float, timeout_s: float | None
) -> Outcome:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    outcome = Outcome(lateness_s=time.perf_counter() - due)
    last = due
    try:
        prompt, params = request.prompt, request.params
        async for output in client.stream(prompt, params, timeout_s=timeout_s, resume_window_s=0):
            num_new = sum(len(sequence.token_ids) for sequence in output.outputs)
            if not num_new:
                continue
            now = time.perf_counter()
            if outcome.first_token_s is None:
                outcome.first_token_s = now - due
            else:
                outcome.token_gaps_s.append((now - last) / num_new)
            outcome.num_output_tokens += num_new
            last = now
        outcome.end = COMPLETE
    except TPEngineError as error:
        outcome.end = type(error).__name__
    outcome.total_s = time.perf_counter() - due
    return outcome


def summarise(
    outcomes: Sequence[Outcome], elapsed_s: float, objective: Objective | None = None
) -> LoadSummary:
    """The statistics of a run; without an objective every complete request is good."""
    good = [outcome for outcome in outcomes if outcome.end == COMPLETE]
    if objective is not None:
        good = list(filter(objective.is_met, good))
    firsts = [outcome.first_token_s for outcome in outcomes if outcome.first_token_s is not None]
    gaps = [gap for outcome in outcomes for gap in outcome.token_gaps_s]
    num_tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    return LoadSummary(
        elapsed_s=elapsed_s,
        ends=Counter(outcome.end for outcome in outcomes),
        output_rate=num_tokens / elapsed_s,
        goodput=len(good) / elapsed_s,
        first_token_s=percentiles(firsts),
        token_gap_s=percentiles(gaps),
        lateness_s=max((outcome.lateness_s for outcome in outcomes), default=0.0),
        tokens_per_message=num_tokens / max(len(firsts) + len(gaps), 1),
    )


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """The 50th, 90th and 99th percentile; empty without values."""
    if not values:
        return {}
    if len(values) == 1:
        return dict.fromkeys(PERCENTILES, values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {percent: cuts[percent - 1] for percent in PERCENTILES}


def describe_load(summary: LoadSummary) -> str:
    """The statistics as text, one per line."""
    ends = ", ".join(f"{count} {end}" for end, count in summary.ends.most_common())
    return (
        f"requests            {ends}; {summary.elapsed_s:.2f} s\n"
        f"output tokens/s     {summary.output_rate:.1f}\n"
        f"goodput             {summary.goodput:.2f} requests/s\n"
        f"first token, ms     {_in_ms(summary.first_token_s)}\n"
        f"inter-token, ms     {_in_ms(summary.token_gap_s)}\n"
        f"tokens a message    {summary.tokens_per_message:.2f}\n"
        f"sent late by        at most {1000 * summary.lateness_s:.1f} ms"
    )


def _in_ms(values: Mapping[int, float]) -> str:
    return ", ".join(f"p{percent} {1000 * s:.1f}" for percent, s in values.items()) or "none"
