"""The benchmark of CUDA kernels: its cases run, small and on the CPU; its table and plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tpengine.bench import kernels, visit
from tpengine.bench.cuda_kernels import GROUPS, Setting
from tpengine.bench.cuda_timing import Action, Ceilings, Row
from tpengine.bench.visit import Part, run_parts, summary, visit_parts
from tpengine.cli import main

CEILINGS = Ceilings(4e12, 4.4e12, 8e14, 5e10, 5e10)


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
    assert " 17.2 TFLOP/s" in row.text(CEILINGS)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "shares.png"
    kernels.plot_shares(str(path), [Row("decode fp8", "1 x 1024", 1e-5, 4e6)], CEILINGS)
    assert path.stat().st_size > 1000


def test_gpu_options_are_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", "--only", "decode"]) == 1
    assert "--only, --match and --plot are for a GPU" in capsys.readouterr().err


def test_one_case_by_its_name() -> None:
    setting = Setting(torch.device("cpu"), once, torch.bfloat16, shrink=512, match="1 x 64")
    with torch.inference_mode():
        names = {row.case for row in GROUPS["decode"](setting)}
    assert {name.rpartition(", ")[2] for name in names} == {"1 x 64"}


def python(name: str, code: str, limit_s: float = 20.0) -> Part:
    return Part(name, (sys.executable, "-c", code), limit_s)


def test_a_visit_goes_on_after_failures(tmp_path: Path) -> None:
    """With a limit for each part, whose children end with it."""
    heart = tmp_path / "heart"
    child = f"sh -c 'while true; do printf x >> {heart}; sleep 0.02; done'; true"
    parts = [
        python("breaks", "print('seen'); raise SystemExit(3)"),
        Part("never ends", ("sh", "-c", child), 1.5),
        Part("absent", ("no-such-profiler", "--all"), 5.0),
        Part("skips", (sys.executable, "-c", "print('3 skipped')"), 20.0, " passed"),
        python("ends", "print('done')"),
    ]
    results = run_parts(parts, tmp_path, budget_s=60.0)
    assert [one.outcome for one in results] == [
        "failed with 3",
        "ended after 2 s",
        "not here",
        "failed: nothing ran",
        "passed",
    ]
    assert results[0].tail == "seen"
    assert (tmp_path / "ends.txt").read_text() == "done\n"
    beats = heart.stat().st_size
    assert beats > 0
    time.sleep(0.2)
    assert heart.stat().st_size == beats, "a child of the ended part lives on"
    assert summary(results).splitlines()[-1].startswith("ends ")
    assert run_parts([python("late", "pass")], tmp_path, 0.0)[0].outcome == "no time left"


def test_what_a_part_says_when_it_is_told_to_end_is_kept(tmp_path: Path) -> None:
    code = "import time\ntry: time.sleep(30)\nexcept KeyboardInterrupt: print('2 failed so far')"
    (result,) = run_parts([python("slow tests", code, 1.0)], tmp_path, 60.0)
    assert (result.outcome, result.tail) == ("ended after 1 s", "2 failed so far")


def test_a_visit_fits_into_ten_minutes(tmp_path: Path) -> None:
    """Parts rarely need their limits; if all did, the last would be left out."""
    parts = visit_parts(tmp_path)
    limits = {part.name: part.limit_s for part in parts}
    assert sum(limits.values()) <= 800
    assert sum(part.limit_s for part in parts[:7]) <= 500
    counters = next(part.command for part in parts if part.command[0] == "ncu")
    assert counters[1:3] == ("--clock-control", "none"), "the card's settings are not ours"
    assert len({part.name for part in parts}) == len(parts)


def test_a_visit_that_failed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [python("first", "raise SystemExit(1)")]
    monkeypatch.setattr(visit, "visit_parts", lambda out: failing)
    assert main(["bench", "visit", "--out", str(tmp_path)]) == 1
    assert "first" in capsys.readouterr().out
    assert (tmp_path / "all.txt").read_text().count("first") >= 2
