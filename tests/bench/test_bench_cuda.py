"""The benchmark of CUDA kernels: its cases run, small and on the CPU; its table and plot."""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import kernel_times, visit
from benchmarks.__main__ import main as run_benchmark
from benchmarks.card_times import Ceilings, compare, decode_s
from benchmarks.kernel_rows import GROUPS, Row, Setting
from benchmarks.kernel_times import in_turn_s
from benchmarks.visit import Part, run_parts, table, visit_parts

from tpengine.bench.timing import Action

CEILINGS = Ceilings(4e12, 4.4e12, 8e14, 5e10, 5e10)


STAGES = itertools.count(1)


def once(actions: Sequence[Action]) -> float:
    actions[0]()
    return 1e-3


@pytest.mark.parametrize("group", list(GROUPS))
def test_every_case_runs(group: str) -> None:
    setting = Setting(torch.device("cpu"), once, torch.bfloat16, shrink=512)
    with torch.inference_mode():
        rows = list(GROUPS[group](setting))
    assert len(rows) > 2
    for row in rows:
        assert row.num_bytes > 0 or row.num_flop > 0
        text = row.text(CEILINGS)
        assert row.kernel in text
        assert "1000.0 us" in text


def test_shares() -> None:
    row = Row("decode bfloat16", "64 x 4096", 250e-6, 64 * 4096 * 4096, 4 * 64 * 4096 * 4096)
    assert "107.4 % of copy" in row.text(CEILINGS)
    assert " 17.2 TFLOP/s    2.1 % of matmul" in row.text(CEILINGS)
    on_cpu = Row("decode bfloat16", "1 x 1024", 1e-3, 1 << 20, 1 << 20).rates(4e9)
    assert on_cpu.endswith(" 1.0 GB/s   26.2 % of reads        1.0 GFLOP/s")


def test_actions_are_timed_in_turn() -> None:
    calls: list[int] = []
    assert 0 < in_turn_s([lambda n=n: calls.append(n) for n in range(2)], repeats=4) < 1
    assert calls == [0, 1, 0, 1, 0]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "shares.png"
    kernel_times.plot_shares(str(path), [Row("decode fp8", "1 x 1024", 1e-5, 4e6)], CEILINGS)
    assert path.stat().st_size > 1000


def test_gpu_options_are_for_gpus() -> None:
    with pytest.raises(SystemExit, match="ConfigError: --only, --match and --plot are for a GPU"):
        run_benchmark(["kernels", "--device", "cpu", "--only", "decode"])


def test_one_case_by_its_name() -> None:
    setting = Setting(torch.device("cpu"), once, torch.bfloat16, shrink=512, match="1 x 32768")
    with torch.inference_mode():
        names = {row.case for row in GROUPS["decode"](setting)}
    assert {name.rpartition(", ")[2] for name in names} == {"1 x 64"}


def python(
    name: str, code: str, limit_s: float = 20.0, stage: int | None = None, **kwargs: str
) -> Part:
    """After all parts before it, unless a stage is named."""
    command = (sys.executable, "-u", "-c", code)
    return Part(next(STAGES) if stage is None else stage, name, limit_s, command, **kwargs)


def beats(heart: Path) -> str:
    """Shell code that writes to a file for as long as it lives, a minute at most."""
    return f"for i in $(seq 3000); do printf x >> {heart}; sleep 0.02; done"


def beating(heart: Path) -> tuple[str, ...]:
    """A command whose child does that."""
    return ("sh", "-c", f"sh -c '{beats(heart)}'; true")


def stands_still(heart: Path, patience_s: float = 10.0) -> bool:
    """Whether the child of `beating` is gone, or goes in time."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = heart.stat().st_size
        time.sleep(0.3)
        if heart.stat().st_size == before:
            return True
    return False


def test_a_visit_goes_on_after_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a limit for each part, whose children end with it, and which may say what it found."""
    heart = tmp_path / "heart"
    told = ("sh", "-c", f"trap 'echo 2 failed so far' INT; sh -c '{beats(heart)}'")
    parts = [
        python("breaks", "print('seen'); raise SystemExit(3)"),
        Part(next(STAGES), "never ends", 1.5, told),
        Part(next(STAGES), "absent", 5.0, ("no-such-profiler", "--all")),
        python("skips", "print('3 skipped')", proof=" passed"),
        python("ends", "print('done')"),
    ]
    results = run_parts(parts, tmp_path, budget_s=60.0)
    assert [re.sub(r" \d+ s$", "", one.outcome) for one in results] == [
        "failed with 3",
        "ended after",
        "not here",
        "failed: nothing ran",
        "passed",
    ]
    assert results[1].seconds >= 3.0, "twice its limit, as there was time"
    assert (results[0].lines, results[1].lines) == (["seen"], ["2 failed so far"])
    assert (tmp_path / "all.txt").read_text().endswith("=== ends\ndone\n")
    assert heart.stat().st_size > 0
    assert stands_still(heart), "a child of the ended part lives on"
    assert table(results).splitlines()[-1].startswith("ends ")
    assert "seen\nbreaks " in capsys.readouterr().out
    assert run_parts([python("late", "pass")], tmp_path, 0.0)[0].outcome == "no time left"


def test_children_of_a_part_that_passed_end_with_it(tmp_path: Path) -> None:
    heart = tmp_path / "heart"
    child = ["sh", "-c", beats(heart)]
    code = (
        f"import os, subprocess, time; subprocess.Popen({child})\n"
        f"while not os.path.exists({str(heart)!r}): time.sleep(0.01)"
    )
    (result,) = run_parts([python("leaves one", code)], tmp_path, 60.0)
    assert result.outcome == "passed"
    assert stands_still(heart)


def test_a_stage_runs_side_by_side(tmp_path: Path) -> None:
    """Each part waits for what the other writes, and the next stage finds both done."""
    first, second = tmp_path / "first", tmp_path / "second"
    code = (
        "import pathlib, time\npathlib.Path({0!r}).touch()\n"
        "while not pathlib.Path({1!r}).exists(): time.sleep(0.02)"
    )
    parts = [
        python("one", code.format(str(first), str(second)), stage=1),
        python("other", code.format(str(second), str(first)), stage=1),
        python("after", "print('both')", stage=2),
    ]
    results = run_parts(parts, tmp_path, 60.0)
    assert [one.outcome for one in results] == ["passed"] * 3
    assert results[-1].part.name == "after"


def test_a_flood_of_output_keeps_its_ends(tmp_path: Path) -> None:
    code = "print('first'); print('x' * (3 << 20)); print('last')"
    (result,) = run_parts([python("floods", code)], tmp_path, 60.0)
    found = (tmp_path / "all.txt").read_text()
    assert "first\nxxx" in found
    assert "bytes are left out" in found
    assert result.lines[-1] == "last"
    assert len(found) < 1 << 20


def test_what_is_running_is_in_the_file(tmp_path: Path) -> None:
    """The one who ends the visit may give it no time to write."""
    code = (
        "import pathlib, sys, time\nprint('half of it')\nsaved = pathlib.Path(sys.argv[1])\n"
        "while not (saved.exists() and 'half of it' in saved.read_text()): time.sleep(0.05)"
    )
    part = python("slow", code)
    part = replace(part, command=(*part.command, str(tmp_path / "all.txt")))
    assert run_parts([part], tmp_path, 60.0)[0].outcome == "passed"


def test_the_end_of_the_last_part_is_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, seconds in (("TELL_S", 4.0), ("KILL_S", 3.5), ("LEAST_S", 1.0)):
        monkeypatch.setattr(visit, name, seconds)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        time.sleep(0.01)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(visit, "time", clock)
    (result,) = run_parts([python("deaf", code)], tmp_path, 9.5)
    assert result.outcome.startswith("ended after")
    assert 1.9 < now < 9.5


def visit_in_a_process(tmp_path: Path, parts: str) -> subprocess.Popen[str]:
    """A visit of these parts, which beats within its second."""
    code = f"""
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, "tests")
from benchmarks import visit
from benchmarks.__main__ import main
from benchmarks.visit import Part
visit.visit_parts = lambda out, scratch: {parts}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
sys.exit(main(["visit", "--out", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60.0
    heart = tmp_path / "heart"
    while not (heart.is_file() and heart.stat().st_size > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGTERM, signal.SIGKILL),
        *(pytest.param(one, marks=pytest.mark.soak) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_cut_leaves_what_was_found_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    heart = tmp_path / "heart"
    parts = [
        Part(1, "first", 9.0, ("echo", "1.7 times")),
        Part(2, "second", 50.0, beating(heart)),
        Part(3, "third", 9.0, ("echo", "3")),
    ]
    process = visit_in_a_process(tmp_path, repr(parts))
    process.send_signal(number)
    out = process.communicate(timeout=30.0)[0]
    assert stands_still(heart), "the part that was in flight lives on"
    assert "1.7 times\nfirst " in out
    found = (tmp_path / "all.txt").read_text()
    assert "=== first\n1.7 times" in found
    if number is not signal.SIGKILL:
        assert process.returncode == 1
        assert re.search(rf"second +[\d.]+ s  cut by {number.name}\nthird +0.0 s", found)


def test_lines_that_matter_are_shown_wherever_they_stand(tmp_path: Path) -> None:
    """The profiler's table comes after the figures; faulthandler's stacks after the test's name."""
    parts = {part.name: part for part in visit_parts(tmp_path, tmp_path)}
    table_rows = "print(*[f'aten::mm {i}' for i in range(30)], sep=chr(10))"
    batch = "batch  64  first token  100.0 ms   step    7.00 ms"
    code = f"print('model      llama'); print({batch!r}); print('batch 64: a file'); {table_rows}"
    figures = python("latency", code, shown=parts["latency"].shown)
    names = "tests/a.py::one PASSED [ 3%]", "tests/a.py::two[chunks of 48] Timeout (0:00:30)!"
    code = (
        f"print({names[0]!r}); print({names[1]!r}); print('  File x' * 1, *range(40), sep=chr(10))"
    )
    tests = python("tests", code, shown=parts["other kernels"].shown)
    results = run_parts([figures, tests], tmp_path, 60.0)
    assert [one.lines[0] for one in results] == [batch, names[1]]
    assert [len(one.lines) for one in results] == [13, 13]


@pytest.mark.soak
def test_a_test_that_hangs_is_named(tmp_path: Path) -> None:
    """In a call that holds Python's main thread, as a wait for a kernel does."""
    (tmp_path / "test_hang.py").write_text(
        "import ctypes, pytest\n\n"
        "@pytest.mark.gpu\n"
        "def test_that_hangs():\n"
        "    ctypes.PyDLL(None).sleep(100)\n"
    )
    part = next(
        one for one in visit_parts(tmp_path, tmp_path) if one.name == "one case of each kernel"
    )
    words = [*part.command[: part.command.index("-k") - 1], str(tmp_path)]
    words[words.index("faulthandler_timeout=30")] = "faulthandler_timeout=1"
    hanging = 'test_hang.py", line 5 in test_that_hangs'
    for limit_s in (4.0, 15.0, 60.0):  # where others want the cores, pytest itself takes long
        short = replace(part, command=(*words, "-c", "/dev/null"), limit_s=limit_s)
        (result,) = run_parts([short], tmp_path, 90.0)
        assert result.outcome.startswith("ended after")
        if hanging in result.text:
            break
    assert hanging in result.text
    assert "test_hang.py::test_that_hangs" in result.lines[0]


def test_a_visit_fits_into_ten_minutes(tmp_path: Path) -> None:
    """All limits together, each stage taking that of its slowest part."""
    parts = visit_parts(tmp_path, tmp_path)
    stages = {part.stage: 0.0 for part in parts}
    for part in parts:
        stages[part.stage] = max(stages[part.stage], part.limit_s)
    parser = argparse.ArgumentParser()
    visit.add_arguments(parser)
    budget_s = parser.parse_args([]).budget_s
    assert sum(stages.values()) + visit.TELL_S + visit.KILL_S <= budget_s
    assert budget_s <= 570.0
    assert list(stages) == sorted(stages)
    assert [part.name for part in parts[:2]] == ["card", "one case of each kernel"]
    assert [part.name for part in parts[-2:]] == ["memcheck", "racecheck"]
    counters = next(part.command for part in parts if part.command[0] == "ncu")
    assert counters[1:3] == ("--clock-control", "none"), "the card's settings are not ours"
    assert len({part.name for part in parts}) == len(parts)


def test_predictions_are_those_of_the_design() -> None:
    """The design's tables, made for a card that copies 4.3 TB/s."""
    copy = 4.3e12
    for rows, context, is_split, expected_us in (
        (64, 4096, False, 269),
        (1, 131072, True, 139),
        (8, 4096, True, 39),
        (16, 1024, True, 22),
        (1, 1024, True, 7),
    ):
        seconds = decode_s(4096 * rows * context, copy, is_split)
        assert seconds == pytest.approx(1e-6 * expected_us, rel=0.03)


@pytest.mark.parametrize(
    ("measured_us", "mark"),
    [(300, "+11.5 %  !! slower"), (240, "-10.8 %  !! faster"), (290, "+7.8 %")],
)
def test_a_miss_is_marked(measured_us: float, mark: str) -> None:
    text = compare(1e-6 * measured_us, 269e-6)
    assert text.startswith("predicted  269.00 us")
    assert text.endswith(mark)


@pytest.mark.parametrize("budget_s", ["-5", "0", "inf", "nan"])
def test_a_budget_without_time_is_refused(budget_s: str) -> None:
    with pytest.raises(SystemExit, match="ConfigError: budget_s must be more than 0"):
        run_benchmark(["visit", f"--budget-s={budget_s}"])


def test_a_visit_that_failed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [python("first", "raise SystemExit(1)")]
    monkeypatch.setattr(visit, "visit_parts", lambda out, scratch: failing)
    assert run_benchmark(["visit", "--out", str(tmp_path)]) == 1
    assert "first" in capsys.readouterr().out
    assert (tmp_path / "all.txt").read_text().count("first") >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["all.txt"]
