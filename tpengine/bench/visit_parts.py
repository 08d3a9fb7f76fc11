"""Runs programs one after another, each with a limit of its own, and keeps what they said: whatever
cuts the run short, what was found out until then is in a file, and no program lives on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpengine.host import NotedSignal

_TAIL_LINES = 12
_MOST_SHOWN = 12
_LEAST_S = 10.0
_TELL_S = 6.0
"""For a part that is over its limit to say what it has found out."""
_KILL_S = 5.0
_LOOK_S = 0.2
_GUARD = """
group=
while read -r line; do group=$line; done
[ -z "$group" ] || kill -s KILL -- "-$group"
"""


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Attributes:
        command: its words; a first word that is no program here skips the part.
        limit_s: after which it is ended.
        proof: must be in its output, lest a run in which all tests skip themselves looks good.
        shown: pattern of lines that are shown with the last ones, wherever they stand.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    proof: str | None = None
    shown: str | None = None

    @property
    def file_name(self) -> str:
        """Of its output."""
        return self.name.replace(",", "").replace(" ", "-") + ".txt"


@dataclass(frozen=True)
class Result:
    """How a part ended, in words, and after which time; the lines of its output to look at."""

    part: Part
    outcome: str
    seconds: float
    lines: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong, as far as it can be known here."""
        return self.outcome in ("passed", "not here")

    def __str__(self) -> str:
        return f"{self.part.name:<24s} {self.seconds:7.1f} s  {self.outcome}"


class Guard:
    """A process that outlives this one, however it ends, and then ends the part in flight, which
    has a session of its own and would go on."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, group: int | None) -> None:
        """Names the group of processes that is in flight; None: there is none."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{group or ''}\n".encode())
            self._process.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch(None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run_parts(parts: Sequence[Part], out: Path, budget_s: float) -> list[Result]:
    """Runs parts until the budget is spent or a signal ends it. Prints what each has found when it
    is over, and writes all of it to `all.txt`; each part's output alone is in the folder `parts`.

    Args:
        budget_s: of all together, the end of the last included.
    """
    end = time.monotonic() + budget_s
    results: list[Result] = []
    (out / "parts").mkdir(parents=True, exist_ok=True)
    with NotedSignal() as cut, Guard() as guard:
        for number, part in enumerate(parts, 1):
            left = end - time.monotonic() - _TELL_S - _KILL_S
            print(f"--- {part.name} ({number} of {len(parts)})", flush=True)
            if shutil.which(part.command[0]) is None:
                line = f"{part.command[0]} is not installed"
                results.append(Result(part, "not here", 0.0, [line]))
            elif cut.signal is not None:
                results.append(Result(part, f"not run: cut by {cut.signal.name}", 0.0))
            elif left < min(_LEAST_S, part.limit_s):
                results.append(Result(part, "no time left", 0.0))
            else:
                results.append(_run_part(part, out, min(part.limit_s, left), cut, guard))
            write_all(results, out)  # first: there may be nobody left to print to
            print("\n".join([*results[-1].lines, str(results[-1])]), flush=True)
    return results


def _run_part(part: Part, out: Path, limit_s: float, cut: NotedSignal, guard: Guard) -> Result:
    path = out / "parts" / part.file_name
    start = time.monotonic()
    with path.open("w") as file:
        process = subprocess.Popen(
            part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        guard.watch(process.pid)
        try:
            outcome = _wait(process, start + limit_s, cut)
            if outcome is None:
                _send(process, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TELL_S)
                outcome = f"ended after {time.monotonic() - start:.0f} s"
                if cut.signal is not None:
                    outcome = f"cut by {cut.signal.name}"
        finally:
            _send(process, signal.SIGKILL)  # its children, too, which may have stayed
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
            guard.watch(None)
    text = _text(path)
    if outcome == "passed" and part.proof is not None and part.proof not in text:
        outcome = "failed: nothing ran"
    return Result(part, outcome, time.monotonic() - start, _lines_of(part, text))


def _wait(process: subprocess.Popen[bytes], end: float, cut: NotedSignal) -> str | None:
    """How a part ended by itself; None: it is to be ended."""
    while cut.signal is None and time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(_LOOK_S, max(0.0, end - time.monotonic())))
            return "passed" if code == 0 else f"failed with {code}"
    return None


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _lines_of(part: Part, text: str) -> list[str]:
    lines = text.splitlines()
    shown: list[str] = []
    if part.shown is not None:
        shown = [line for line in lines[:-_TAIL_LINES] if re.search(part.shown, line)]
    return shown[-_MOST_SHOWN:] + lines[-_TAIL_LINES:]


def _text(path: Path) -> str:
    return path.read_text(errors="replace").replace("\r", "\n")


def table(results: Sequence[Result]) -> str:
    """A line for each part."""
    return "\n".join(str(one) for one in results)


def write_all(results: Sequence[Result], out: Path) -> None:
    """Writes the table, the lines to look at, and the outputs of all parts to one file."""
    ends = [f"--- {one.part.name}\n" + "\n".join(one.lines) for one in results if one.lines]
    files = [out / "parts" / one.part.file_name for one in results if one.seconds]
    whole = [f"=== {path.stem}\n{_text(path)}" for path in files]
    new = out / "all.txt.new"
    new.write_text("\n".join([table(results), *ends, *whole]))
    new.replace(out / "all.txt")  # a cut leaves the one or the other
