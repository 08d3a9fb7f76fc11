"""The kernels alone. On CPU, in bfloat16: the share of the measured read bandwidth that decode
attention reaches, and operations per second of prefill attention and linear layers. On a GPU
(`cuda_kernels`): more kernels, as shares of the card's copy bandwidth and matmul rate.

The data exceeds the processor's caches and is used in turn; block tables are random.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from tpengine.bench import cuda_kernels, timing
from tpengine.bench.harness import import_pyplot, plot, report_head
from tpengine.bench.timing import Ceilings, ReadBandwidth, Row, fastest_s
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
        help="auto: a GPU if there is one (default: %(default)s)",
    )
    groups = tuple(cuda_kernels.GROUPS)
    parser.add_argument("--only", choices=groups, nargs="+", help="on a GPU: these; default: all")
    parser.add_argument(
        "--match", metavar="NAME", default="", help="on a GPU: this case of decode; default: all"
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
    cases = [
        *(partial(_decode, *case, bandwidth) for case in itertools.product(_HEADS, _DECODE)),
        *(partial(_prefill, *case) for case in itertools.product(_HEADS, _PREFILL)),
        *(partial(_linear, *case, bandwidth) for case in itertools.product(_LINEARS, _LINEAR_ROWS)),
    ]
    with torch.inference_mode():
        lines = [case(args.repeats) for case in tqdm(cases, desc="cases", unit="case")]
    print(report_head(None, {"memory": f"reads {bandwidth / 1e9:.1f} GB/s"}, width=10))
    print("\n".join(lines))
    return 0


def _run_on_gpu(args: argparse.Namespace) -> int:
    if not has_cuda_kernels():
        raise NativeLibraryError(
            "libtpengine_cuda.so is not installed, so there is nothing to measure: install the "
            "CUDA toolkit (nvcc) and run `TPENGINE_CUDA=ON pip install .`"
        )
    if args.plot:
        import_pyplot()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    print(report_head(None, {"card": timing.describe_card(device)}, width=10), flush=True)
    with torch.inference_mode():
        ceilings = timing.measure_ceilings(device)
        print(f"ceilings  {ceilings}", flush=True)
        for name in args.only or cuda_kernels.GROUPS:
            timer = timing.eager_s if name in cuda_kernels.EAGER else timing.graph_s
            setting = cuda_kernels.Setting(device, timer, match=args.match)
            for row in cuda_kernels.GROUPS[name](setting):
                print(row.text(ceilings), flush=True)
                rows.append(row)
            torch.cuda.empty_cache()
    if args.plot:
        plot_shares(args.plot, rows, ceilings)
    return 0


def plot_shares(path: str, rows: Sequence[Row], ceilings: Ceilings) -> None:
    """Bars of decode attention's share of the copy bandwidth, by case and dtype."""
    shown = [row for row in rows if row.kernel.startswith("decode")]
    shares = [100 * row.num_bytes / row.seconds / ceilings.copy for row in shown]
    with plot(path, "decode attention", (7, 1 + 0.25 * len(shown))) as (panel,):
        panel.barh([f"{row.kernel} {row.case}" for row in shown], shares)
        panel.invert_yaxis()
        panel.set_xlabel(f"% of the measured copy bandwidth ({ceilings.copy / 1e12:.2f} TB/s)")
        panel.tick_params(labelsize=7)


class _Attention:
    """Data of one case of attention: caches larger than the processor's own, used in turn."""

    def __init__(
        self, heads: tuple[int, int], num_seqs: int, seq_len: int, num_queries: int
    ) -> None:
        num_heads, num_kv_heads = heads
        num_blocks = num_seqs * -(-seq_len // _BLOCK_SIZE)
        shapes = cache.kv_cache_shapes(
            "cpu", torch.bfloat16, num_blocks, _BLOCK_SIZE, num_kv_heads, _HEAD_DIM
        )
        num_bytes = 4 * num_blocks * _BLOCK_SIZE * num_kv_heads * _HEAD_DIM
        self._caches = itertools.cycle(
            [
                [huge_pages.empty(shape, torch.bfloat16).normal_() for shape in shapes]
                for _ in range(max(1, _CACHE_BYTES // num_bytes))
            ]
        )
        self._table = torch.randperm(num_blocks).int().view(num_seqs, -1)
        self.seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
        self._q = torch.randn(num_queries, num_heads, _HEAD_DIM).to(torch.bfloat16)
        self._out = torch.empty_like(self._q)
        self.name = f"heads {num_heads:>2}/{num_kv_heads:<2} {num_seqs:>3} x {seq_len:<5}"

    def time(self, kernel: Callable[..., None], lengths: Sequence[Tensor], repeats: int) -> float:
        """Seconds of one call."""
        rule = _HEAD_DIM**-0.5, None, None
        return fastest_s(
            lambda: kernel(self._out, self._q, *next(self._caches), self._table, *lengths, *rule),
            repeats,
        )


def _decode(heads: tuple[int, int], case: tuple[int, int], bandwidth: float, repeats: int) -> str:
    num_seqs, seq_len = case
    data = _Attention(heads, num_seqs, seq_len, num_seqs)
    seconds = data.time(attention.paged_attention, [data.seq_lens], repeats)
    rate = 4 * num_seqs * seq_len * heads[1] * _HEAD_DIM / seconds
    return (
        f"decode    {data.name} {1e3 * seconds:8.3f} ms   {rate / 1e9:6.1f} GB/s   "
        f"{100 * rate / bandwidth:5.1f} %"
    )


def _prefill(heads: tuple[int, int], case: tuple[int, int], repeats: int) -> str:
    num_seqs, seq_len = case
    data = _Attention(heads, num_seqs, seq_len, num_seqs * seq_len)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * seq_len
    seconds = data.time(attention.prefill_attention, [starts, data.seq_lens], repeats)
    operations = 2 * num_seqs * seq_len * seq_len * heads[0] * _HEAD_DIM  # causal: half of 4
    return (
        f"prefill   {data.name} {1e3 * seconds:8.3f} ms   {operations / seconds / 1e9:6.1f} GFLOP/s"
    )


def _linear(shape: tuple[int, int], rows: int, bandwidth: float, repeats: int) -> str:
    inputs, outputs = shape
    count = max(1, _CACHE_BYTES // (2 * inputs * outputs))
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    arena = HugePageArena()  # the engine keeps its weights in huge pages
    packed = [linear.pack_linear_weight(weight, arena) for _ in range(count)]
    in_turn = itertools.cycle(packed)
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    seconds = fastest_s(lambda: linear.packed_linear(out, x, next(in_turn), None), repeats)
    rate = packed[0].nbytes / seconds
    return (
        f"linear    {inputs:>4} -> {outputs:<5} {rows:>3} rows  {1e3 * seconds:8.3f} ms   "
        f"{2 * rows * inputs * outputs / seconds / 1e9:6.1f} GFLOP/s   weights at "
        f"{rate / 1e9:5.1f} GB/s, {100 * rate / bandwidth:5.1f} %"
    )
