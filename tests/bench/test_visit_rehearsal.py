"""The command of a visit to a GPU, parts of it, on a fake card: its whole is
`tests/support/rehearse_visit.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import rehearse_visit
from support.fake_card import IN_A_PROCESS

PARTS = ("card", "compiler", "hardware counters", "memcheck")


def test_the_guide_has_the_command() -> None:
    assert rehearse_visit.COMMAND in (rehearse_visit.ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_parts_of_a_visit_run(tmp_path: Path) -> None:
    """With the programs of a machine that has a GPU, which run what they are given."""
    out, stubs = tmp_path / "out", tmp_path / "stubs"
    stubs.mkdir()
    rehearse_visit.make_stubs(stubs, sys.executable)
    code = f"""
import sys
from tpengine.bench import visit
from tpengine.cli.main import main
whole = visit.visit_parts
visit.visit_parts = lambda *folders: [p for p in whole(*folders) if p.name in {PARTS}]
sys.exit(main(["bench", "visit", "--out", {str(out)!r}, "--budget-s", "3000"]))
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
    assert "5 families of kernels, 0 wrong" in found
    calls = (stubs / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {
        "nvidia-smi", "nvcc", "ncu", "compute-sanitizer",
    }  # fmt: skip


def on_a_fake_card(code: str) -> str:
    """What a process of its own prints: the card stays in it."""
    done = subprocess.run(
        [sys.executable, "-c", f"{IN_A_PROCESS}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_a_fake_card_keeps_its_tensors_apart() -> None:
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "fake card (no GPU)"
    told = on_a_fake_card(
        "x = torch.ones(3, device='cuda')\n"
        "print(x.device, (x * 2)[1:].cpu().tolist(), torch.cuda.memory_allocated())\n"
        "x + torch.ones(3)"
    )
    assert told.startswith("cuda:0 [2.0, 2.0] 12\n")
    assert "same device: add" in told


def test_a_fake_graph_does_it_again() -> None:
    """Over the same memory; and what reads the device cannot be recorded."""
    told = on_a_fake_card(
        "x = torch.zeros(2, device='cuda')\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = (x + 1) * 2\n"
        "x.fill_(4)\n"
        "graph.replay()\n"
        "print(y.tolist())\n"
        "with torch.cuda.graph(graph): y.tolist()"
    )
    assert told.startswith("[10.0, 10.0]\n")
    assert "not permitted when stream is capturing: tolist" in told
