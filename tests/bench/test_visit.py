"""The visit to a GPU: its runner, and its command line from end to end without a card."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import __main__ as benchmarks
from benchmarks import visit
from benchmarks.visit import Part, run_parts, visit_parts
from support.waiting import wait_until

from tpengine.cli.main import build_parser
from tpengine.host import start_ticks

ROOT = Path(__file__).parents[2]
COMMAND = 'PYTHONPATH=. python3 tests/benchmarks visit --out "$OUT"'
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/calls"
echo "predicted 1 us; ceilings, 3 passed, Registers Per Thread, 0 wrong"
"""


def python(stage: int, name: str, code: str, **kwargs: str) -> Part:
    return Part(stage, name, 60.0, (sys.executable, "-u", "-c", code), **kwargs)


def process_that_lives_on(pid_file: Path) -> str:
    """Shell code that starts a process, writes its id to a file, and waits for it."""
    return f"sleep 100 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"


def assert_ended(pid_file: Path) -> None:
    """Waits for the end of the process that the file names."""
    pid = int(pid_file.read_text())
    wait_until(lambda: start_ticks(pid) is None, 60.0, "a child of an ended part lives on")


def test_a_visit_runs_through_without_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stubs stand for the programs of a machine with a card, its Python too."""
    assert COMMAND in (ROOT / "docs" / "gpu.md").read_text()
    for name in ("python3", "nvcc", "ncu", "compute-sanitizer"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", "python3")
    monkeypatch.setattr(visit, "_LOOK_S", 0.02)
    out = tmp_path / "out"
    assert benchmarks.main(["visit", "--out", str(out)]) == 0
    rows = capsys.readouterr().out.rpartition("--- parts\n")[2].splitlines()
    parts = visit_parts(out, tmp_path)
    assert sorted(row[:32].strip() for row in rows) == sorted(part.name for part in parts)
    assert all(row.endswith("  passed") for row in rows)
    assert [path.name for path in out.iterdir()] == ["all.txt"]
    programs = [call.split()[0] for call in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(programs) == sorted(part.command[0] for part in parts)
    (tmp_path / "ncu").write_text("#!/bin/sh\nexit 1")
    assert benchmarks.main(["visit", "--out", str(out)]) == 1


def words_after(program: str, folder: Path) -> list[list[str]]:
    """The arguments that parts of a visit give to a program."""
    commands = [list(part.command) for part in visit_parts(folder, folder)]
    return [words[words.index(program) + 1 :] for words in commands if program in words]


def test_the_options_of_each_part_are_known(tmp_path: Path) -> None:
    parsers = {"tpengine": build_parser, "tests/benchmarks": benchmarks.build_parser}
    for program, parser_for in parsers.items():
        commands = words_after(program, tmp_path)
        assert len(commands) == 4
        for words in commands:
            assert parser_for(words).parse_args(words).run


@pytest.mark.check
def test_each_part_with_tests_selects_some(tmp_path: Path) -> None:
    selections = [[*words, "--collect-only", "-q"] for words in words_after("pytest", tmp_path)]
    assert selections
    code = f"import sys, pytest; sys.exit(max(map(pytest.main, {selections!r})))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=240).returncode == 0


def test_a_visit_goes_on_after_failures(tmp_path: Path) -> None:
    """With a limit for each part, whose children end with it, and which may say what it found."""
    pid_file = tmp_path / "pid"
    deaf = f"trap 'echo 2 failed so far; exit' INT; {process_that_lives_on(pid_file)}"
    parts = [
        python(1, "breaks", "print('seen'); raise SystemExit(3)"),
        Part(2, "never ends", 1.5, ("sh", "-c", deaf)),
        Part(3, "absent", 5.0, ("no-such-profiler", "--all")),
        python(4, "skips", "print('3 skipped')", proof=" passed"),
        python(5, "floods", "print('first'); print('x' * (3 << 20)); print('last')"),
        python(6, "ends", "print('done')"),
    ]
    results = run_parts(parts, tmp_path, budget_s=300.0)
    outcomes = [re.sub(r" \d+ s$", "", result.outcome) for result in results]
    failures = ["failed with 3", "ended after", "not here", "failed: nothing ran"]
    assert outcomes == [*failures, "passed", "passed"]
    assert results[1].seconds >= 3.0, "twice its limit, as there was time"
    assert (results[0].lines, results[1].lines) == (["seen"], ["2 failed so far"])
    text = (tmp_path / "all.txt").read_text()
    assert text.endswith("\nlast\n\n=== ends\ndone\n"), "of a flood the ends are kept"
    assert all(words in text for words in ("first\nxxx", "bytes are left out"))
    assert len(text) < 1 << 20
    assert_ended(pid_file)
    assert run_parts([python(1, "late", "pass")], tmp_path, 0.0)[0].outcome == "no time left"


def test_a_stage_runs_side_by_side(tmp_path: Path) -> None:
    """Each part waits for what the other writes, and the next stage finds both done."""
    first, second = tmp_path / "first", tmp_path / "second"
    code = (
        "import pathlib, time\npathlib.Path({0!r}).touch()\n"
        "while not pathlib.Path({1!r}).exists(): time.sleep(0.02)"
    )
    parts = [
        python(1, "this", code.format(str(first), str(second))),
        python(1, "that", code.format(str(second), str(first))),
        python(2, "after", "print('both')"),
    ]
    results = run_parts(parts, tmp_path, 300.0)
    assert [result.outcome for result in results] == ["passed"] * 3
    assert results[-1].part.name == "after"


def test_a_cut_leaves_what_was_found_and_no_process(tmp_path: Path) -> None:
    """By SIGTERM. Each part is written while it runs, since the end may give it no time."""
    pid_file, all_text = tmp_path / "pid", tmp_path / "all.txt"
    running = f"echo half of it; {process_that_lives_on(pid_file)}"
    parts = [Part(1, "first", 90, ("echo", "1.7")), Part(2, "second", 90, ("sh", "-c", running))]
    code = (
        "import runpy, sys\nsys.path.insert(0, 'tests')\n"
        "from benchmarks import visit\nfrom benchmarks.visit import Part\n"
        f"visit.visit_parts = lambda out, scratch: {parts!r}\n"
        f"sys.argv = ['benchmarks', 'visit', '--out', {str(tmp_path)!r}]\n"
        "runpy.run_path('tests/benchmarks', run_name='__main__')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: pid_file.exists() and "half of it" in all_text.read_text(), 60.0, "not run")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == 1
    assert_ended(pid_file)
    assert re.search(r"^second +[\d.]+ s  was running$", all_text.read_text(), re.MULTILINE)
    assert "=== first\n1.7\n" in all_text.read_text()


def test_lines_that_matter_are_shown_wherever_they_stand(tmp_path: Path) -> None:
    """The profiler's table comes after the figures; faulthandler's stacks after the test's name."""
    shown = {part.name: part.shown for part in visit_parts(tmp_path, tmp_path)}
    batch = "batch  64  first token  100.0 ms   step    7.00 ms"
    tests = "tests/a.py::one PASSED [ 3%]", "tests/a.py::two[chunks of 48] Timeout (0:00:30)!"
    parts = [
        python(1, name, f"print(*{[*lines, *range(40)]!r}, sep=chr(10))", shown=shown[kind])
        for name, kind, lines in (
            ("figures", "latency", ("model      llama", batch, "batch 64: a file")),
            ("tests", "other kernels", tests),
        )
    ]
    results = run_parts(parts, tmp_path, 300.0)
    assert {result.part.name: (result.lines[0], len(result.lines)) for result in results} == {
        "figures": (batch, 13),
        "tests": (tests[1], 13),
    }


def test_a_visit_fits_into_ten_minutes(tmp_path: Path) -> None:
    """All limits together, each stage taking that of its slowest part."""
    parts = visit_parts(tmp_path, tmp_path)
    stages = {part.stage: 0.0 for part in parts}
    for part in parts:
        stages[part.stage] = max(stages[part.stage], part.limit_s)
    parser = argparse.ArgumentParser()
    visit.add_arguments(parser)
    assert sum(stages.values()) + visit.TELL_S <= parser.parse_args([]).budget_s <= 570.0
    assert list(stages) == sorted(stages)
    assert [part.name for part in parts[:2]] == ["card", "one case of each kernel"]
    assert [part.name for part in parts[-2:]] == ["memcheck", "racecheck"]
    counters = next(part.command for part in parts if part.command[0] == "ncu")
    assert counters[1:3] == ("--clock-control", "none"), "the card's settings are not ours"


@pytest.mark.parametrize("budget_s", ["-5", "0", "inf", "nan"])
def test_a_budget_without_time_is_refused(budget_s: str) -> None:
    with pytest.raises(SystemExit, match="ConfigError: budget_s must be more than 0"):
        benchmarks.main(["visit", f"--budget-s={budget_s}"])
