"""The kernels alone. On CPU, in bfloat16: the share of the measured read bandwidth that decode
attention reaches, and operations per second of prefill attention and linear layers. On a GPU:
more kernels, as shares of the card's copy bandwidth and matmul rate.

The data exceeds the processor's caches and is used in turn; block tables are random.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import kernel_rows
from benchmarks.card_times import eager_s, graph_s, measure_ceilings
from benchmarks.kernel_rows import Row, Setting
from tpengine.bench.harness import BenchOptions, report_head
from tpengine.bench.timing import Action, ReadBandwidth, fastest_s
from tpengine.config import DEVICES
from tpengine.errors import ConfigError, NativeLibraryError
from tpengine.ops import attention_ops as attention
from tpengine.ops.library import has_cuda_kernels
from tpengine.options import option
from tpengine.worker.device import detect_device, set_num_threads

_HEAD_DIM = 64
_HEADS = ((12, 12), (12, 4), (14, 2))
_DECODE = ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (128, 256))
_PREFILL = ((1, 512), (8, 256), (4, 1024))
_LINEAR_ROWS = (1, 8, 32, 128, 512)
_LINEARS = ((768, 4096), (896, 9728), (2048, 768), (4864, 896))
_CYCLED_BYTES = 256 << 20
_CLOCKS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"


@dataclass
class KernelOptions(BenchOptions):
    """Where and how to measure."""

    repeats: int = option(9, at_least=1)
    """On CPU: the fastest of this many calls counts."""
    device: str = option("auto", DEVICES)
    """auto: a GPU if there is one."""
    match: str = option("", metavar="NAME")
    """On a GPU: only this case of decode, such as "64 x 4096"; default: all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    KernelOptions.add_cli_args(parser)
    groups = tuple(kernel_rows.GROUPS)
    parser.add_argument("--only", choices=groups, nargs="+", help="on a GPU: these; default: all")


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per case."""
    options = KernelOptions.parse(args)
    if detect_device(options.device) == "cuda":
        return _run_on_gpu(options, args.only or kernel_rows.GROUPS)
    if args.only or options.match:
        raise ConfigError("--only and --match are for a GPU; leave them out, or use --device cuda")
    set_num_threads(1)
    bandwidth = ReadBandwidth().measure()
    timer = partial(in_turn_s, repeats=options.repeats)
    setting = Setting(torch.device("cpu"), timer, head_dim=_HEAD_DIM, cycled_bytes=_CYCLED_BYTES)
    cases = [
        *(partial(_decode, setting, *case) for case in itertools.product(_HEADS, _DECODE)),
        *(partial(_prefill, setting, *case) for case in itertools.product(_HEADS, _PREFILL)),
        *(
            partial(kernel_rows.linear_row, setting, *shape, rows)
            for shape, rows in itertools.product(_LINEARS, _LINEAR_ROWS)
        ),
    ]
    with torch.inference_mode():
        rows = [case() for case in tqdm(cases, desc="cases", unit="case")]
    print(report_head(None, {"memory": f"reads {bandwidth / 1e9:.1f} GB/s"}, width=10))
    print("\n".join(row.rates(bandwidth) for row in rows))
    return 0


def _decode(setting: Setting, heads: tuple[int, int], case: tuple[int, int]) -> Row:
    num_seqs, seq_len = case
    lengths, name = [seq_len] * num_seqs, f"{num_seqs} x {seq_len}"
    return kernel_rows.decode_row(setting, setting.dtype, heads, lengths, name)


def _prefill(setting: Setting, heads: tuple[int, int], case: tuple[int, int]) -> Row:
    """Attention of prompts over the paged cache, as on a CPU; a GPU reads K and V of the step."""
    num_seqs, seq_len = case
    num_heads, num_kv_heads = heads
    num_blocks = num_seqs * -(-seq_len // kernel_rows.BLOCK_SIZE)
    table = torch.randperm(num_blocks).int().view(num_seqs, -1)
    seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * seq_len
    q = setting.randn(num_seqs * seq_len, num_heads, _HEAD_DIM)
    out = torch.empty_like(q)

    def make() -> Action:
        k, v = setting.caches(num_blocks, num_kv_heads, setting.dtype)
        return lambda: attention.prefill_attention(
            out, q, k, v, table, starts, seq_lens, _HEAD_DIM**-0.5, None, None
        )

    num_bytes = 4 * num_seqs * seq_len * num_kv_heads * _HEAD_DIM
    num_flop = 2 * num_seqs * seq_len * seq_len * num_heads * _HEAD_DIM  # causal: half of 4
    name = f"{num_heads}/{num_kv_heads} heads, {num_seqs} x {seq_len}"
    return Row("prefill", name, setting.seconds(num_bytes, make), num_flop=num_flop)


def _run_on_gpu(options: KernelOptions, groups: Iterable[str]) -> int:
    if not has_cuda_kernels():
        raise NativeLibraryError(
            "libtpengine_cuda.so is not installed, so there is nothing to measure: install the "
            "CUDA toolkit (nvcc) and run `TPENGINE_CUDA=ON pip install .`"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    print(report_head(None, {"card": describe_card(device)}, width=10), flush=True)
    with torch.inference_mode():
        ceilings = measure_ceilings(device)
        print(f"ceilings  {ceilings}", flush=True)
        for name in groups:
            timer = eager_s if name in kernel_rows.EAGER else graph_s
            setting = kernel_rows.Setting(device, timer, match=options.match)
            for row in kernel_rows.GROUPS[name](setting):
                print(row.text(ceilings), flush=True)
            torch.cuda.empty_cache()
    return 0


def describe_card(device: torch.device) -> str:
    """The model and sizes of the card, its clocks at this moment, and the installed versions."""
    card: Any = torch.cuda.get_device_properties(device)  # the stub lacks some of its fields
    sizes = {"L2": card.L2_cache_size >> 20, "memory": card.total_memory >> 20}
    query = [f"--query-gpu={_CLOCKS}", "--format=csv,noheader", f"--id=GPU-{card.uuid}"]
    command = ["nvidia-smi", *query]
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


def in_turn_s(actions: Sequence[Action], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls; each call runs the next action."""
    in_turn = itertools.cycle(actions)
    return fastest_s(lambda: next(in_turn)(), repeats)
