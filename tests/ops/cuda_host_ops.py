"""The ops of a GPU: on the CPU stand-in, with the arguments that the bindings in csrc/cuda give the
kernels; and on a card, for tensors of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from .cuda_host_library import far_pointer, load_host, pointer, struct

FP8 = torch.float8_e4m3fn
BOUND = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _packed_weight(
    packed: Tensor, outputs: int, inputs: int, group_size: int, offsets: int
) -> ctypes.Structure:
    return struct("PackedWeight")(
        packed.data_ptr(), -(-outputs // 32), -(-inputs // 32), -(-inputs // group_size),
        group_size // 32, offsets,
    )  # fmt: skip


@dataclass(frozen=True)
class StandIn:
    """Looks ops of a GPU up by name.

    Attributes:
        seed: of the schedule: 0 is round-robin; else warps run ahead of each other, and
            asynchronous copies happen as late as allowed (even) or at once (odd).
        is_wide: whether accesses are as wide as on a GPU, or all narrow.
        is_far: caches are the blocks from `FAR_BLOCKS` on of an imagined one.
    """

    seed: int = 0
    is_wide: bool = False
    is_far: bool = False

    def __call__(self, op: str) -> Callable[..., None]:
        return getattr(self, f"_{op}")

    def _launch(self, library: str, kernel: str, *arguments: Any) -> None:
        loaded = load_host(library)
        loaded.set_schedule(ctypes.c_uint64(self.seed))
        structs = (isinstance(x, ctypes.Structure) for x in arguments)
        getattr(loaded, kernel)(
            *(ctypes.byref(x) if by else x for x, by in zip(arguments, structs, strict=True))
        )

    def _fits(self, tensors: list[Tensor], *sizes: float, align: int = 16) -> bool:
        """Whether wide accesses are wanted and possible."""
        count = 16 // tensors[0].itemsize
        aligned = all(x.data_ptr() % align == 0 for x in tensors)
        return self.is_wide and aligned and not any(size % count for size in sizes)

    def _cache(self, cache: Tensor) -> int | None:
        return far_pointer(cache) if self.is_far else pointer(cache)

    def _norm(
        self, out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> None:
        heads, size = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
        strides = [y.stride(i) if i < y.dim() - 1 else 0 for y in (out, x) for i in (0, 1)]
        strides.append(0 if residual is None else residual.stride(0))
        wide = self._fits([x, out, *([] if residual is None else [residual])], *strides, size)
        pointers = map(pointer, (out, x, residual, weight))
        args = struct("NormArgs")(*pointers, *strides, heads, size, eps)
        is_float = weight.dtype == torch.float32
        rows = len(x) * heads
        self._launch("elementwise", "rms_norm", CODES[x.dtype], is_float, wide, args, rows)

    def _rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        self._norm(out, x, None, weight, eps)

    _add_rms_norm = _norm

    def _gated(self, activation: int, out: Tensor, x: Tensor) -> None:
        sizes = out.stride(0), x.stride(0), out.shape[1]
        args = struct("GatedArgs")(pointer(out), pointer(x), *sizes)
        wide = self._fits([x, out], *sizes)
        self._launch("elementwise", "gated", CODES[x.dtype], activation, wide, args, len(x))

    _silu_and_mul = partialmethod(_gated, 0)
    _gelu_and_mul = partialmethod(_gated, 1)
    _gelu_tanh_and_mul = partialmethod(_gated, 2)

    def _store(
        self, parts: list[Tensor | None], caches: list[Tensor], slots: Tensor,
        rotary: tuple[Tensor | None, Tensor | None], *scales: float,
    ) -> None:  # fmt: skip
        """Parts: q, k and v by token and head; rotary: positions and table."""
        positions, table = rotary
        there = [part for part in parts if part is not None]
        heads = [0 if part is None else part.shape[1] for part in parts]
        strides = [0 if part is None else part.stride(i) for part in parts for i in (0, 1)]
        num_positions, rotary_dim = (0, 0) if table is None else table.shape
        k, is_fp8 = there[-1], caches[0].dtype == FP8
        args = struct("StoreArgs")(
            *map(pointer, parts), *map(self._cache, caches),
            *map(pointer, (slots, positions, table)), *strides, heads[0], heads[1], k.shape[2],
            rotary_dim, num_positions,
            *(1 / scale if is_fp8 else 1.0 for scale in scales or (1.0, 1.0)),
        )  # fmt: skip
        wide = self._fits(there, *strides, k.shape[2], rotary_dim // 2)
        self._launch("elementwise", "store_kv", CODES[k.dtype], is_fp8, wide, args, len(k))

    def _write_kv_cache(self, k: Tensor, v: Tensor, *rest: Any) -> None:
        k_cache, v_cache, slots, *scales = rest
        self._store([None, k, v], [k_cache, v_cache], slots, (None, None), *scales)

    def _rotary_write_kv_cache(
        self, positions: Tensor, qkv: Tensor, table: Tensor, *rest: Any
    ) -> None:
        slots, k_cache, v_cache, num_heads, num_kv_heads, *scales = rest
        heads = qkv.unflatten(1, (-1, k_cache.shape[-1]))
        parts = list(heads.split([num_heads, num_kv_heads, num_kv_heads], 1))
        self._store(parts, [k_cache, v_cache], slots, (positions, table), *scales)

    def _gather_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any
    ) -> None:
        table, start, *scales = rest
        is_fp8, row_size = k_cache.dtype == FP8, k[0].numel()
        args = struct("GatherArgs")(
            pointer(k), pointer(v), self._cache(k_cache), self._cache(v_cache), pointer(table),
            pointer(start), table.stride(0), len(k), len(table), k_cache.shape[1], row_size,
            *(scales if is_fp8 and scales else (1.0, 1.0)),
        )  # fmt: skip
        wide = self._fits([k, v], row_size)
        self._launch("elementwise", "gather_kv", CODES[k.dtype], is_fp8, wide, args)

    def _move(self, source: Any, target: Any, size: int, count: int, pieces: int) -> None:
        places = [struct("BlockPlace")(*place) for place in (source, target)]
        args = struct("CopyBlocksArgs")(*places, size)
        self._launch("elementwise", "copy_blocks", args, count, pieces)

    def _copy_blocks(self, k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
        size, apart = k_cache[0].nbytes, v_cache.data_ptr() - k_cache.data_ptr()
        places = [(self._cache(k_cache), pairs.data_ptr() + 8 * i, 2, size, apart) for i in (0, 1)]
        self._move(*places, size, len(pairs), 2)

    def _copy_cache_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        size, piece = pool[0, 0].nbytes, pool[0].nbytes
        places = [(pool.data_ptr(), pairs.data_ptr() + 8 * i, 2, size, piece) for i in (0, 1)]
        self._move(*places, size, len(pairs), len(pool))

    def _pack_blocks(self, packed: Tensor, pool: Tensor, ids: Tensor, back: bool = False) -> None:
        size, pieces = pool[0, 0].nbytes, len(pool)
        inside = pool.data_ptr(), ids.data_ptr(), 1, size, pool[0].nbytes
        outside = packed.data_ptr(), None, 1, packed[0].nbytes, size
        self._move(*((outside, inside) if back else (inside, outside)), size, len(ids), pieces)

    def _unpack_blocks(self, pool: Tensor, packed: Tensor, ids: Tensor) -> None:
        self._pack_blocks(packed, pool, ids, back=True)

    def _argmax(self, out: Tensor, logits: Tensor, logprobs: Tensor | None = None) -> None:
        args = self._logits(out, logits, logprobs)
        self._launch("sampling", "argmax", CODES[logits.dtype], args, len(logits))

    def _logits(self, out: Tensor, logits: Tensor, logprobs: Tensor | None) -> ctypes.Structure:
        shape = logits.stride(0), logits.shape[1]
        return struct("LogitsArgs")(pointer(out), pointer(logits), *shape, pointer(logprobs))

    def _sample_tokens(self, out: Tensor, logits: Tensor, *rest: Tensor) -> None:
        row = self._logits(out, logits, rest[5] if len(rest) > 5 else None)
        args = struct("SampleArgs")(row, *map(pointer, rest[:5]))
        self._launch("sampling", "sample_tokens", CODES[logits.dtype], args, len(logits))

    def _add_lora(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, *rest: Tensor) -> None:
        ranks, first_outputs, rows, groups, shrunk = rest
        _, num_parts, column_tiles, num_lines = a.shape[:4]
        args = struct("LoRAArgs")(
            *map(pointer, (out, x, a, b, ranks, first_outputs, rows, groups, shrunk)),
            out.stride(0), x.stride(0), len(groups), len(rows), num_parts, column_tiles, num_lines,
            b.shape[1], x.shape[1], self._fits([x], x.stride(0) / 2, align=32),
        )  # fmt: skip
        self._launch("lora", "add_lora", CODES[x.dtype], CODES[a.dtype], args)

    def _weight_only_linear(
        self, out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, bits: int, *form: int
    ) -> None:
        weight = _packed_weight(packed, out.shape[1], x.shape[1], *form)
        args = struct("WeightOnlyArgs")(
            *map(pointer, (out, x, bias)), weight, out.stride(0), x.stride(0), *x.shape[:1],
            out.shape[1], x.shape[1], 1,
        )  # fmt: skip
        self._launch("quantized", "weight_only_linear", CODES[x.dtype], bits, args)

    def _dequantize_weight(
        self, out: Tensor, packed: Tensor, first: int, outputs: int, bits: int, *form: int
    ) -> None:
        weight = _packed_weight(packed, outputs, out.shape[1], *form)
        args = struct("DequantizeArgs")(out.data_ptr(), weight, first // 32)
        codes = CODES[out.dtype], bits
        self._launch("quantized", "dequantize_weight", *codes, args, len(out) // 32)


def on_card(op: str, device: str = "cuda") -> Callable[..., None]:
    """An op on a GPU for tensors of the host: whole storages go there, with what lies beside the
    tensors, and come back."""
    kernel = getattr(torch.ops.tpengine, op).default

    def run(*arguments: Any) -> None:
        storages: dict[int, tuple[Any, Any]] = {}

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            own = x.untyped_storage()
            _, there = storages.setdefault(own.data_ptr(), (own, own.to(device=device)))
            return torch.empty(0, dtype=x.dtype, device=device).set_(
                there, x.storage_offset(), x.shape, x.stride()
            )

        kernel(*map(moved, arguments))
        for own, there in storages.values():
            own.copy_(there)

    return run
