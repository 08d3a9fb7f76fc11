"""Tensors of a GGUF file under the names that a model's parameters have, read as they are stored or
dequantised.

A name of the model gives the name in the file (the library `gguf` has the table), so nothing here
knows a family. What the converter of an architecture has changed is undone while rows are read.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tpengine.checkpoint.gguf_config import Architecture, architecture_of
from tpengine.checkpoint.gguf_file import GGUFFile, TensorEntry, open_gguf
from tpengine.checkpoint.gguf_groups import EXACT_TYPES, GROUP_SIZE, unpack
from tpengine.layers.weights import StoredGroups
from tpengine.ops.quantized_ops import dequantize_blocks

Rows = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `gguf_config` has put into the model's configuration."""
_ONE_ROW = "ffn_gate_inp_shexp.weight"
"""A matrix of one row, which llama.cpp's quantizer writes as a vector."""

_NOT_QUANTIZED = ("F32", "F16", "BF16")
_SUPERBLOCKS = GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K
"""Types that kernels dequantise."""
_VALUES_AT_ONCE = 1 << 17
"""Pieces of this size stay in a core's cache; the library's own (16 rows) are 2 x slower."""


def read_tensors(path: str, wanted: Iterable[str]) -> Iterator[tuple[str, str, GGUFTensor]]:
    """Yields file, name and source of the tensors of a model.

    Args:
        wanted: names that the model may ask for. A tensor that belongs to no wanted name is
            yielded under its name in the file.

    Raises:
        ConfigError: the architecture is not supported.
        ModelLoadError: the file is damaged.
    """
    file = open_gguf(path)
    architecture, prefix = architecture_of(file), str(file.metadata["general.architecture"])
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == prefix)
    names = get_tensor_name_map(arch, file.metadata[f"{prefix}.block_count"])
    unread = set(file.tensors) - set(_COMPUTED)
    for name in wanted:
        expert = _EXPERT.search(name)
        merged = name if expert is None else name.replace(expert[0], ".experts.")
        # The library knows BLOOM's names without "transformer." alone.
        for spelling in (merged, merged.partition(".")[2]):
            gguf_name = names.get_name(spelling, try_suffixes=(".weight", ".bias"))
            if gguf_name is not None and gguf_name in file.tensors:
                unread.discard(gguf_name)
                number = None if expert is None else int(expert[1])
                source = _open(file, architecture, gguf_name, number)
                yield file.tensors[gguf_name].file.name, name, source
                break
    for name in sorted(unread):
        yield file.tensors[name].file.name, name, GGUFTensor(file.tensors[name])


def _open(file: GGUFFile, architecture: Architecture, name: str, expert: int | None) -> GGUFTensor:
    """Returns the tensor `name` of the file with the changes of its converter undone."""
    entry, prefix = file.tensors[name], file.metadata["general.architecture"]
    if name.endswith(_ONE_ROW) and len(entry.shape) == 1:
        entry = replace(entry, shape=(1, *entry.shape))
    heads = file.metadata[f"{prefix}.attention.head_count"]
    if ".attn_k." in name:
        heads = file.metadata.get(f"{prefix}.attention.head_count_kv") or heads
    rows = np.arange(entry.shape[0])
    order = None
    if architecture.permuted and (".attn_q." in name or ".attn_k." in name):
        # llama.cpp rotates neighbours, transformers the halves of a head.
        order = _exchange(rows, (heads, -1, 2), 1)
    elif architecture.split_qkv and ".attn_qkv." in name:
        order = _exchange(rows, (3, heads, -1), 0)
    offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
    kind = GGUFTensor if entry.type in _NOT_QUANTIZED else QuantizedTensor
    return kind(entry, order, offset, name.endswith(architecture.transposed), expert)


def _exchange(rows: Rows, shape: tuple[int, int, int], axis: int) -> Rows | None:
    """Row numbers with two neighbouring axes exchanged; None if they do not fit the shape: the
    model, which knows its own shape, then refuses the tensor."""
    if len(rows) % abs(math.prod(shape)):
        return None
    return rows.reshape(shape).swapaxes(axis, axis + 1).ravel()


@dataclass(eq=False)
class GGUFTensor:
    """A tensor of a file, or one expert's part; an index reads and dequantises only what it names.

    Args:
        order: row of the file for each row of the model; None: the same.
        offset: subtracted from every value.
        transposed: whether the model has rows and columns exchanged.
        expert: number of the part along the first of three dimensions.
    """

    entry: TensorEntry
    order: Rows | None = None
    offset: float = 0.0
    transposed: bool = False
    expert: int | None = None

    def __post_init__(self) -> None:
        self._data = self.entry.rows()
        self._type = GGMLQuantizationType[self.entry.type]
        self._shape = self.entry.shape if self.expert is None else self.entry.shape[1:]

    def get_shape(self) -> list[int]:
        """The shape that the model knows."""
        return list(reversed(self._shape)) if self.transposed else list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns rows `[a:b]`, or a part of their columns `[a:b, c:d]`, in float32."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if len(self._shape) == 1:
            values = self._read(slice(None), slice(None)).ravel()
            return torch.from_numpy(values if self.order is None else values[self.order])[rows]
        if self.transposed:
            return torch.from_numpy(self._read(columns, rows)).T
        return torch.from_numpy(self._read(rows, columns))

    def _read(self, rows: slice, columns: slice) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantises a part `[rows, columns]` of a matrix; a vector is one row."""
        stored, part = self._blocks(rows, columns)
        block = GGML_QUANT_SIZES[self._type][0]
        values = np.empty((len(stored), stored.shape[1] * block), np.float32)
        if self._type in _SUPERBLOCKS:
            dequantize_blocks(torch.from_numpy(values), _tensor(stored), self._type)
        else:
            blocks, rows_of_blocks = stored.reshape(-1, stored.shape[2]), values.reshape(-1, block)
            step = _VALUES_AT_ONCE // block
            for at in range(0, len(blocks), step):
                piece = dequantize(blocks[at : at + step].reshape(1, -1), self._type)
                rows_of_blocks[at : at + step] = piece.reshape(-1, block)
        values = values[:, part]
        return values if not self.offset else values - np.float32(self.offset)

    def _blocks(self, rows: slice, columns: slice) -> tuple[Bytes, slice]:
        """Returns the blocks that hold a part of a matrix, uint8 `[num_rows, num_blocks,
        block_bytes]`, and the place of the part in the columns of these blocks. Only rows in
        another order are copied."""
        data = self._data
        if self.expert is not None:
            data = data[self.expert * self._shape[0] : (self.expert + 1) * self._shape[0]]
        is_matrix = len(self._shape) > 1
        data = data[self.order[rows] if is_matrix and self.order is not None else rows]
        block, block_bytes = GGML_QUANT_SIZES[self._type]
        start, stop, _ = columns.indices(self._shape[-1])
        first, last = start // block, -(-stop // block)
        data = data[:, first * block_bytes : last * block_bytes]
        blocks = data.reshape(len(data), last - first, block_bytes)
        return blocks, slice(start - first * block, stop - first * block)


class QuantizedTensor(GGUFTensor):
    """A tensor of a quantised type, which may also be read as it is stored."""

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """See `layers.weights.QuantizedSource`."""
        if columns.start % GROUP_SIZE or columns.stop % GROUP_SIZE:
            return None
        if self._type.name not in EXACT_TYPES:
            return None
        blocks, part = self._blocks(rows, columns)
        return unpack(self._type.name, _tensor(blocks), part)


def _tensor(blocks: Bytes) -> torch.Tensor:
    with warnings.catch_warnings():  # of memory that cannot be written, which is only read here
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(blocks)
