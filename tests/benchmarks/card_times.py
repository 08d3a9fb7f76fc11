"""Times of work in CUDA graphs, the limits of a card, and predicted times.

The prediction of a kernel's time follows from the measured copy bandwidth of the card alone, so
that one model covers cards of different speed. Its constants are estimates, made before the first
run on a card: a time far from its prediction needs a look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tpengine.bench import timing
from tpengine.bench.timing import Action, copy_bandwidth, events_s

MATMUL_SIZE = 8192
BUS_BYTES = 64 << 20

TOLERANCE = 0.10
_STREAM_SHARE = 0.94
"""Share of the copy bandwidth that a kernel reaches if it reads each byte once."""
_START_S = 3.5e-6
"""Latencies in sequence: the launch, the length, the block number, the first bytes."""
_SPLIT_S = 2.5e-6
"""The second kernel, which reduces the parts of a split context."""
_SMALL_S = {False: 1.95e-6, True: 2.5e-6}
"""A kernel of few bytes in a graph, by whether there are many rows."""
_LINEAR_SHARE = {False: 0.90, True: 0.85}
"""Share of the copy bandwidth at which torch's matrix products read weights, by the same."""
_MANY_ROWS = 16

Timer = Callable[[Sequence[Action]], float]
"""Returns the seconds per action of actions that run one after another."""


def run_all(actions: Sequence[Action]) -> None:
    """Runs the actions one after another."""
    for action in actions:
        action()


def eager_s(actions: Sequence[Action]) -> float:
    """Times the actions without a graph, for work that cannot be recorded, in seconds per action. A
    launch that takes longer than its work is part of the time."""
    run_all(actions)
    return events_s(partial(run_all, actions)) / len(actions)


def graph_s(actions: Sequence[Action]) -> float:
    """Times a CUDA graph of all the actions, so that no launch delays them: the median of replays,
    in seconds per action. The actions should work on more data than the card's cache holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_all(actions)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run_all(actions)
    graph.replay()
    return events_s(graph.replay) / len(actions)


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of the card, in bytes and operations per second.

    Attributes:
        copy: bytes read and written by a copy from device to device.
        read: bytes read by a sum.
        matmul: operations of a bfloat16 matrix product of size 8192.
        to_host, to_device: copies of 64 MiB from and to pinned memory.
    """

    copy: float
    read: float
    matmul: float
    to_host: float
    to_device: float

    def __str__(self) -> str:
        return (
            f"copy {self.copy / 1e12:.2f} TB/s, read {self.read / 1e12:.2f} TB/s, bf16 matmul "
            f"{self.matmul / 1e12:.0f} TFLOP/s, to the host {self.to_host / 1e9:.1f} GB/s, from it "
            f"{self.to_device / 1e9:.1f} GB/s"
        )


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measures for a few seconds, with 4 GiB of the card's memory."""
    copy = copy_bandwidth(device)
    source = torch.zeros(timing.COPY_BYTES // 4, dtype=torch.float32, device=device)
    read_s = graph_s([source.sum] * 4)
    a, b = (torch.randn([MATMUL_SIZE] * 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    matmul_s = graph_s([lambda: F.linear(a, b)] * 10)
    on_card = torch.zeros(BUS_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    out_s = eager_s([lambda: on_host.copy_(on_card, non_blocking=True)] * 4)
    in_s = eager_s([lambda: on_card.copy_(on_host, non_blocking=True)] * 4)
    return Ceilings(
        copy=copy,
        read=timing.COPY_BYTES / read_s,
        matmul=2 * MATMUL_SIZE**3 / matmul_s,
        to_host=BUS_BYTES / out_s,
        to_device=BUS_BYTES / in_s,
    )


def decode_s(num_bytes: float, copy: float, is_split: bool) -> float:
    """Predicts decode attention, in seconds.

    Args:
        num_bytes: size of the K and V that it reads.
        copy: measured `Ceilings.copy`.
        is_split: at least one context is split into parts.
    """
    return num_bytes / (_STREAM_SHARE * copy) + _START_S + is_split * _SPLIT_S


def small_s(num_bytes: float, copy: float, rows: int) -> float:
    """Predicts an elementwise kernel in a graph, in seconds."""
    return num_bytes / (_STREAM_SHARE * copy) + _SMALL_S[rows > _MANY_ROWS]


def linear_s(weight_bytes: float, copy: float, rows: int) -> float:
    """Predicts a matrix product with few rows, which is bound by its weights, in seconds."""
    return weight_bytes / (_LINEAR_SHARE[rows > _MANY_ROWS] * copy)


def compare(measured_s: float, predicted_s: float) -> str:
    """The prediction and the deviation of the measured time, marked if it exceeds `TOLERANCE`."""
    off = measured_s / predicted_s - 1
    unit, factor = ("ms", 1e3) if predicted_s >= 1e-3 else ("us", 1e6)
    mark = "" if abs(off) <= TOLERANCE else "  !! slower" if off > 0 else "  !! faster"
    return f"predicted {factor * predicted_s:7.2f} {unit} {100 * off:+7.1f} %{mark}"
