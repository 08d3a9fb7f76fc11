"""The command of a visit to a GPU, parts of it, on a fake card: its whole is
`tests/support/rehearse_visit.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as benchmarks
from benchmarks import visit
from support import rehearse_visit
from support.fake_card import IN_A_PROCESS

from tpengine.cli.main import build_parser

PARTS = ("card", "compiler", "hardware counters", "memcheck")


def test_the_docs_say_the_command() -> None:
    assert rehearse_visit.COMMAND in (rehearse_visit.ROOT / "docs" / "gpu.md").read_text()


def words_after(program: str, folder: Path) -> list[list[str]]:
    """The arguments that parts of a visit give to a program."""
    commands = [list(part.command) for part in visit.visit_parts(folder, folder)]
    return [words[words.index(program) + 1 :] for words in commands if program in words]


def test_the_options_of_each_part_are_known(tmp_path: Path) -> None:
    for program, parser_for, number in (
        ("tpengine", build_parser, 4),
        ("tests/benchmarks", benchmarks.build_parser, 4),
    ):
        commands = words_after(program, tmp_path)
        assert len(commands) == number
        for words in commands:
            assert parser_for(words).parse_args(words).run


@pytest.mark.check
def test_each_part_with_tests_selects_some(tmp_path: Path) -> None:
    selections = [[*words, "--collect-only", "-q"] for words in words_after("pytest", tmp_path)]
    assert len(selections) == 10
    code = f"import sys, pytest; sys.exit(max(map(pytest.main, {selections!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=rehearse_visit.ROOT, timeout=240)
    assert done.returncode == 0


@pytest.mark.check
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_parts_of_a_visit_run(tmp_path: Path) -> None:
    """With the programs of a machine that has a GPU, which run what they are given."""
    out, stubs = tmp_path / "out", tmp_path / "stubs"
    stubs.mkdir()
    rehearse_visit.make_stubs(stubs, sys.executable)
    code = f"""
import sys
sys.path.insert(0, "tests")
from benchmarks import visit
from benchmarks.__main__ import main
whole = visit.visit_parts
visit.visit_parts = lambda *folders: [p for p in whole(*folders) if p.name in {PARTS}]
sys.exit(main(["visit", "--out", {str(out)!r}, "--budget-s", "3000"]))
"""
    done = subprocess.run(
        [stubs / "python3", "-c", code],
        cwd=rehearse_visit.ROOT,
        env=rehearse_visit.environment(stubs, out) | {"PYTHONPATH": str(rehearse_visit.ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.rpartition("--- parts\n")[2].splitlines()
    assert [row[:32].strip() for row in rows] == list(PARTS)
    assert all(row.endswith("  passed") for row in rows)
    assert "predicted " in done.stdout
    found = (out / "all.txt").read_text()
    assert "7 families of kernels, 0 wrong" in found
    calls = (stubs / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {
        "nvidia-smi", "nvcc", "ncu", "compute-sanitizer",
    }  # fmt: skip


ON_A_FAKE_CARD = f"""{IN_A_PROCESS}
def why(do, *given):
    try:
        do(*given)
    except RuntimeError as error:
        return error

x = torch.ones(3, device='cuda')
print(x.device, (x * 2)[1:].cpu().tolist(), torch.cuda.memory_allocated())
print(why(x.add, torch.ones(3)))
x = torch.zeros(2, device='cuda')
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): y = (x + 1) * 2
x.fill_(4)
graph.replay()
print(y.tolist())
with torch.cuda.graph(graph): print(why(y.tolist))
"""


def test_a_fake_card() -> None:
    """Its tensors stand apart; a graph runs again over the same memory, and what reads the device
    cannot be recorded. The card stays in the process that made it."""
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "fake card (no GPU)"
    command = [sys.executable, "-c", ON_A_FAKE_CARD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    apart, mixed, replayed, recorded = done.stdout.splitlines()
    assert apart == "cuda:0 [2.0, 2.0] 12"
    assert "same device: add" in mixed
    assert replayed == "[10.0, 10.0]"
    assert "not permitted when stream is capturing: tolist" in recorded
