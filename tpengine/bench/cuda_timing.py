"""Times of work on a GPU, and what the card can do at best: both measured by CUDA events."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tpengine.bench.predictions import compare

_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
_REPEATS = 7
_BUS_BYTES = 64 << 20
_CLOCKS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"

Action = Callable[[], object]
Timer = Callable[[Sequence[Action]], float]
"""Seconds per action, of actions that follow each other."""


def graph_s(actions: Sequence[Action]) -> float:
    """Median over replays of one CUDA graph that holds all the actions, so that no launch is
    waited for. They should work on different data, more of it than the card's cache holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for action in actions:
            action()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for action in actions:
            action()
    graph.replay()
    return _events_s(graph.replay) / len(actions)


def eager_s(actions: Sequence[Action]) -> float:
    """The same without a graph, for what cannot be recorded; launches count where they are longer
    than the work."""
    actions[0]()

    def all_of_them() -> None:
        for action in actions:
            action()

    all_of_them()
    return _events_s(all_of_them) / len(actions)


def _events_s(action: Action) -> float:
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def describe_card(device: torch.device) -> str:
    """What kind of card it is, how it is clocked now, and what is installed for it."""
    card = torch.cuda.get_device_properties(device)
    sizes = {"L2": card.L2_cache_size >> 20, "memory": card.total_memory >> 20}
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader", f"-i={card.uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        clocks = done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.SubprocessError) as error:
        clocks = f"not known ({error})"
    return (
        f"{card.name}, compute capability {card.major}.{card.minor}, {card.multi_processor_count} "
        f"multiprocessors, {', '.join(f'{name} {mib} MiB' for name, mib in sizes.items())}, shared "
        f"memory of a block up to {card.shared_memory_per_block_optin >> 10} KiB, "
        f"CUDA {torch.version.cuda}\nclocks    {_CLOCKS}: {clocks}"
    )


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best, in bytes and operations per second.

    Attributes:
        copy: from device to device, bytes read and written.
        read: bytes that a sum reads.
        matmul: bfloat16, 8192 cubed.
        to_host, to_device: pinned memory, in pieces of 64 MiB.
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
    """Takes a few seconds and 4 GiB of the card."""
    source = torch.zeros(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = graph_s([lambda: target.copy_(source)] * 4)
    read_s = graph_s([source.sum] * 4)
    a, b = (
        torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    matmul_s = graph_s([lambda: F.linear(a, b)] * 10)
    on_card = torch.zeros(_BUS_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    out_s = eager_s([lambda: on_host.copy_(on_card, non_blocking=True)] * 4)
    in_s = eager_s([lambda: on_card.copy_(on_host, non_blocking=True)] * 4)
    return Ceilings(
        copy=2 * _COPY_BYTES / copy_s,
        read=_COPY_BYTES / read_s,
        matmul=2 * _MATMUL_SIZE**3 / matmul_s,
        to_host=_BUS_BYTES / out_s,
        to_device=_BUS_BYTES / in_s,
    )


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        kernel: and where it applies its backend and dtype.
        case: batch, context, group size and the like.
        num_bytes, num_flop: what the work needs at least, each counted once.
        predict: seconds that it should take, by the card's copy bandwidth; None: not predicted.
    """

    kernel: str
    case: str
    seconds: float
    num_bytes: float = 0.0
    num_flop: float = 0.0
    predict: Callable[[float], float] | None = None

    def text(self, ceilings: Ceilings) -> str:
        """As it is printed, with shares of what the card can do."""
        rate, flops = self.num_bytes / self.seconds, self.num_flop / self.seconds
        parts = [f"{self.kernel:<24s} {self.case:<34s} {1e6 * self.seconds:10.1f} us"]
        if self.num_bytes:
            parts.append(f"{rate / 1e9:8.1f} GB/s {100 * rate / ceilings.copy:6.1f} % of copy")
        if self.num_flop:
            share = 100 * flops / ceilings.matmul
            parts.append(f"{flops / 1e12:8.1f} TFLOP/s {share:6.1f} % of matmul")
        if self.predict is not None:
            parts.append(compare(self.seconds, self.predict(ceilings.copy)))
        return "   ".join(parts)
