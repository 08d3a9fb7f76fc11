"""What adapters add to the linear layers of a decode step on CPU, in bfloat16: the products of a
model's layers as an engine records them, without adapters, with those of one kind of layer, and
with all of them. Rows are divided equally among the adapters."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from benchmarks.common import add_numbers
from tpengine.bench.harness import SHAPES, report_head
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.linear import pack_linear_weight, packed_linear
from tpengine.ops.lora import LoRARows, LoRASlots, add_lora, make_slots, write_slot
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
    print(report_head(None))
    for shape in args.shapes:
        with torch.inference_mode():
            show(shape, args, measure(shape, args))
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
    arena, cpu = HugePageArena(), torch.device("cpu")
    for _ in range(args.layers):
        for kind, (inputs, parts) in kinds_of(shape).items():
            weight = torch.randn(sum(parts), inputs).to(_DTYPE)
            slots = make_slots(args.adapters, args.rank, inputs, parts, _DTYPE, cpu, arena)
            for slot in range(args.adapters):
                matrices = [
                    (torch.randn(args.rank, inputs), torch.randn(size, args.rank)) for size in parts
                ]
                write_slot(slots, slot, matrices)
            x, out = (torch.randn(args.rows, size).to(_DTYPE) for size in (inputs, sum(parts)))
            yield Linear(kind, pack_linear_weight(weight, arena), slots, x, out)


def measure(shape: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step in each round, by whose adapters take part: "" for none."""
    linears = list(tqdm(make_linears(shape, args), desc=shape, total=4 * args.layers, leave=False))
    per_adapter = args.rows / args.adapters
    ends = [round(per_adapter * (slot + 1)) for slot in range(args.adapters)]
    groups = list(zip(range(args.adapters), [0, *ends], ends, strict=False))
    columns = max(linear.slots.num_columns for linear in linears)
    rows = LoRARows(
        torch.randperm(args.rows, dtype=torch.int32),
        torch.tensor(groups, dtype=torch.int32),
        torch.empty(args.rows * columns),
    )
    kinds = list(kinds_of(shape))
    recordings = {
        name: record(linears, rows, chosen)
        for name, chosen in {"": [], **{kind: [kind] for kind in kinds}, "all": kinds}.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in recordings}
    for _ in tqdm(range(args.rounds), desc=shape, leave=False):
        for name, recording in recordings.items():
            seconds[name].append(min(step_s(recording) for _ in range(args.steps)))
    return seconds


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


def show(shape: str, args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    """Prints medians of the rounds, as differences within a round."""
    base = seconds.pop("")
    print(
        f"{shape}: {args.rows} rows, {args.adapters} adapters of rank {args.rank}, {args.layers} "
        f"layers; without adapters {1e6 * statistics.median(base) / args.layers:.1f} us a layer"
    )
    for name, times in seconds.items():
        added = [(time - before) / before for time, before in zip(times, base, strict=True)]
        us = [1e6 * (time - before) for time, before in zip(times, base, strict=True)]
        print(
            f"{name:<10s} adds {statistics.median(us) / args.layers:7.1f} us a layer, "
            f"{100 * statistics.median(added):5.1f} % of all products"
        )
