"""All checks and measurements that need a GPU, in one command and less than ten minutes.

The machine may be lent only once: the most important parts come first, every part has its own time
limit, and the next part runs even if one fails. Times are printed next to their predictions. The
command runs the tests of its checkout, with kernels that are built. It does not change the card's
settings: the profiler is told not to change the clocks.

The runner, `run_parts`, starts each part by `timeout` of coreutils, which ends the part and its
children even if the runner itself is killed, and keeps what a part printed until then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpengine.options import Options, option

_TAIL_LINES = 12
_MOST_SHOWN = 48
_MOST_COLUMNS = 240
LEAST_S = 10.0
TELL_S = 6.0
"""Time for a part that exceeds its limit to print what it found."""
_LOOK_S = 0.2
_SAVE_S = 2.0
"""Between two writes of `all.txt`."""
_HALF_BYTES = 256 << 10
"""Kept of a part's output, at each end: a lent machine returns at most 16 MiB."""
_TIMED_OUT = (124, -signal.SIGKILL)
"""What `timeout` ends with: after SIGINT was enough, and after SIGKILL, which ends itself too."""


@dataclass(frozen=True)
class Part:
    """One program of a run.

    Attributes:
        stage: parts of one stage run at the same time; the next stage starts after all of them.
        limit_s: seconds until the part is ended; up to twice as many if earlier stages left time.
        command: the program and its arguments; the part is skipped if the program does not exist.
        proof: text that the output must contain, so that a run of only skipped tests fails.
        shown: pattern of the lines that are printed in addition to the last ones.
    """

    stage: int
    name: str
    limit_s: float
    command: tuple[str, ...]
    proof: str = ""
    shown: str | None = None


@dataclass(frozen=True)
class Result:
    """How and when a part ended; its whole output, and the lines of it to print."""

    part: Part
    outcome: str
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the part passed, or its program does not exist here."""
        return self.outcome in ("passed", "not here")

    def __str__(self) -> str:
        return f"{self.part.name:<32s} {self.seconds:7.1f} s  {self.outcome}"


class _Running:
    """A part that runs."""

    def __init__(self, part: Part, limit_s: float, folder: Path) -> None:
        self.part = part
        self._start = time.monotonic()
        self._path = folder / f"{part.name.replace(' ', '-')}.txt"
        timeout = ("timeout", "--signal=INT", f"--kill-after={TELL_S}", str(limit_s))
        with self._path.open("w") as file:
            self._process = subprocess.Popen(
                [*timeout, *part.command],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended, by itself or by its time limit."""
        return self._process.poll() is not None

    def result(self) -> Result:
        """The result with the output until now."""
        text, seconds = _text(self._path), time.monotonic() - self._start
        code = self._process.poll()
        if code is None:
            outcome = "was running"
        elif code in _TIMED_OUT:
            outcome = f"ended after {seconds:.0f} s"
        elif code != 0:
            outcome = f"failed with {code}"
        else:
            outcome = "passed" if self.part.proof in text else "failed: nothing ran"
        return Result(self.part, outcome, seconds, _lines_of(self.part, text), text)

    def end(self) -> None:
        """Ends all processes of the part, its children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TELL_S)


def run_parts(parts: Sequence[Part], out: Path, budget_s: float) -> list[Result]:
    """Runs parts until the budget is spent. Prints the result of each part when it ends; `all.txt`
    holds all output, including that of running parts.

    Args:
        budget_s: seconds for all parts together, including the end of the last one.
    """
    end = time.monotonic() + budget_s - TELL_S
    stages = [list(stage) for _, stage in itertools.groupby(parts, lambda part: part.stage)]
    limits = [max(part.limit_s for part in stage) for stage in stages]
    results: list[Result] = []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, stage in enumerate(stages):
            left = end - time.monotonic()
            spare = max(0.0, left - sum(limits[number:]))
            print(f"--- {', '.join(part.name for part in stage)}", flush=True)
            running = []
            for part in stage:
                limit_s = min(part.limit_s + spare, 2 * part.limit_s, left)
                if shutil.which(part.command[0]) is None:
                    results.append(Result(part, "not here"))
                elif left < min(LEAST_S, part.limit_s):
                    results.append(Result(part, "no time left"))
                else:
                    running.append(_Running(part, limit_s, Path(folder)))
            _finish(running, results, out)
    return results


def _finish(running: list[_Running], results: list[Result], out: Path) -> None:
    """Waits for the parts of a stage, and saves their output while they run."""
    saved = -_SAVE_S
    try:
        while running:
            for part in [part for part in running if part.has_ended]:
                running.remove(part)
                part.end()
                results.append(part.result())
                saved = -_SAVE_S
                write_all(results, out)  # first, because print fails if its reader has gone
                print("\n".join([*results[-1].lines, str(results[-1])]), flush=True)
            if time.monotonic() - saved >= _SAVE_S:
                write_all([*results, *(part.result() for part in running)], out)
                saved = time.monotonic()
            time.sleep(_LOOK_S if running else 0.0)
    finally:
        write_all([*results, *(part.result() for part in running)], out)
        for part in running:
            part.end()


def _text(path: Path) -> str:
    """The text of a file, without its middle if it is long."""
    text = path.read_bytes()
    if (left_out := len(text) - 2 * _HALF_BYTES) > 0:
        note = f"\n... {left_out} bytes are left out ...\n".encode()
        text = text[:_HALF_BYTES] + note + text[-_HALF_BYTES:]
    return text.decode(errors="replace").replace("\r", "\n")


def _lines_of(part: Part, text: str) -> list[str]:
    lines = [line[:_MOST_COLUMNS] for line in text.splitlines()]
    shown: list[str] = []
    if part.shown is not None:
        shown = [line for line in lines[:-_TAIL_LINES] if re.search(part.shown, line)]
    return shown[-_MOST_SHOWN:] + lines[-_TAIL_LINES:]


def table(results: Sequence[Result]) -> str:
    """A line for each part."""
    return "\n".join(map(str, results))


def write_all(results: Sequence[Result], out: Path) -> None:
    """Writes the table, the lines to print and the outputs of all parts to `all.txt`."""
    ends = [f"--- {each.part.name}\n" + "\n".join(each.lines) for each in results if each.lines]
    whole = [f"=== {each.part.name}\n{each.text}" for each in results if each.seconds]
    new = out / "all.txt.new"
    new.write_text("\n".join([table(results), *ends, *whole]))
    new.replace(out / "all.txt")  # atomic: a signal leaves the old or the new file


_BUDGET_S = 562.0
_PASSED = " passed"
_UNDECIDED = r"::(?!.* (PASSED|SKIPPED|XFAIL))"
"""In pytest's output: failed tests, and the test that ran when pytest was ended."""
_PREDICTED = "predicted "
_FIGURES = rf"{_PREDICTED}|^(floor|batch +\d+  )"
_COUNTERS = "Duration|Throughput|Registers Per|Achieved Occupancy|No Eligible"
_SMOKE = (
    "(test_decode and 4-128) or plan_agrees or blocks_are or test_linear or "
    "(bfloat16 and (gather_kv or sorted_reference or test_fused))"
)
_ALONE = "ledger or growth or larger_than"
"""Tests that measure the card's free memory, so that no other part may run."""
_BENCH = "{python} -u -m tpengine bench"
_KERNELS = "{python} -u tests/benchmarks kernels --device cuda --only"
_MODEL = "--device cuda --dtype bfloat16 --shape llama-3-8b --swap-space 0.25"
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
_OPS = f"{_PYTEST} tests/ops -k"
_ENGINE = f"{_PYTEST} tests/worker -k"
_CHECKS = "{scratch}/kernel_checks"
_NVCC = (
    "nvcc -std=c++17 -O2 -lineinfo -arch=native -DTPENGINE_SOME_DIMS "
    f"-o {_CHECKS} tests/ops/cuda_program/kernel_checks.cu"
)
_LIBRARIES = f"{_PYTEST} tests/layers/test_prefill.py tests/distributed/test_gpu_ranks.py"
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
    (3, "libraries and ranks", 115, _LIBRARIES, _TESTS),
    (3, "compiler", 115, _NVCC, _TIMES),
    (4, "decode kernel", 45, f"{_KERNELS} decode", _TIMES),
    (5, "other kernels' times", 40, f"{_KERNELS} linear elementwise blocks prefill", _TIMES),
    (6, "latency", 70, f"{_LATENCY} --trace {{out}}/trace", _TIMES),
    (7, "latency, eager", 35, f"{_LATENCY} --enforce-eager", _TIMES),
    (8, "latency, not ahead", 35, f"{_LATENCY} --no-async-scheduling", _TIMES),
    (9, "throughput", 55, f"{_BENCH} throughput {_MODEL} --num-requests 1000 --runs 1", _TIMES),
    (10, "memory accounts", 25, f"{_ENGINE} '{_ALONE}'", _TESTS),
    (11, "hardware counters", 35, _NCU, ("Registers Per Thread", _COUNTERS)),
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


@dataclass
class VisitOptions(Options):
    """Where the files go, and how long it may take."""

    group = "visit"

    out: str = option("build/gpu-visit", metavar="FOLDER")
    """Folder for its files."""
    budget_s: float = option(_BUDGET_S, more_than=0, unit=" seconds")
    """Seconds for all parts together, including the end of the last one; each part's limit is
    scaled with it. The default leaves some of ten minutes for the start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    VisitOptions.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all parts; returns 0 if no part failed."""
    options = VisitOptions.from_cli_args(args)
    options.check()
    out = Path(options.out)
    with tempfile.TemporaryDirectory() as scratch:
        scale = options.budget_s / _BUDGET_S
        parts = visit_parts(out, Path(scratch))
        parts = [replace(part, limit_s=scale * part.limit_s) for part in parts]
        results = run_parts(parts, out, options.budget_s)
    timed = [result for result in results if result.part.shown == _FIGURES]
    predicted = [line for result in timed for line in result.lines if _PREDICTED in line]
    print("\n".join(["--- measured and predicted", *predicted, "--- parts", table(results)]))
    return 0 if all(result.is_good for result in results) else 1
