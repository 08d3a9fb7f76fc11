"""A first visit to a GPU in one command and under ten minutes: correctness before speed, every part
with a limit of its own, a failure never keeping the next from its turn. Full output goes to files,
and all of it to `all.txt`; a summary comes last. To be run in a checkout, whose tests it runs.

The card's settings stay as they are: the profiler is told to leave the clocks alone.
"""

from __future__ import annotations

import argparse
import contextlib
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
_TELL_S = 6.0
"""For a part that is over its limit to say what it has found out."""
_PASSED = " passed"


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Attributes:
        command: its words; a first word that is no program here skips the part.
        limit_s: after which it is ended.
        proof: must be in its output, lest a run in which all tests skip themselves looks good.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    proof: str = ""


@dataclass(frozen=True)
class Result:
    """How a part ended, in words, and after which time; its output's last lines."""

    part: Part
    outcome: str
    seconds: float
    tail: str


def visit_parts(out: Path) -> list[Part]:
    """In the order of their worth, should the time run out."""
    python = f"{sys.executable} -u"
    bench = f"{python} -m tpengine.cli bench"
    latency = (
        f"{bench} latency --device cuda --dtype bfloat16 --shape llama-3-8b --input-len 1000 "
        "--output-len 64"
    )
    return [
        _part(
            "library and card",
            40,
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
        _part("latency, timeline", 80, f"{latency} --batch-sizes 1,64 --trace", str(out / "trace")),
        _tests("ranks are right", 60, "tests/distributed"),
        _part(
            "other kernels",
            50,
            f"{bench} kernels --device cuda --only prefill linear elementwise blocks",
        ),
        _part("latency, driver first", 40, f"{latency} --batch-sizes 1,64 --no-async-scheduling"),
        _part("latency without graphs", 40, f"{latency} --batch-sizes 1 --enforce-eager"),
        _tests(
            "memory check",
            45,
            "tests/ops/test_cuda.py -k",
            "1-64-bfloat16 or graph",
            before="compute-sanitizer --error-exitcode 9",
        ),
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
    ]


def _tests(name: str, limit_s: float, words: str, *last: str, before: str = "") -> Part:
    """Tests marked `gpu`; a few failures are enough, as one may spoil the device for all that
    follow in its process."""
    pytest = "-u -m pytest -q -m gpu -p no:cacheprovider --tb=short --maxfail=6"
    command = (*before.split(), sys.executable, *pytest.split(), *words.split(), *last)
    return Part(name, command, limit_s, _PASSED)


def _part(name: str, limit_s: float, words: str, *last: str) -> Part:
    """Args: words and last: the command, `last` with whatever spaces they have."""
    return Part(name, (*words.split(), *last), limit_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument(
        "--out", default="build/gpu-visit", help="folder for its files (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=560.0, help="seconds of all parts together (default: 560)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs all parts; 0 if none failed."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = run_parts(visit_parts(out), out, args.budget_s)
    text = summary(results)
    files = [out / f"{_file_name(one.part)}.txt" for one in results]
    whole = [f"=== {path.stem}\n{_text(path)}" for path in files if path.is_file()]
    (out / "all.txt").write_text("\n".join([text, *whole]))
    print(text)
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
    path = out / f"{_file_name(part)}.txt"
    start = time.monotonic()
    with path.open("w") as file:
        process = subprocess.Popen(
            part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            _end(process)
            outcome = f"ended after {limit_s:.0f} s"
    text = _text(path)
    if outcome == "passed" and part.proof not in text:
        outcome = "failed: nothing ran"
    tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
    return Result(part, outcome, time.monotonic() - start, tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With a moment for what pytest has to say when it is interrupted."""
    for number, wait_s in ((signal.SIGINT, _TELL_S), (signal.SIGKILL, _END_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)  # its children may stay, and get the second signal too


def _file_name(part: Part) -> str:
    return part.name.replace(",", "").replace(" ", "-")


def _text(path: Path) -> str:
    return path.read_text(errors="replace").replace("\r", "\n")


def summary(results: Sequence[Result]) -> str:
    """The ends of all outputs, then a line for each part."""
    ends = [f"--- {one.part.name}\n{one.tail}" for one in results if one.tail]
    table = [f"{one.part.name:<24s} {one.seconds:7.1f} s  {one.outcome}" for one in results]
    return "\n".join([*ends, "---", *table])
