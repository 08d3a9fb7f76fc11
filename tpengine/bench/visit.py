"""A visit to a GPU in one command and under ten minutes, on a machine that may be there only once:
what matters most comes first, every part has a limit of its own, and a failure does not keep the
next from its turn. Times are shown next to what was predicted for a card of this copy bandwidth
(`predictions`). To be run in a checkout, whose tests it runs, with the kernels built before.

The card's settings stay as they are: the profiler is told to leave the clocks alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tpengine.bench.visit_parts import Part, run_parts, table

_BUDGET_S = 570.0
_PASSED = " passed"
_UNDECIDED = r"::(?!.* (PASSED|SKIPPED|XFAIL))"
"""In pytest's output: tests that failed, and the one that was running when it was ended."""
_PREDICTED = "predicted "
_FIGURES = rf"{_PREDICTED}|^(floor|batch +\d+  )"
_COUNTERS = "Duration|Throughput|Registers Per|Achieved Occupancy|No Eligible"
_OPS = "tests/ops/test_cuda.py"
_SMOKE = (
    "(test_decode and 4-128) or plan_agrees or (gather and bfloat16 and 128-64-True) or "
    "blocks or (fused and bfloat16-4096) or (sampling and bfloat16-32000)"
)
_ALONE = "ledger or growth or larger_than"
"""Tests that measure the card's free memory, which others would change."""
_ENGINE = "tests/worker -k"
_BENCH = "@ -u -m tpengine.cli bench"
_KERNELS = f"{_BENCH} kernels --device cuda --only"
_MODEL = "--device cuda --dtype bfloat16 --shape llama-3-8b"
_LATENCY = f"{_BENCH} latency {_MODEL} --input-len 1000 --output-len 64 --max-num-seqs 64"
_SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"


def visit_parts(out: Path, scratch: Path) -> list[Part]:
    """In the order of their worth; limits for the default budget.

    Args:
        out: where the files lie that are kept.
        scratch: for others.
    """
    checks = str(scratch / "kernel_checks")
    source = "tests/ops/cuda_program/kernel_checks.cu"
    return [
        _part(1, "card", 35, f"{_KERNELS} bus", proof="ceilings", shown="^(card|clocks|ceil)"),
        _tests(2, "one case of each kernel", 30, f"{_OPS} -k", _SMOKE),
        _tests(3, "decode, 16 bits", 115, f"{_OPS} -k", "test_decode and float16"),
        _tests(3, "decode, 32 and 8 bits", 115, f"{_OPS} -k", "test_decode and not float16"),
        _tests(3, "other kernels", 115, f"{_OPS} -k", "not test_decode"),
        _tests(3, "engine, chunks", 115, _ENGINE, "test_greedy and chunks"),
        _tests(3, "engine, whole prompts", 115, _ENGINE, "test_greedy and whole"),
        _tests(3, "engine, preemption", 115, _ENGINE, "test_greedy and (swap or recompute)"),
        _tests(3, "engine, others", 115, _ENGINE, f"not (test_greedy or {_ALONE})"),
        _tests(3, "libraries and ranks", 115, "tests/layers tests/distributed"),
        _part(3, "compiler", 115, f"nvcc -std=c++17 -O2 -arch=native -o {checks} {source}"),
        _part(4, "decode kernel", 45, f"{_KERNELS} decode --plot", str(out / "decode.png")),
        _part(5, "other kernels' times", 40, f"{_KERNELS} linear elementwise blocks prefill"),
        _part(6, "latency", 70, f"{_LATENCY} --batch-sizes 1,64 --trace", str(out / "trace")),
        _part(7, "latency, eager", 35, f"{_LATENCY} --batch-sizes 1,64 --enforce-eager"),
        _part(8, "latency, not ahead", 35, f"{_LATENCY} --batch-sizes 1,64 --no-async-scheduling"),
        _part(9, "throughput", 55, f"{_BENCH} throughput {_MODEL} --num-requests 1000 --runs 1"),
        _tests(10, "memory accounts", 25, _ENGINE, _ALONE),
        _part(
            11,
            "hardware counters",
            35,
            "ncu --clock-control none --set detailed -k regex:decode -s 4 -c 3 --kill yes "
            f"{_KERNELS} decode --match",
            "64 x 4096",
            proof="decode",
            shown=_COUNTERS,
        ),
        _part(12, "memcheck", 30, f"{_SANITIZER} memcheck {checks}", proof=" 0 wrong"),
        _part(12, "racecheck", 30, f"{_SANITIZER} racecheck {checks}", proof=" 0 wrong"),
    ]


def _tests(stage: int, name: str, limit_s: float, words: str, *last: str) -> Part:
    """Tests marked `gpu`; a few failures are enough, as one may spoil the device for all that
    follow in its process. Each is named before it begins, and one that hangs shows its stack, which
    a thread of faulthandler's own writes."""
    pytest = (
        "@ -u -m pytest -v -m gpu -p no:cacheprovider --tb=short --maxfail=6 --disable-warnings "
        "-o faulthandler_timeout=30"
    )
    return _part(stage, name, limit_s, f"{pytest} {words}", *last, proof=_PASSED, shown=_UNDECIDED)


def _part(
    stage: int,
    name: str,
    limit_s: float,
    words: str,
    *last: str,
    proof: str = "",
    shown: str = _FIGURES,
) -> Part:
    """Args: words and last: the command, `@` for this Python, `last` with whatever spaces they
    have."""
    command = [sys.executable if word == "@" else word for word in words.split()]
    return Part(stage, name, limit_s, (*command, *last), proof, shown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument(
        "--out", default="build/gpu-visit", help="folder for its files (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_BUDGET_S,
        help="seconds that all parts may take together, with the end of the one that is in flight "
        "then; each part's limit grows and shrinks with it (default: %(default)s, which leaves "
        "some of ten minutes for the start)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs all parts; 0 if none failed."""
    out = Path(args.out)
    with tempfile.TemporaryDirectory() as scratch:
        scale = args.budget_s / _BUDGET_S
        parts = [
            replace(part, limit_s=scale * part.limit_s) for part in visit_parts(out, Path(scratch))
        ]
        results = run_parts(parts, out, args.budget_s)
    timed = [one for one in results if one.part.shown == _FIGURES]
    predicted = [line for one in timed for line in one.lines if _PREDICTED in line]
    print("\n".join(["--- measured and predicted", *predicted, "--- parts", table(results)]))
    return 0 if all(one.is_good for one in results) else 1
