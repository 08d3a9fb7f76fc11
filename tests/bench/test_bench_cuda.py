"""The benchmark of CUDA kernels: its cases run, small and on the CPU; its table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from benchmarks.__main__ import main as run_benchmark
from benchmarks.card_times import Ceilings, compare, decode_s
from benchmarks.kernel_rows import GROUPS, Row, Setting
from benchmarks.kernel_times import in_turn_s

from tpengine.bench.timing import Action

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
    assert " 17.2 TFLOP/s    2.1 % of matmul" in row.text(CEILINGS)
    on_cpu = Row("decode bfloat16", "1 x 1024", 1e-3, 1 << 20, 1 << 20).rates(4e9)
    assert on_cpu.endswith(" 1.0 GB/s   26.2 % of reads        1.0 GFLOP/s")


def test_actions_are_timed_in_turn() -> None:
    calls: list[int] = []
    assert 0 < in_turn_s([lambda n=n: calls.append(n) for n in range(2)], repeats=4) < 1
    assert calls == [0, 1, 0, 1, 0]


def test_gpu_options_are_for_gpus() -> None:
    with pytest.raises(SystemExit, match="ConfigError: --only and --match are for a GPU"):
        run_benchmark(["kernels", "--device", "cpu", "--only", "decode"])


def test_one_case_by_its_name() -> None:
    setting = Setting(torch.device("cpu"), once, torch.bfloat16, shrink=512, match="1 x 32768")
    with torch.inference_mode():
        names = {row.case for row in GROUPS["decode"](setting)}
    assert {name.rpartition(", ")[2] for name in names} == {"1 x 64"}


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
