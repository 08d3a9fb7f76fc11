"""What a waiting request loses to those that pass it, and what these gain.

A request of 140 sequences runs, and one of 250 waits for slots, of which 116 of 256 are free. Small
requests come every few steps. Each round is run as it is, with strict order of arrival, and without
small requests. In half of the rounds the running request stops at a quarter of its `max_tokens`:
then the one that waits has to wait for those that passed it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field, replace

from benchmarks.common import add_numbers, random_prompt
from tpengine.bench.harness import report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.sampling_params import SamplingParams

_SLOTS, _RUNNING, _WAITING = 256, 140, 250
_ORDERS = ("passing", "strict", "alone")


@dataclass
class Round:
    """From arrival to the first step, in seconds, and for the waiting request in steps too."""

    first_s: float = 0.0
    first_steps: int = 0
    small_s: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    EngineArgs.add_cli_args(parser)
    add_numbers(
        parser,
        rounds=(2, "of each kind"),
        holder_tokens=(120, "max_tokens of the request that runs"),
        first_tokens=(40, "max_tokens of the request that waits"),
        every=(1, "steps between two small requests"),
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    settings = replace(EngineArgs.from_cli_args(args), max_num_seqs=_SLOTS, disable_log_stats=True)
    with LLMEngine.from_engine_args(settings) as engine:
        print(report_head(None, {"work": f"{_RUNNING} + {_WAITING} sequences of {args.model}"}))
        passing = engine._scheduler._queues.passing
        choose = passing.choose
        for stops_early in (False, True):
            rounds: dict[str, list[Round]] = {order: [] for order in _ORDERS}
            for number in range(args.rounds):
                for order in _ORDERS if number % 2 == 0 else _ORDERS[::-1]:
                    passing.choose = (  # type: ignore[method-assign]
                        choose if order == "passing" else lambda *_: None
                    )
                    rounds[order].append(_play(engine, args, order, stops_early))
            print("the running request stops early" if stops_early else "it runs to its end")
            for order in _ORDERS:
                print(f"  {order:8} {_line(rounds[order])}")
    return 0


def _play(engine: LLMEngine, args: argparse.Namespace, order: str, stops_early: bool) -> Round:
    rng, prompt = random.Random(1), random_prompt(engine, 16, 0)

    def add(name: str, count: int, max_tokens: int) -> None:
        params = SamplingParams(n=count, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, None, params, prompt_token_ids=prompt)

    def waits(name: str) -> bool:
        request = engine._scheduler.get_request(name)
        return request is not None and request.metrics.first_scheduled_time is None

    add("holder", _RUNNING, args.holder_tokens)
    engine.step()
    add("first", _WAITING, args.first_tokens)
    result, number = Round(), 0
    while engine.has_unfinished_requests():
        number += 1
        if stops_early and number == args.holder_tokens // 4:
            engine.abort_request("holder")
        is_due = number < args.holder_tokens and number % args.every == 0
        if is_due and order != "alone":
            add(f"small{number}", 1, rng.choice((2, 8, 32)))
        outputs = engine.step()
        if waits("first"):
            result.first_steps = number
        for output in outputs:
            moments = output.metrics
            if not output.finished or moments is None or moments.first_scheduled_time is None:
                continue
            waited_s = moments.first_scheduled_time - moments.arrival_time
            if output.request_id == "first":
                result.first_s = waited_s
            elif output.request_id != "holder":
                result.small_s.append(waited_s)
    return result


def _line(rounds: list[Round]) -> str:
    first = statistics.median(one.first_s for one in rounds)
    steps = statistics.median(one.first_steps for one in rounds)
    small = sorted(wait for one in rounds for wait in one.small_s) or [0.0]
    return (
        f"the waiting request starts after {steps} steps, {first:.2f} s; small ones after p50 "
        f"{1e3 * statistics.median(small):.1f} ms, most {1e3 * small[-1]:.1f} ms"
    )
