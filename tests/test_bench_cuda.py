"""The benchmark of CUDA kernels: its cases run, small and on the CPU; its table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tpengine.bench import kernels
from tpengine.bench.cuda_kernels import GROUPS, Setting
from tpengine.bench.cuda_timing import Action, Ceilings, Row
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
    assert "--only and --plot are for a GPU" in capsys.readouterr().err
