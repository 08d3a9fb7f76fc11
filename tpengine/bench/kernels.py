"""The kernels by themselves. On CPU: what share of the measured read bandwidth decode attention
draws, and how many operations per second prefill attention and linear layers do, in bfloat16. On a
GPU (`cuda_kernels`): the same and more, as shares of the card's copy bandwidth and matmul rate.

Caches are larger than the processor's own and are taken in turn; tables are random.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from tpengine.bench import cuda_kernels, cuda_timing
from tpengine.bench.cuda_timing import Ceilings, Row
from tpengine.bench.machine import (
    ReadBandwidth,
    describe_commit,
    describe_machine,
    fastest_s,
    import_pyplot,
)
from tpengine.config import DEVICES
from tpengine.errors import ConfigError, NativeLibraryError
from tpengine.ops import attention, cache, huge_pages, linear
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import has_cuda_kernels
from tpengine.worker.device import detect_device, set_num_threads

_BLOCK_SIZE = 16
_HEAD_DIM = 64
_HEADS = ((12, 12), (12, 4), (14, 2))
_DECODE = ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (128, 256))
_PREFILL = ((1, 512), (8, 256), (4, 1024))
_LINEAR_ROWS = (1, 8, 32, 128, 512)
_LINEARS = ((768, 4096), (896, 9728), (2048, 768), (4864, 896))
_CACHE_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--repeats", type=int, default=9, help="on CPU: best of these (default: 9)")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="auto: a GPU if there is one (default: auto)",
    )
    parser.add_argument(
        "--only",
        choices=tuple(cuda_kernels.GROUPS),
        nargs="+",
        help="on a GPU: these alone; default: all",
    )
    parser.add_argument(
        "--match", metavar="NAME", default="", help="on a GPU: of decode this case; default: all"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="on a GPU: PNG of decode's share of the copy bandwidth"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per case."""
    if detect_device(args.device) == "cuda":
        return _run_on_gpu(args)
    if args.only or args.match or args.plot:
        raise ConfigError(
            "--only, --match and --plot are for a GPU; leave them out, or use --device cuda"
        )
    set_num_threads(1)
    bandwidth = ReadBandwidth().measure()
    lines = []
    cases = [
        *(
            lambda c=c: _decode(*c, args.repeats, bandwidth)
            for c in itertools.product(_HEADS, _DECODE)
        ),
        *(lambda c=c: _prefill(*c, args.repeats) for c in itertools.product(_HEADS, _PREFILL)),
        *(
            lambda c=c: _linear(*c, args.repeats, bandwidth)
            for c in itertools.product(_LINEARS, _LINEAR_ROWS)
        ),
    ]
    for case in tqdm(cases, desc="cases", unit="case"):
        lines.append(case())
    print(f"machine   {describe_machine()}")
    print(f"commit    {describe_commit()}")
    print(f"memory    reads {bandwidth / 1e9:.1f} GB/s")
    print("\n".join(lines))
    return 0


def _run_on_gpu(args: argparse.Namespace) -> int:
    if not has_cuda_kernels():
        raise NativeLibraryError(
            "libtpengine_cuda.so is not installed, there is nothing to measure: install the CUDA "
            "toolkit (nvcc) and run `TPENGINE_CUDA=ON pip install .`"
        )
    if args.plot:
        import_pyplot()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    print(f"machine   {describe_machine()}")
    print(f"commit    {describe_commit()}")
    with torch.inference_mode():
        print(f"card      {cuda_timing.describe_card(device)}", flush=True)
        ceilings = cuda_timing.measure_ceilings(device)
        print(f"ceilings  {ceilings}", flush=True)
        for name in args.only or cuda_kernels.GROUPS:
            timer = cuda_timing.eager_s if name in cuda_kernels.EAGER else cuda_timing.graph_s
            for row in cuda_kernels.GROUPS[name](
                cuda_kernels.Setting(device, timer, match=args.match)
            ):
                print(row.text(ceilings), flush=True)
                rows.append(row)
            torch.cuda.empty_cache()
    if args.plot:
        plot_shares(args.plot, rows, ceilings)
    return 0


def plot_shares(path: str, rows: Sequence[Row], ceilings: Ceilings) -> None:
    """Bars of decode attention's share of the copy bandwidth, by case and dtype."""
    pyplot = import_pyplot()
    shown = [row for row in rows if row.kernel.startswith("decode")]
    shares = [100 * row.num_bytes / row.seconds / ceilings.copy for row in shown]
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.25 * len(shown)))
    axes.barh([f"{row.kernel} {row.case}" for row in shown], shares)
    axes.invert_yaxis()
    axes.set_xlabel(f"% of the measured copy bandwidth ({ceilings.copy / 1e12:.2f} TB/s)")
    axes.set_title(describe_machine(), fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


class _Caches:
    """As many K and V caches as fill memory beyond the processor's caches, taken in turn."""

    def __init__(self, num_kv_heads: int, num_seqs: int, seq_len: int) -> None:
        self.blocks = num_seqs * -(-seq_len // _BLOCK_SIZE)
        shapes = cache.kv_cache_shapes(
            "cpu", torch.bfloat16, self.blocks, _BLOCK_SIZE, num_kv_heads, _HEAD_DIM
        )
        size = 4 * self.blocks * _BLOCK_SIZE * num_kv_heads * _HEAD_DIM
        count = max(1, _CACHE_BYTES // size)
        pairs = [
            tuple(huge_pages.empty(shape, torch.bfloat16).normal_() for shape in shapes)
            for _ in range(count)
        ]
        self.next = itertools.cycle(pairs).__next__
        table = torch.randperm(self.blocks, dtype=torch.int64).to(torch.int32)
        self.table = table.view(num_seqs, -1)
        self.seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)


def _time(action: Callable[[], object], repeats: int) -> float:
    with torch.inference_mode():
        return fastest_s(action, repeats)


def _decode(heads: tuple[int, int], case: tuple[int, int], repeats: int, bandwidth: float) -> str:
    (num_heads, num_kv_heads), (num_seqs, seq_len) = heads, case
    caches = _Caches(num_kv_heads, num_seqs, seq_len)
    q = torch.randn(num_seqs, num_heads, _HEAD_DIM).to(torch.bfloat16)
    out = torch.empty_like(q)

    def action() -> None:
        k, v = caches.next()
        attention.paged_attention(
            out, q, k, v, caches.table, caches.seq_lens, _HEAD_DIM**-0.5, None, None
        )

    seconds = _time(action, repeats)
    rate = 4 * num_seqs * seq_len * num_kv_heads * _HEAD_DIM / seconds
    return (
        f"decode    heads {num_heads:>2}/{num_kv_heads:<2} {num_seqs:>3} x {seq_len:<5} "
        f"{1e3 * seconds:8.3f} ms   {rate / 1e9:6.1f} GB/s   {100 * rate / bandwidth:5.1f} %"
    )


def _prefill(heads: tuple[int, int], case: tuple[int, int], repeats: int) -> str:
    (num_heads, num_kv_heads), (num_seqs, seq_len) = heads, case
    caches = _Caches(num_kv_heads, num_seqs, seq_len)
    q = torch.randn(num_seqs * seq_len, num_heads, _HEAD_DIM).to(torch.bfloat16)
    out = torch.empty_like(q)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * seq_len

    def action() -> None:
        k, v = caches.next()
        attention.prefill_attention(
            out, q, k, v, caches.table, starts, caches.seq_lens, _HEAD_DIM**-0.5, None, None
        )

    seconds = _time(action, repeats)
    operations = 2 * num_seqs * seq_len * seq_len * num_heads * _HEAD_DIM  # causal: half of 4
    return (
        f"prefill   heads {num_heads:>2}/{num_kv_heads:<2} {num_seqs:>3} x {seq_len:<5} "
        f"{1e3 * seconds:8.3f} ms   {operations / seconds / 1e9:6.1f} GFLOP/s"
    )


def _linear(shape: tuple[int, int], rows: int, repeats: int, bandwidth: float) -> str:
    inputs, outputs = shape
    count = max(1, _CACHE_BYTES // (2 * inputs * outputs))
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    arena = HugePageArena()  # where the engine has them
    following = itertools.cycle(
        [linear.pack_linear_weight(weight, arena) for _ in range(count)]
    ).__next__
    packed_bytes = following().nbytes
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    seconds = _time(lambda: linear.packed_linear(out, x, following(), None), repeats)
    rate = packed_bytes / seconds
    return (
        f"linear    {inputs:>4} -> {outputs:<5} {rows:>3} rows  {1e3 * seconds:8.3f} ms   "
        f"{2 * rows * inputs * outputs / seconds / 1e9:6.1f} GFLOP/s   weights at "
        f"{rate / 1e9:5.1f} GB/s, {100 * rate / bandwidth:5.1f} %"
    )
