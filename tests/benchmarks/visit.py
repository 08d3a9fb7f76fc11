"""All checks and measurements that need a GPU, in one command and less than ten minutes.

The machine may be lent only once: the most important parts come first, every part has its own time
limit, and the next part runs even if one fails. Times are printed next to their predictions. The
command runs the tests of its checkout, with kernels that are built. It does not change the card's
settings: the profiler is told not to change the clocks.

The runner, `run_parts`, gives each part a time limit, keeps what a part printed when it is killed,
and leaves no process behind.
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
from types import FrameType
from typing import Any

from tpengine.options import Options, option

_TAIL_LINES = 12
_MOST_SHOWN = 48
_MOST_COLUMNS = 240
LEAST_S = 10.0
TELL_S = 6.0
"""Time for a part that exceeds its limit to print what it found."""
KILL_S = 5.0
_LOOK_S = 0.2
_SAVE_S = 2.0
"""Between two writes of `all.txt`."""
_HALF_BYTES = 256 << 10
"""Kept of a part's output, at each end: a lent machine returns at most 16 MiB."""
_GUARD = """
groups=
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class NotedSignal:
    """Context in which SIGTERM, SIGINT and SIGHUP are noted and have no other effect.

    A signal that the process ignores, such as SIGHUP under nohup, stays ignored.

    Attributes:
        signal: the last one that has come; None: no signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> NotedSignal:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


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


class Guard:
    """A process that ends the running parts after this process has ended in any way. The parts have
    sessions of their own and would continue."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def watch(self, groups: Sequence[int]) -> None:
        """Replaces the process groups to end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(*groups, file=self._process.stdin, flush=True)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch([])
        try:
            self._process.communicate(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class _Running:
    """A part that runs."""

    def __init__(self, part: Part, limit_s: float, folder: Path) -> None:
        self.part = part
        self.start = time.monotonic()
        self._deadline = self.start + limit_s
        self._told: float | None = None
        self._path = folder / f"{part.name.replace(' ', '-')}.txt"
        with self._path.open("w") as file:
            self._process = subprocess.Popen(
                part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.group = self._process.pid

    def look(self, cut: NotedSignal) -> Result | None:
        """Returns how the part ended; None: it runs. Ends it step by step when its time is over."""
        code, now = self._process.poll(), time.monotonic()
        if code is not None and self._told is None:
            return self.result("passed" if code == 0 else f"failed with {code}")
        if self._told is None:
            if cut.signal is not None or now >= self._deadline:
                self._told = now
                self._send(signal.SIGINT)
            return None
        if code is None and now < self._told + TELL_S:
            return None
        ended = f"ended after {self._told - self.start:.0f} s"
        return self.result(ended if cut.signal is None else f"cut by {cut.signal.name}")

    def result(self, outcome: str) -> Result:
        """The result with the output until now."""
        text = _text(self._path)
        if outcome == "passed" and self.part.proof not in text:
            outcome = "failed: nothing ran"
        lines = _lines_of(self.part, text)
        return Result(self.part, outcome, time.monotonic() - self.start, lines, text)

    def end(self) -> None:
        """Ends all processes of the part, its children included."""
        self._send(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


def run_parts(parts: Sequence[Part], out: Path, budget_s: float) -> list[Result]:
    """Runs parts until the budget is spent or a signal arrives. Prints the result of each part when
    it ends; `all.txt` holds all output, including that of running parts.

    Args:
        budget_s: seconds for all parts together, including the end of the last one.
    """
    end = time.monotonic() + budget_s - TELL_S - KILL_S
    stages = [list(stage) for _, stage in itertools.groupby(parts, lambda part: part.stage)]
    limits = [max(part.limit_s for part in stage) for stage in stages]
    results: list[Result] = []
    out.mkdir(parents=True, exist_ok=True)
    with NotedSignal() as cut, Guard() as guard, tempfile.TemporaryDirectory() as folder:
        for number, stage in enumerate(stages):
            left = end - time.monotonic()
            spare = max(0.0, left - sum(limits[number:]))
            print(f"--- {', '.join(part.name for part in stage)}", flush=True)
            started = []
            for part in stage:
                outcome = _why_not(part, left, cut)
                if outcome is None:
                    limit_s = min(part.limit_s + spare, 2 * part.limit_s, left)
                    started.append(_Running(part, limit_s, Path(folder)))
                else:
                    results.append(Result(part, outcome))
                    print(results[-1], flush=True)
            _finish(started, results, out, cut, guard)
    return results


def _why_not(part: Part, left: float, cut: NotedSignal) -> str | None:
    """Why a part is not started; None: it is started."""
    if shutil.which(part.command[0]) is None:
        return "not here"
    if cut.signal is not None:
        return f"not run: cut by {cut.signal.name}"
    return "no time left" if left < min(LEAST_S, part.limit_s) else None


def _finish(
    running: list[_Running], results: list[Result], out: Path, cut: NotedSignal, guard: Guard
) -> None:
    """Waits for the parts of a stage, and saves their output while they run."""
    saved = -_SAVE_S
    try:
        while running:
            guard.watch([one.group for one in running])
            for one in list(running):
                if (result := one.look(cut)) is None:
                    continue
                one.end()
                running.remove(one)
                results.append(result)
                saved = -_SAVE_S
                write_all(results, out)  # first, because print fails if its reader has gone
                print("\n".join([*result.lines, str(result)]), flush=True)
            if time.monotonic() - saved >= _SAVE_S:
                write_all([*results, *(one.result("is running") for one in running)], out)
                saved = time.monotonic()
            time.sleep(_LOOK_S if running else 0.0)
    finally:
        for one in running:
            one.end()
        guard.watch([])
        write_all(results, out)


def _text(path: Path) -> str:
    """The text of a file, without its middle if it is long."""
    with path.open("rb") as file:
        text = file.read(_HALF_BYTES)
        left_out = path.stat().st_size - 2 * _HALF_BYTES
        if left_out > 0:
            file.seek(left_out, os.SEEK_CUR)
            text += f"\n... {left_out} bytes are left out ...\n".encode()
        return (text + file.read()).decode(errors="replace").replace("\r", "\n")


def _lines_of(part: Part, text: str) -> list[str]:
    lines = [line[:_MOST_COLUMNS] for line in text.splitlines()]
    shown: list[str] = []
    if part.shown is not None:
        shown = [line for line in lines[:-_TAIL_LINES] if re.search(part.shown, line)]
    return shown[-_MOST_SHOWN:] + lines[-_TAIL_LINES:]


def table(results: Sequence[Result]) -> str:
    """A line for each part."""
    return "\n".join(str(one) for one in results)


def write_all(results: Sequence[Result], out: Path) -> None:
    """Writes the table, the lines to print and the outputs of all parts to `all.txt`."""
    ends = [f"--- {one.part.name}\n" + "\n".join(one.lines) for one in results if one.lines]
    whole = [f"=== {one.part.name}\n{one.text}" for one in results if one.seconds]
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
    (4, "decode kernel", 45, f"{_KERNELS} decode --plot {{out}}/decode.png", _TIMES),
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
    timed = [one for one in results if one.part.shown == _FIGURES]
    predicted = [line for one in timed for line in one.lines if _PREDICTED in line]
    print("\n".join(["--- measured and predicted", *predicted, "--- parts", table(results)]))
    return 0 if all(one.is_good for one in results) else 1
