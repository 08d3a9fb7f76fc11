"""A first visit to a GPU in one command and under ten minutes: correctness before speed, every part
with a limit of its own, a failure never keeping the next from its turn. What each part has found is
printed when it is over; `all.txt`, written anew after each, holds all output. To be run in a
checkout, whose tests it runs.

The card's settings stay as they are: the profiler is told to leave the clocks alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tpengine.bench.visit_parts import Part, run_parts, table

_PASSED = " passed"
_UNDECIDED = r"::(?!.* (PASSED|SKIPPED|XFAIL))"
"""In pytest's output: tests that failed, and the one that was running when it was ended."""
_FIGURES = r"^(floor|batch +\d+  )"


def visit_parts(out: Path) -> list[Part]:
    """In the order of their worth, should the time run out."""
    python = f"{sys.executable} -u"
    bench = f"{python} -m tpengine.cli bench"
    latency = (
        f"{bench} latency --device cuda --dtype bfloat16 --shape llama-3-8b --input-len 1000 "
        "--output-len 64"
    )
    traced = f"{latency} --batch-sizes 1,64 --trace"
    return [
        _part(
            "library and card",
            60,
            f"{bench} kernels --device cuda --only decode --match",
            "1 x 1024",
        ),
        _tests("decode is right", 80, "tests/ops -k decode"),
        _tests("other kernels are right", 70, "tests/ops -k", "not decode"),
        _tests("engine is right", 110, "tests/layers tests/worker"),
        _part(
            "decode kernel",
            50,
            f"{bench} kernels --device cuda --only decode --plot",
            str(out / "decode.png"),
        ),
        _part("latency, timeline", 80, traced, str(out / "trace"), shown=_FIGURES),
        _tests("ranks are right", 50, "tests/distributed"),
        _part(
            "other kernels",
            50,
            f"{bench} kernels --device cuda --only prefill linear elementwise blocks",
        ),
        _part("latency, driver first", 40, f"{latency} --batch-sizes 1,64 --no-async-scheduling"),
        _part("latency without graphs", 40, f"{latency} --batch-sizes 1 --enforce-eager"),
        _part(
            "hardware counters",
            40,
            "ncu --clock-control none --set detailed -k regex:decode -s 4 -c 3 --kill yes "
            f"{bench} kernels --device cuda --only decode --match",
            "64 x 4096",
        ),
        _part(
            "throughput",
            60,
            f"{bench} throughput --device cuda --shape llama-3-8b --dtype bfloat16 "
            "--num-requests 256 --runs 1",
        ),
        _tests(
            "memory check",
            70,
            "tests/ops/test_cuda.py -k",
            "1-64-bfloat16 or graph",
            before="compute-sanitizer --error-exitcode 9",
        ),
    ]


def _tests(name: str, limit_s: float, words: str, *last: str, before: str = "") -> Part:
    """Tests marked `gpu`; a few failures are enough, as one may spoil the device for all that
    follow in its process. Each is named before it begins, and one that hangs shows its stack, which
    a thread of faulthandler's own writes."""
    pytest = (
        "-u -m pytest -v -m gpu -p no:cacheprovider --tb=short --maxfail=6 --disable-warnings "
        "-o faulthandler_timeout=30"
    )
    command = (*before.split(), sys.executable, *pytest.split(), *words.split(), *last)
    return Part(name, command, limit_s, _PASSED, _UNDECIDED)


def _part(name: str, limit_s: float, words: str, *last: str, shown: str | None = None) -> Part:
    """Args: words and last: the command, `last` with whatever spaces they have."""
    return Part(name, (*words.split(), *last), limit_s, shown=shown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument(
        "--out", default="build/gpu-visit", help="folder for its files (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=560.0,
        help="seconds that all parts may take together, with the end of the one that is in flight "
        "then (default: %(default)s, which leaves some of ten minutes for the start)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs all parts; 0 if none failed."""
    out = Path(args.out)
    results = run_parts(visit_parts(out), out, args.budget_s)
    print(f"---\n{table(results)}")
    return 0 if all(one.is_good for one in results) else 1
