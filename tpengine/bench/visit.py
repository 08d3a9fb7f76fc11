"""All checks and measurements that need a GPU, in one command and less than ten minutes.

The machine may be lent only once: the most important parts come first, every part has its own time
limit, and the next part runs even if one fails. Times are printed next to their predictions. The
command runs the tests of its checkout, with kernels that are built. It does not change the card's
settings: the profiler is told not to change the clocks.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tpengine.bench.visit_parts import Part, run_parts, table

_BUDGET_S = 570.0
_PASSED = " passed"
_UNDECIDED = r"::(?!.* (PASSED|SKIPPED|XFAIL))"
"""In pytest's output: failed tests, and the test that ran when pytest was ended."""
_PREDICTED = "predicted "
_FIGURES = rf"{_PREDICTED}|^(floor|batch +\d+  )"
_COUNTERS = "Duration|Throughput|Registers Per|Achieved Occupancy|No Eligible"
_SMOKE = (
    "(test_decode and 4-128) or plan_agrees or (gather and bfloat16 and 128-64-True) or "
    "blocks or (fused and bfloat16-4096) or (sampling and bfloat16-32000)"
)
_ALONE = "ledger or growth or larger_than"
"""Tests that measure the card's free memory, so that no other part may run."""
_BENCH = "{python} -u -m tpengine.cli bench"
_KERNELS = f"{_BENCH} kernels --device cuda --only"
_MODEL = "--device cuda --dtype bfloat16 --shape llama-3-8b"
_LATENCY = (
    f"{_BENCH} latency {_MODEL} --input-len 1000 --output-len 64 --max-num-seqs 64 "
    "--batch-sizes 1,64"
)
_SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"


_PYTEST = (
    "{python} -u -m pytest -v -m gpu -p no:cacheprovider --tb=short --maxfail=6 "
    "--disable-warnings -o faulthandler_timeout=30"
)
"""A few failures are enough, because one can spoil the device for the rest of its process. A test
that hangs is shown by its stack, which a thread of faulthandler writes."""
_OPS = f"{_PYTEST} tests/ops/test_cuda.py -k"
_ENGINE = f"{_PYTEST} tests/worker -k"
_CHECKS = "{scratch}/kernel_checks"
_NVCC = f"nvcc -std=c++17 -O2 -arch=native -o {_CHECKS} tests/ops/cuda_program/kernel_checks.cu"
_NCU = (
    "ncu --clock-control none --set detailed -k regex:decode -s 4 -c 3 --kill yes "
    f"{_KERNELS} decode --match '64 x 4096'"
)
_TESTS = _PASSED, _UNDECIDED
_TIMES = "", _FIGURES

_PARTS: tuple[tuple[int, str, float, str, tuple[str, str]], ...] = (
    (1, "card", 35, f"{_KERNELS} bus", ("ceilings", "^(card|clocks|ceil)")),
    (2, "one case of each kernel", 30, f"{_OPS} '{_SMOKE}'", _TESTS),
    (3, "decode, 16 bits", 115, f"{_OPS} 'test_decode and float16'", _TESTS),
    (3, "decode, 32 and 8 bits", 115, f"{_OPS} 'test_decode and not float16'", _TESTS),
    (3, "other kernels", 115, f"{_OPS} 'not test_decode'", _TESTS),
    (3, "engine, chunks", 115, f"{_ENGINE} 'test_greedy and chunks'", _TESTS),
    (3, "engine, whole prompts", 115, f"{_ENGINE} 'test_greedy and whole'", _TESTS),
    (3, "engine, preemption", 115, f"{_ENGINE} 'test_greedy and (swap or recompute)'", _TESTS),
    (3, "engine, others", 115, f"{_ENGINE} 'not (test_greedy or {_ALONE})'", _TESTS),
    (3, "libraries and ranks", 115, f"{_PYTEST} tests/layers tests/distributed", _TESTS),
    (3, "compiler", 115, _NVCC, _TIMES),
    (4, "decode kernel", 45, f"{_KERNELS} decode --plot {{out}}/decode.png", _TIMES),
    (5, "other kernels' times", 40, f"{_KERNELS} linear elementwise blocks prefill", _TIMES),
    (6, "latency", 70, f"{_LATENCY} --trace {{out}}/trace", _TIMES),
    (7, "latency, eager", 35, f"{_LATENCY} --enforce-eager", _TIMES),
    (8, "latency, not ahead", 35, f"{_LATENCY} --no-async-scheduling", _TIMES),
    (9, "throughput", 55, f"{_BENCH} throughput {_MODEL} --num-requests 1000 --runs 1", _TIMES),
    (10, "memory accounts", 25, f"{_ENGINE} '{_ALONE}'", _TESTS),
    (11, "hardware counters", 35, _NCU, ("decode", _COUNTERS)),
    (12, "memcheck", 30, f"{_SANITIZER} memcheck {_CHECKS}", (" 0 wrong", _FIGURES)),
    (12, "racecheck", 30, f"{_SANITIZER} racecheck {_CHECKS}", (" 0 wrong", _FIGURES)),
)
"""In the order of their importance: stage, name, limit in seconds for the default budget, command,
and the proof and the shown lines of `Part`."""


def visit_parts(out: Path, scratch: Path) -> list[Part]:
    """The parts of a visit.

    Args:
        out: folder of files to keep.
        scratch: folder of temporary files.
    """
    names = {"python": sys.executable, "out": str(out), "scratch": str(scratch)}
    parts = []
    for stage, name, limit_s, command, output in _PARTS:
        words = tuple(word.format(**names) for word in shlex.split(command))
        parts.append(Part(stage, name, limit_s, words, *output))
    return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument(
        "--out", default="build/gpu-visit", help="folder for its files (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_BUDGET_S,
        help="seconds for all parts together, including the end of the last one; each part's limit "
        "is scaled with it (default: %(default)s, which leaves some of ten minutes for the start)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs all parts; returns 0 if no part failed."""
    out = Path(args.out)
    with tempfile.TemporaryDirectory() as scratch:
        scale = args.budget_s / _BUDGET_S
        parts = visit_parts(out, Path(scratch))
        parts = [replace(part, limit_s=scale * part.limit_s) for part in parts]
        results = run_parts(parts, out, args.budget_s)
    timed = [one for one in results if one.part.shown == _FIGURES]
    predicted = [line for one in timed for line in one.lines if _PREDICTED in line]
    print("\n".join(["--- measured and predicted", *predicted, "--- parts", table(results)]))
    return 0 if all(one.is_good for one in results) else 1
