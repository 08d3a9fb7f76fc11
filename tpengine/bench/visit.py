"""A first visit to a GPU in one command and under ten minutes: correctness before speed, every part
with a limit of its own, a failure never keeping the next from its turn. Full output goes to files;
a summary comes last. To be run in a checkout, whose tests it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

_TAIL_LINES = 12
_LEAST_S = 10.0
_END_S = 5.0


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Attributes:
        command: its words; a first word that is no program here skips the part.
        limit_s: after which it is ended.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Result:
    """How a part ended, in words, and after which time; its output's last lines."""

    part: Part
    outcome: str
    seconds: float
    tail: str


def visit_parts(out: Path) -> list[Part]:
    """In the order of their worth, should the time run out."""
    bench = f"{sys.executable} -m tpengine.cli bench"
    tests = f"{sys.executable} -m pytest -q -m gpu -p no:cacheprovider --tb=short"
    latency = (
        f"{bench} latency --device cuda --dtype bfloat16 --shape llama-3-8b --input-len 1000 "
        "--output-len 64"
    )
    three_cases = "1-64-bfloat16 or graph"
    return [
        _part("kernels are right", 120, f"{tests} tests/ops"),
        _part("engine is right", 120, f"{tests} tests/layers tests/worker"),
        _part(
            "decode kernel", 60, f"{bench} kernels --only decode --plot", str(out / "decode.png")
        ),
        _part("latency, timeline", 90, f"{latency} --batch-sizes 1,64 --trace", str(out / "trace")),
        _part("other kernels", 60, f"{bench} kernels --only prefill linear elementwise blocks"),
        _part("latency without graphs", 40, f"{latency} --batch-sizes 1 --enforce-eager"),
        _part(
            "memory check",
            40,
            f"compute-sanitizer --error-exitcode 9 {tests} tests/ops/test_cuda.py -k",
            three_cases,
        ),
        _part(
            "hardware counters",
            40,
            f"ncu --set detailed -k regex:decode -s 4 -c 3 {bench} kernels --only decode",
        ),
        _part(
            "throughput",
            60,
            f"{bench} throughput --shape llama-3-8b --dtype bfloat16 --num-requests 256 --runs 1",
        ),
    ]


def _part(name: str, limit_s: float, words: str, *last: str) -> Part:
    """Args: words and last: the command, `last` with whatever spaces they have."""
    return Part(name, (*words.split(), *last), limit_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument("--out", default="build/gpu-visit", help="folder (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=560.0, help="of all parts together (default: 560)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs all parts; 0 if none failed."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = run_parts(visit_parts(out), out, args.budget_s)
    print(summary(results))
    return 0 if all(one.outcome in ("passed", "not here") for one in results) else 1


def run_parts(parts: Sequence[Part], out: Path, budget_s: float) -> list[Result]:
    """Runs parts until the budget is spent; each part's output is in a file of its name."""
    end = time.monotonic() + budget_s
    results = []
    for part in tqdm(parts, desc="visit", unit="part"):
        left = end - time.monotonic()
        if shutil.which(part.command[0]) is None:
            results.append(Result(part, "not here", 0.0, f"{part.command[0]} is not installed"))
        elif left < min(_LEAST_S, part.limit_s):
            results.append(Result(part, "no time left", 0.0, ""))
        else:
            results.append(_run_part(part, out, min(part.limit_s, left)))
    return results


def _run_part(part: Part, out: Path, limit_s: float) -> Result:
    path = out / f"{part.name.replace(' ', '-')}.txt"
    start = time.monotonic()
    with path.open("w") as file:
        process = subprocess.Popen(
            part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_S)
            outcome = f"ended after {limit_s:.0f} s"
    lines = path.read_text(errors="replace").replace("\r", "\n").splitlines()
    return Result(part, outcome, time.monotonic() - start, "\n".join(lines[-_TAIL_LINES:]))


def summary(results: Sequence[Result]) -> str:
    """The ends of all outputs, then a line for each part."""
    ends = [f"--- {one.part.name}\n{one.tail}" for one in results if one.tail]
    table = [f"{one.part.name:<24s} {one.seconds:7.1f} s  {one.outcome}" for one in results]
    return "\n".join([*ends, "---", *table])
