"""What the benchmark `kernels` measures: a row for each case of a kernel.

`GROUPS` has the cases for a GPU, in the shapes of Llama-3-8B; `decode_row` and `linear_row` also
measure on the CPU. The data exceeds the processor's caches and is used in turn; block tables are
random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.card_times import Ceilings, Timer, compare, decode_s, linear_s, small_s
from tpengine.bench.timing import Action
from tpengine.errors import ConfigError
from tpengine.layers import gpu_attention
from tpengine.layers.gpu_quantized import KERNEL_ROWS, WORKSPACE_BYTES, GpuQuantizedForm
from tpengine.ops import attention_ops as attention
from tpengine.ops import cache_ops as cache
from tpengine.ops import fused_ops as fused
from tpengine.ops import huge_pages
from tpengine.ops import linear_ops as linear
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.quantized_ops import QuantizedFormat
from tpengine.ops.weight_only import GpuQuantizedWeight
from tpengine.ops.weight_only_reference import packed_bytes

BLOCK_SIZE, HEAD_DIM = 16, 128
DECODE = ((1, 1024), (1, 32768), (1, 131072), (8, 4096), (16, 1024), (64, 512), (64, 4096),
          (256, 512))  # fmt: skip
HEADS = ((32, 8), (32, 32), (64, 8), (32, 2))
LINEARS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
LINEAR_ROWS = (1, 8, 64)
VOCAB = 128256
_MIN_ACTIONS = 8


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        kernel: its name, with the backend or dtype if there are several.
        case: the sizes, such as batch and context.
        num_bytes, num_flop: the least that the work must read, write and compute.
        predict: returns the seconds on a GPU for its copy bandwidth; None: there is no prediction.
    """

    kernel: str
    case: str
    seconds: float
    num_bytes: float = 0.0
    num_flop: float = 0.0
    predict: Callable[[float], float] | None = None

    def text(self, ceilings: Ceilings) -> str:
        """The printed line, with shares of the card's limits and the prediction."""
        parts = [self.rates(ceilings.copy, "copy")]
        if self.num_flop:
            parts[0] += f" {100 * self.num_flop / self.seconds / ceilings.matmul:6.1f} % of matmul"
        if self.predict is not None:
            parts.append(compare(self.seconds, self.predict(ceilings.copy)))
        return "   ".join(parts)

    def rates(self, bandwidth: float, name: str = "reads") -> str:
        """The printed line, with the share of a bandwidth of this name."""
        rate, flops = self.num_bytes / self.seconds, self.num_flop / self.seconds
        parts = [f"{self.kernel:<24s} {self.case:<34s} {1e6 * self.seconds:10.1f} us"]
        if self.num_bytes:
            parts.append(f"{rate / 1e9:8.1f} GB/s {100 * rate / bandwidth:6.1f} % of {name}")
        if self.num_flop:
            unit, factor = ("TFLOP/s", 1e12) if flops >= 1e12 else ("GFLOP/s", 1e9)
            parts.append(f"{flops / factor:8.1f} {unit}")
        return "   ".join(parts)


@dataclass(frozen=True)
class Setting:
    """The device, the timer and the dtype of the cases.

    Attributes:
        shrink: divides batches, contexts and sizes; tests raise it.
        match: name of the only case of decode; empty: all cases.
        cycled_bytes: size of the data that is used in turn: several times the cache of any card.
        arena: memory of packed weights, on the CPU.
    """

    device: torch.device
    timer: Timer
    dtype: torch.dtype = torch.bfloat16
    shrink: int = 1
    match: str = ""
    head_dim: int = HEAD_DIM
    cycled_bytes: int = 512 << 20
    arena: HugePageArena = field(default_factory=HugePageArena)

    def small(self, size: int) -> int:
        """A size, divided by `shrink`."""
        return max(1, size // self.shrink)

    def randn(self, *shape: int) -> torch.Tensor:
        """Normally distributed numbers in the dtype."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def caches(self, num_blocks: int, num_kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Random K and V caches, on the CPU in huge pages as those of an engine."""
        shapes = cache.kv_cache_shapes(
            self.device.type, dtype, num_blocks, BLOCK_SIZE, num_kv_heads, self.head_dim
        )
        if self.device.type == "cpu":
            return [huge_pages.empty(shape, dtype).normal_() for shape in shapes]
        normal = partial(torch.randn, dtype=torch.bfloat16, device=self.device)
        return [normal(shape).to(dtype) for shape in shapes]

    def seconds(self, num_bytes: int, make: Callable[[], Action]) -> float:
        """Seconds of an action that uses `num_bytes`; enough are made to exceed the cache."""
        count = 1 if self.shrink > 1 else max(1, self.cycled_bytes // max(1, num_bytes))
        made = [make() for _ in range(count)]
        return self.timer(list(itertools.islice(itertools.cycle(made), max(count, _MIN_ACTIONS))))


def decode_rows(setting: Setting) -> Iterator[Row]:
    """Paged decode attention by batch, context and group size, in the dtype and in fp8."""
    dtypes = [setting.dtype]
    if setting.device.type == "cuda":
        dtypes.append(torch.float8_e4m3fn)
    for dtype, heads in itertools.product(dtypes, HEADS):
        for batch, context in DECODE if heads == HEADS[0] else ((64, 4096),):
            if setting.match in ("", f"{batch} x {context}"):
                batch, context = setting.small(batch), max(BLOCK_SIZE, setting.small(context))
                yield decode_row(setting, dtype, heads, [context] * batch, f"{batch} x {context}")
        if heads == HEADS[0] and not setting.match:
            skewed = [setting.small(65536)] + [setting.small(1024)] * setting.small(63)
            yield decode_row(setting, dtype, heads, skewed, "one of 64 k among 63 of 1 k")


def decode_row(
    setting: Setting,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
    lengths: Sequence[int],
    case: str,
) -> Row:
    """Decode attention of sequences with these lengths.

    Args:
        heads: number of heads, number of KV heads.
        case: name of the lengths.
    """
    num_heads, num_kv_heads = heads
    device, head_dim = setting.device, setting.head_dim
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(blocks)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    ids = torch.randperm(num_blocks, dtype=torch.int32).split(blocks)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)
    extra: dict[str, torch.Tensor] = {}
    is_split = False
    if device.type == "cuda":
        plan = attention.make_decode_plan(
            device, len(lengths), num_heads, num_kv_heads, head_dim, cache_dtype
        )
        attention.plan_decode(plan, lens, attention.min_item_tokens(head_dim, cache_dtype))
        extra = plan._asdict()
        is_split = int(plan.item_start[-1]) > len(lengths)
    q = setting.randn(len(lengths), num_heads, head_dim)
    out = torch.empty_like(q)

    def make() -> Action:
        k, v = setting.caches(num_blocks, num_kv_heads, cache_dtype)
        return lambda: attention.paged_attention(out, q, k, v, table, lens, head_dim**-0.5, **extra)

    num_bytes = 2 * sum(lengths) * num_kv_heads * head_dim * cache_dtype.itemsize
    seconds = setting.seconds(num_bytes, make)
    name = str(cache_dtype).removeprefix("torch.").removesuffix("_e4m3fn")
    flop = 4 * sum(lengths) * num_heads * head_dim
    predict = partial(decode_s, num_bytes, is_split=is_split)
    case = f"{num_heads}/{num_kv_heads} heads, {case}"
    return Row(f"decode {name}", case, seconds, num_bytes, flop, predict)


def prefill_rows(setting: Setting) -> Iterator[Row]:
    """Prompts by each backend that works here, and torch's attention on equal lengths."""
    heads, kv_heads = HEADS[0]
    shape = gpu_attention.PrefillShape(
        heads, kv_heads, HEAD_DIM, setting.dtype, frozenset({None}), False
    )
    batch, length = setting.small(8), setting.small(2048)
    for name in ("xformers", "varlen", "sdpa"):
        try:
            backend = gpu_attention.choose_backend(name, shape, setting.device)
        except ConfigError:
            continue
        yield _prefill(setting, backend, [length] * batch, [length] * batch, f"prefill: {name}")
        for chunk in (16, 64, 128, 512, 2048):
            chunk, context = setting.small(chunk), setting.small(4096)
            lens = [chunk], [chunk + context]
            yield _prefill(setting, backend, *lens, f"prefill, no gather: {name}")
            yield _prefill(setting, backend, *lens, f"prefill, gathered: {name}", gathers=True)
    q, k = (setting.randn(batch, heads, length, HEAD_DIM) for _ in range(2))
    seconds = setting.timer([lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True)] * 4)
    flop = 2 * batch * length * length * heads * HEAD_DIM
    yield Row("torch SDPA, 32 KV heads", f"{batch} x {length}", seconds, num_flop=flop)


def _prefill(
    setting: Setting,
    backend: gpu_attention.PrefillBackend,
    queries: list[int],
    keys: list[int],
    name: str,
    gathers: bool = False,
) -> Row:
    heads, kv_heads = HEADS[0]
    device, total = setting.device, sum(keys)
    chunks = gpu_attention.make_chunks(queries, keys, device)
    q = setting.randn(sum(queries), heads, HEAD_DIM)
    k, v = (setting.randn(total, kv_heads, HEAD_DIM) for _ in range(2))
    blocks = [-(-length // BLOCK_SIZE) for length in keys]
    table = torch.randperm(len(keys) * max(blocks)).int().view(len(keys), -1).to(device)
    pages = setting.caches(table.numel(), kv_heads, setting.dtype)

    def action() -> None:
        if gathers:
            cache.gather_kv(k, v, pages[0], pages[1], table, chunks.key_start)
        backend.run(q, k, v, chunks, gpu_attention.AttentionRule(HEAD_DIM**-0.5))

    seconds = setting.timer([action] * 4)
    pairs = sum(n * (total - n) + n * n / 2 for n, total in zip(queries, keys, strict=True))
    case = f"{len(queries)} x {queries[0]}"
    if keys != queries:
        case += f" over {keys[0] - queries[0]}"
    return Row(name, case, seconds, num_flop=4 * pairs * heads * HEAD_DIM)


def linear_rows(setting: Setting) -> Iterator[Row]:
    """Matrix products in the five shapes of a model's layers."""
    for (inputs, outputs), rows in itertools.product(LINEARS, LINEAR_ROWS):
        yield linear_row(setting, setting.small(inputs), setting.small(outputs), rows)
    if setting.device.type == "cuda":
        formats = (QuantizedFormat(4, 32), QuantizedFormat(8, 128))
        for form, shape, rows in itertools.product(formats, LINEARS[2:4], LINEAR_ROWS):
            yield quantized_row(setting, form, *map(setting.small, shape), rows)


def linear_row(setting: Setting, inputs: int, outputs: int, rows: int) -> Row:
    """A matrix product: torch's on a GPU, that of packed weights on the CPU."""
    x = setting.randn(rows, inputs)
    out = setting.randn(rows, outputs)

    def make() -> Action:
        weight = setting.randn(outputs, inputs)
        if setting.device.type == "cuda":
            return partial(F.linear, x, weight)
        packed = linear.pack_linear_weight(weight, setting.arena)
        return partial(linear.packed_linear, out, x, packed, None)

    num_bytes = inputs * outputs * setting.dtype.itemsize
    seconds = setting.seconds(num_bytes, make)
    case = f"{inputs} -> {outputs}, {rows} rows"
    predict = partial(linear_s, num_bytes, rows=rows)
    return Row("linear", case, seconds, num_bytes, 2 * rows * inputs * outputs, predict)


def quantized_row(
    setting: Setting, form: QuantizedFormat, inputs: int, outputs: int, rows: int
) -> Row:
    """A matrix product with random numbers for a packed weight, in the form of a GPU."""
    x, out = setting.randn(rows, inputs), setting.randn(rows, outputs)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setting.device)
    num_bytes = packed_bytes(outputs, inputs, form.bits, form.group_size, form.offsets)

    def make() -> Action:
        packed = torch.randint(0, 60, (num_bytes,), dtype=torch.uint8, device=setting.device)
        weight = GpuQuantizedWeight(packed, form, outputs, inputs)
        return partial(GpuQuantizedForm(weight, workspace).multiply, out, x, None)

    seconds = setting.seconds(num_bytes, make)
    predict = partial(linear_s, num_bytes, rows=rows) if rows <= KERNEL_ROWS else None
    case, num_flop = f"{inputs} -> {outputs}, {rows} rows", 2 * rows * inputs * outputs
    return Row(f"linear, {form.bits} bits", case, seconds, num_bytes, num_flop, predict)


def elementwise_rows(setting: Setting) -> Iterator[Row]:
    """Norms, gates, rotary with cache write, and sampling."""
    heads, kv_heads = HEADS[0]
    size, inner, item = setting.small(4096), setting.small(14336), setting.dtype.itemsize
    width = (heads + 2 * kv_heads) * HEAD_DIM
    angles = torch.randn(8192, HEAD_DIM, device=setting.device)
    weight = setting.randn(size)
    for tokens in (64, 8192):
        tokens = setting.small(tokens)
        x, residual, gate = (setting.randn(tokens, n) for n in (size, size, 2 * inner))
        qkv, out = setting.randn(tokens, width), setting.randn(tokens, inner)
        positions = torch.arange(tokens, dtype=torch.int32, device=setting.device)
        pages = setting.caches(-(-tokens // BLOCK_SIZE), kv_heads, setting.dtype)
        rotated = positions, qkv, angles, positions, *pages, heads, kv_heads
        written = tokens * (heads + 3 * kv_heads + kv_heads) * HEAD_DIM * item
        rotate_bytes = written + tokens * heads * HEAD_DIM * item
        norm = partial(fused.add_rms_norm, x, x, residual, weight, 1e-5)
        cases: dict[str, tuple[Action, float]] = {
            "add_rms_norm": (norm, 4 * x.nbytes),
            "silu_and_mul": (partial(fused.silu_and_mul, out, gate), 3 * out.nbytes),
            "rotary_write_kv_cache": (partial(cache.rotary_write_kv_cache, *rotated), rotate_bytes),
        }
        for name, (action, num_bytes) in cases.items():
            seconds = setting.timer([action] * 16)
            predict = partial(small_s, num_bytes, rows=tokens)
            yield Row(name, f"{tokens} tokens", seconds, num_bytes, predict=predict)
    yield from _sampling_rows(setting)


def _sampling_rows(setting: Setting) -> Iterator[Row]:
    rows, vocab = setting.small(64), setting.small(VOCAB)
    logits = setting.randn(rows, vocab) * 3
    out = torch.empty(rows, dtype=torch.int64, device=setting.device)

    values = ((0.8, torch.float32), (50, torch.int32), (0.95, torch.float32), (0.0, torch.float32),
              (0.3, torch.float64))  # fmt: skip
    parameters = [torch.full((rows,), v, dtype=dtype, device=setting.device) for v, dtype in values]
    for name, action in (
        ("argmax", partial(fused.argmax, out, logits)),
        ("sample_tokens, k and p", partial(fused.sample_tokens, out, logits, *parameters)),
    ):
        yield Row(name, f"{rows} x {vocab}", setting.timer([action] * 8), logits.nbytes)


def block_rows(setting: Setting) -> Iterator[Row]:
    """Copies of blocks of 32 layers: on the device, to the host, and back."""
    layers, kv_heads, count = 32, HEADS[0][1], setting.small(64)
    pool = torch.zeros(2 * layers, 4 * count, BLOCK_SIZE, kv_heads, HEAD_DIM,
                       dtype=setting.dtype, device=setting.device)  # fmt: skip
    on_gpu = setting.device.type == "cuda"
    host = torch.zeros((count, 2 * layers, *pool.shape[2:]), dtype=pool.dtype, pin_memory=on_gpu)
    staging = torch.empty(max(1, count // 2), *host.shape[1:], dtype=pool.dtype, device=pool.device)
    pairs = torch.tensor([(i, 2 * count + i) for i in range(count)], device=setting.device)
    out = [(4 * i, i) for i in range(count)]
    back = [(host_block, block) for block, host_block in out]
    cases: dict[str, tuple[Action, int]] = {
        "copy_cache_blocks": (partial(cache.copy_cache_blocks, pool, pairs), 2 * host.nbytes),
        "swap_out": (partial(cache.swap_out, host, pool, out, staging), host.nbytes),
        "swap_in": (partial(cache.swap_in, pool, host, back, staging), host.nbytes),
    }
    for name, (action, num_bytes) in cases.items():
        seconds = setting.timer([action] * 3)
        yield Row(name, f"{count} blocks, {2 * layers} pieces", seconds, num_bytes)


def bus_rows(setting: Setting) -> Iterator[Row]:
    """Copies from and to pinned memory, in pieces as large as one layer of a block, a block, and
    many blocks."""
    on_gpu = setting.device.type == "cuda"
    for piece in (32 << 10, 2 << 20, 64 << 20):
        piece = setting.small(piece)
        host = torch.zeros(piece, dtype=torch.uint8, pin_memory=on_gpu)
        card = torch.zeros(piece, dtype=torch.uint8, device=setting.device)
        for name, target, source in (("to the host", host, card), ("from the host", card, host)):
            actions = [partial(target.copy_, source, non_blocking=True)] * 8
            yield Row(name, f"pieces of {piece >> 10} KiB", setting.timer(actions), piece)


GROUPS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "decode": decode_rows,
    "prefill": prefill_rows,
    "linear": linear_rows,
    "elementwise": elementwise_rows,
    "blocks": block_rows,
    "bus": bus_rows,
}
"""For `--only`."""
EAGER = ("prefill", "blocks", "bus")
"""Groups that are timed without a graph, because some libraries, and copies from lists, cannot be
recorded. The times of the shortest prompts include launches."""
