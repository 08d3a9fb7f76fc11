"""Times of work, the limits of the machine, and predicted times.

Work on a GPU is timed by CUDA events. The prediction of a time on a GPU follows from the measured
copy bandwidth of the card alone, so that one model covers cards of different speed. Its constants
are estimates, made before the first run on a card: a time far from its prediction needs a look.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tpengine.ops import fused_ops as fused
from tpengine.ops import huge_pages

_READ_BYTES = 1 << 29
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192
REPEATS = 7
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
_HEAD_S = {False: 0.06e-3, True: 0.10e-3}
"""Logits without the read of their weights, sampling, the copy of the ids, by the same."""
_GAP_S = {False: 0.05e-3, True: 0.15e-3}
"""Between the graphs of two steps, by the same."""
_SMALL_KERNELS = 4
"""Of a layer: two norms, rotary embedding with cache write, gated activation."""
_MANY_ROWS = 16

Action = Callable[[], object]
Timer = Callable[[Sequence[Action]], float]
"""Returns the seconds per action of actions that run one after another."""


def graph_s(actions: Sequence[Action]) -> float:
    """Times a CUDA graph of all the actions, so that no launch delays them: the median of replays,
    in seconds per action. The actions should work on more data than the card's cache holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run_all(actions)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _run_all(actions)
    graph.replay()
    return _events_s(graph.replay) / len(actions)


def eager_s(actions: Sequence[Action]) -> float:
    """Times the actions without a graph, for work that cannot be recorded, in seconds per action. A
    launch that takes longer than its work is part of the time."""
    _run_all(actions)
    return _events_s(partial(_run_all, actions)) / len(actions)


def _run_all(actions: Sequence[Action]) -> None:
    for action in actions:
        action()


def _events_s(action: Action) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


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
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = graph_s([lambda: target.copy_(source)] * 4)
    read_s = graph_s([source.sum] * 4)
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    matmul_s = graph_s([lambda: F.linear(a, b)] * 10)
    on_card = torch.zeros(BUS_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    out_s = eager_s([lambda: on_host.copy_(on_card, non_blocking=True)] * 4)
    in_s = eager_s([lambda: on_card.copy_(on_host, non_blocking=True)] * 4)
    return Ceilings(
        copy=2 * COPY_BYTES / copy_s,
        read=COPY_BYTES / read_s,
        matmul=2 * MATMUL_SIZE**3 / matmul_s,
        to_host=BUS_BYTES / out_s,
        to_device=BUS_BYTES / in_s,
    )


def fastest_s(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest call, after a first call that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


class ReadBandwidth:
    """Bytes per second that all threads together read from memory.

    It keeps half a gigabyte of its own: more than any cache holds, and the first access to new
    memory would be slow.
    """

    def __init__(self) -> None:
        self._data = huge_pages.empty((64, _READ_BYTES // 4 // 64), torch.float32).zero_()
        self._out = torch.empty(64, dtype=torch.int64)

    def measure(self, repeats: int = REPEATS) -> float:
        """The best of two ways to read, each the fastest of `repeats` calls."""
        readers = (self._data.sum, lambda: fused.argmax(self._out, self._data))
        return _READ_BYTES / min(fastest_s(reader, repeats) for reader in readers)


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


@dataclass(frozen=True)
class DecodeStep:
    """A step in which every sequence decodes.

    Attributes:
        weight_bytes: size of the weights that a step reads.
        kv_bytes: size of K and V of all sequences in one layer.
    """

    weight_bytes: float
    kv_bytes: float
    num_layers: int
    batch_size: int

    def seconds(self, copy: float) -> float:
        """Predicts the step with CUDA graphs and asynchronous scheduling."""
        many = self.batch_size > _MANY_ROWS
        layer_s = decode_s(self.kv_bytes, copy, True) + _SMALL_KERNELS * small_s(
            0, copy, self.batch_size
        )
        linears_s = linear_s(self.weight_bytes, copy, self.batch_size)
        return linears_s + self.num_layers * layer_s + _HEAD_S[many] + _GAP_S[many]


def compare(measured_s: float, predicted_s: float) -> str:
    """The prediction and the deviation of the measured time, marked if it exceeds `TOLERANCE`."""
    off = measured_s / predicted_s - 1
    unit, factor = ("ms", 1e3) if predicted_s >= 1e-3 else ("us", 1e6)
    mark = "" if abs(off) <= TOLERANCE else "  !! slower" if off > 0 else "  !! faster"
    return f"predicted {factor * predicted_s:7.2f} {unit} {100 * off:+7.1f} %{mark}"
