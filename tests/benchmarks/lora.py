"""What adapters add to the linear layers of a decode step on CPU, in bfloat16: the products of a
model's layers as an engine records them, without adapters, with those of one kind of layer, and
with all of them. Rows are divided equally among the adapters."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from benchmarks.common import add_numbers
from tpengine.bench.harness import SHAPES, report_head
from tpengine.bench.timing import ReadBandwidth
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.linear_ops import pack_linear_weight, packed_linear
from tpengine.ops.lora_ops import LoRARows, LoRASlots, add_lora, make_slots, pack_part, write_slot
from tpengine.ops.recording import Recording
from tpengine.worker.device import set_num_threads

_DTYPE = torch.bfloat16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-124m", "llama-1.1b"])
    add_numbers(
        parser,
        rows=(32, "of a step"),
        adapters=(8, "in a step"),
        rank=(16, "of each adapter, and of the slots"),
        layers=(6, "of the model"),
        rounds=(15, "median of these"),
        steps=(5, "in a round, of each kind; the fastest counts"),
    )


@dataclass
class Linear:
    """A linear layer with its adapters."""

    kind: str
    packed: torch.Tensor
    slots: LoRASlots
    x: torch.Tensor
    out: torch.Tensor


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table for each shape."""
    set_num_threads(1)
    bandwidth = ReadBandwidth().measure()
    print(report_head(None, {"memory": f"reads {bandwidth / 1e9:.1f} GB/s"}))
    for shape in args.shapes:
        with torch.inference_mode():
            show(shape, args, measure(shape, args), bandwidth)
    return 0


def kinds_of(shape: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Inputs and the outputs of each part, by kind of layer."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "qkv": (hidden, (hidden, kv_size, kv_size)),
        "o": (hidden, (hidden,)),
        "gate_up": (hidden, (inner, inner)),
        "down": (inner, (hidden,)),
    }


def make_linears(shape: str, args: argparse.Namespace) -> Iterator[Linear]:
    """The linear layers of a model with random weights, in the order of a step."""
    arena = HugePageArena()

    def allocate(shape: tuple[int, ...]) -> torch.Tensor:
        return arena.empty(math.prod(shape), _DTYPE).view(shape)

    for _ in range(args.layers):
        for kind, (inputs, parts) in kinds_of(shape).items():
            weight = torch.randn(sum(parts), inputs).to(_DTYPE)
            slots = make_slots(args.adapters, args.rank, inputs, parts, _DTYPE, allocate)
            for slot in range(args.adapters):
                own = [
                    pack_part(torch.randn(args.rank, inputs), torch.randn(size, args.rank), _DTYPE)
                    for size in parts
                ]
                write_slot(slots, slot, own)
            x, out = (torch.randn(args.rows, size).to(_DTYPE) for size in (inputs, sum(parts)))
            yield Linear(kind, pack_linear_weight(weight, arena), slots, x, out)


@dataclass
class Result:
    """Seconds of a step in each round, by the layers whose adapters take part ("" for none), and
    the bytes of these adapters."""

    seconds: dict[str, list[float]]
    num_bytes: dict[str, int]


def measure(shape: str, args: argparse.Namespace) -> Result:
    """Runs a step of each kind in each round."""
    linears = list(tqdm(make_linears(shape, args), desc=shape, total=4 * args.layers, leave=False))
    ends = [args.rows * (slot + 1) // args.adapters for slot in range(args.adapters)]
    groups = list(zip(range(args.adapters), [0, *ends], ends, strict=False))
    order = torch.randperm(args.rows, dtype=torch.int32)
    rows = LoRARows(order, torch.tensor(groups, dtype=torch.int32))
    kinds = list(kinds_of(shape))
    chosen = {"": [], **{kind: [kind] for kind in kinds}, "all": kinds}
    recordings = {name: record(linears, rows, own) for name, own in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in tqdm(range(args.rounds), desc=shape, leave=False):
        for name, recording in recordings.items():
            seconds[name].append(min(step_s(recording) for _ in range(args.steps)))
    num_bytes = {
        name: sum(linear.slots.nbytes for linear in linears if linear.kind in own)
        for name, own in chosen.items()
    }
    return Result(seconds, num_bytes)


def record(linears: Iterable[Linear], rows: LoRARows, kinds: list[str]) -> Recording:
    """A step, with the adapters of these kinds of layers."""
    recording = Recording(len(rows.rows))
    with recording.noting():
        for linear in linears:
            packed_linear(linear.out, linear.x, linear.packed, None)
            if linear.kind in kinds:
                add_lora(linear.out, linear.x, linear.slots, rows)
    return recording


def step_s(recording: Recording) -> float:
    start = time.perf_counter()
    recording.run(recording.num_rows)
    return time.perf_counter() - start


def show(shape: str, args: argparse.Namespace, result: Result, bandwidth: float) -> None:
    """Prints medians of the differences within a round, and the differences of the fastest."""
    base = result.seconds.pop("")
    us = 1e6 / args.layers
    print(
        f"{shape}: {args.rows} rows, {args.adapters} adapters of rank {args.rank}; a layer without "
        f"adapters takes {us * statistics.median(base):.0f} us (fastest {us * min(base):.0f})"
    )
    for name, times in result.seconds.items():
        added = [time - before for time, before in zip(times, base, strict=True)]
        share = statistics.median(time / before for time, before in zip(times, base, strict=True))
        print(
            f"{name:<8s} adds {us * statistics.median(added):6.1f} us, {100 * (share - 1):5.1f} % "
            f"(fastest {us * (min(times) - min(base)):6.1f} us, "
            f"{100 * (min(times) / min(base) - 1):5.1f} %); to read the adapters takes "
            f"{us * result.num_bytes[name] / bandwidth:6.1f} us"
        )
