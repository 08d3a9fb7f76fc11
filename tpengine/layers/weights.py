"""The parameters of a model under construction, and the parts of a checkpoint that fill them.

A layer allocates its tensors here and declares, under the checkpoint's names, which rows or columns
of each tensor belong to this rank. A fused layer declares views of one tensor under two or more
names; if the checkpoint's tensor is fused as well, it declares them under one name. The loader
reads these declarations and knows nothing else of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.ops import huge_pages
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.quantized_ops import QuantizedFormat
from tpengine.ops.quantized_reference import NUMBERS

_VALUES_AT_ONCE = 1 << 20
Layer = TypeVar("Layer")


class TensorSource(Protocol):
    """One tensor of a file. An index reads only the indexed part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A part of a weight in the numbers of its file.

    Attributes:
        q: uint8 `[rows, columns]`, 0 to 15 or 255; in another layout `[rows, num_blocks, bytes]`.
        scales: float16 `[rows, num_groups]`.
        offsets: float16 `[rows, num_groups]`, or None; see `QuantizedFormat.offsets`.
        order: int64 `[columns]`: column j of `q` belongs to input `order[j]`; None: to input j.
    """

    q: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    format: QuantizedFormat
    order: torch.Tensor | None = None
    layout: int = NUMBERS
    """See `ops.quantized_reference`."""


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A tensor of a file that stores groups. An index gives dequantised values, as of any other."""

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """Returns a part as it is stored.

        None: its columns do not begin and end at a group's border, or the numbers of the file have
        no such form. The caller then rounds dequantised values to 8 bits in groups of 32.

        Args:
            rows, columns: of outputs and of inputs, also if an index has them exchanged.
        """


class TypedSource(TensorSource, Protocol):
    """A tensor of a file whose dtype is known before it is read."""

    @property
    def dtype(self) -> torch.dtype: ...


class LoadedTensor:
    """A tensor in memory with the interface of `TypedSource`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class RangeError(Exception):
    """A weight in 4 or 8 bits needs a scale beyond float16's largest number."""


def check_scales(scales: torch.Tensor) -> None:
    """Raises `RangeError` if float16 does not hold a finite scale."""
    largest = float(scales.abs().max()) if scales.numel() else 0.0
    if torch.finfo(torch.float16).max < largest < math.inf:
        raise RangeError(
            f"a scale of its numbers is {largest:g}, and scales in memory are float16, at most "
            "65504; use dtype='float32' without a quantization"
        )


Importance = Mapping[int, torch.Tensor]
"""By place in `Weights.linears`: see `ops.quantized_ops.quantize_weight_into`."""
CheckpointTensor = tuple[str, str, TensorSource]
"""File, name and source."""
KVScaleTensors = dict[tuple[int, str], CheckpointTensor]
"""By layer, and k or v: its scale for a KV cache in fp8."""


class PartReader(Protocol):
    """What reads a part in place of a copy; see `layers.matrix`."""

    def read(self, shard: WeightShard, source: TensorSource, offset: int) -> torch.Tensor:
        """Reads the part that lies in the section which begins at `offset`; returns one number of
        each row."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of one tensor of the checkpoint, or of one section of a fused tensor.

    Attributes:
        target: the view of a parameter that is filled.
        dim: the dimension that ranks divide; None: every rank takes the whole tensor.
        start: first index along `dim` of this rank's part.
        total: length of the whole tensor, or of the section, along `dim`. Padding, the part of the
            target beyond it, is filled with zeros.
        split: sizes into which the part's first dimension is unflattened before the copy, for a
            target with more dimensions; this reorders the rows of a fused tensor.
        matrix: takes the part; the target is then a view of its outline. None: the part is copied.
        is_transposed: whether the checkpoint has inputs and outputs of the matrix exchanged.
    """

    target: torch.Tensor
    dim: int | None = None
    start: int = 0
    total: int = 0
    split: tuple[int, ...] = ()
    matrix: PartReader | None = None
    is_transposed: bool = False

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor, or the section, must have."""
        shape = list(self.target.shape)
        if self.split:
            shape = [self.total, *shape[len(self.split) :]]
        elif self.dim is not None:
            shape[self.dim] = self.total
        return tuple(shape)

    @property
    def length(self) -> int:
        """Number of indices along `dim` that the checkpoint has for this rank."""
        assert self.dim is not None
        if self.split:
            return math.prod(self.split)
        return max(0, min(self.target.shape[self.dim], self.total - self.start))


def tensor_shape(shards: Sequence[WeightShard]) -> tuple[int, ...]:
    """The shape that the checkpoint's tensor must have whose sections, one after another along
    their dimension, are these."""
    shape, dim = list(shards[0].full_shape), shards[0].dim
    if dim is not None:
        shape[dim] = sum(shard.total for shard in shards)
    return tuple(shape)


def transposed(shard: WeightShard) -> WeightShard:
    """Returns the shard of the same part whose tensor has inputs and outputs exchanged."""
    dim = None if shard.dim is None else 1 - shard.dim
    return replace(shard, target=shard.target.t(), dim=dim, is_transposed=not shard.is_transposed)


def copy_part(
    target: torch.Tensor, shard: WeightShard, source: TensorSource, offset: int
) -> torch.Tensor:
    """Copies this rank's slice of the section that begins at `offset`; returns one number of each
    row of the target."""
    shape, dim = source.get_shape(), shard.dim
    if not shape:
        return target.copy_(source[...])
    if dim is None:
        _copy_by_pieces(target, source, slice(0, shape[0]), 0)
        return _first_column(target)
    part = slice(offset + shard.start, offset + shard.start + shard.length)
    if shard.split:
        return _first_column(target.copy_(source[part].unflatten(0, shard.split)))
    filled = target
    if shard.length < target.shape[dim]:
        filled = target.zero_().narrow(dim, 0, shard.length)
    if shard.length:
        _copy_by_pieces(filled, source, part, dim)
    return _first_column(target)


def _copy_by_pieces(target: torch.Tensor, source: TensorSource, part: slice, dim: int) -> None:
    """Copies rows or columns by pieces, so that little is held in another dtype at a time."""
    rows_at_once = max(1, _VALUES_AT_ONCE * len(target) // target.numel())
    for row in range(0, len(target), rows_at_once):
        piece = target[row : row + rows_at_once]
        if dim == 0:
            piece.copy_(source[part.start + row : part.start + row + len(piece)])
        else:
            piece.copy_(source[row : row + len(piece), part])


def _first_column(values: torch.Tensor) -> torch.Tensor:
    return values[..., 0] if values.ndim > 1 else values


@dataclass(eq=False)
class Weights:
    """Collects the parameters that layers allocate while a model is built.

    Args:
        quantization: one of `config.QUANTIZATIONS`, see `layers.quantized_linear`; None: no
            quantisation.
        as_stored: whether matrices of a quantised file keep the file's numbers.

    A model divided into pipeline stages declares all its parameters at every stage, so that each
    can tell what a checkpoint lacks; those of other stages have no memory and are not read.
    """

    dtype: torch.dtype
    device: torch.device
    parallel: ParallelState
    quantization: str | None = None
    as_stored: bool = False
    importance: Importance = field(default_factory=dict)
    arena: HugePageArena = field(default_factory=HugePageArena)
    """Memory for packed weights, which a CPU reads in every step."""
    shards: dict[str, list[WeightShard]] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    """Names of `shards` whose parameters other stages hold."""
    layer_sizes: list[int] = field(default_factory=list)
    """Numbers that the checkpoint has for each layer."""
    linears: list[Any] = field(default_factory=list)
    """The linear layers that were made, until the parameters are loaded."""
    repeats: dict[str, str] = field(default_factory=dict)
    """Tied weights: names that a checkpoint may contain, and the names of equal tensors."""
    convert: Callable[[Iterator[CheckpointTensor]], Iterator[CheckpointTensor]] = iter
    """Renames or merges the tensors of a checkpoint before they are looked up."""
    others: set[str] = field(default_factory=set)
    """Names of a checkpoint's tensors that are of another half of the model and are not read."""
    kv_scales: KVScaleTensors = field(default_factory=dict)
    """Tensors of the checkpoint that only a KV cache in fp8 needs."""
    num_bytes: int = 0
    """Bytes of all parameters in their form after loading, and of the tables that layers
    compute."""
    looked_up_bytes: int = 0
    """Those of them that a step does not read, but for single rows."""
    stored_bits: set[int] = field(default_factory=set)
    """Bits of a number of matrices that are packed as a quantised file has them."""
    is_rounded: bool = False
    """Whether a part whose numbers no kernel multiplies was rounded to 8 bits."""
    is_dequantized: bool = False
    """Whether a part of a quantised file was dequantised."""
    digest: str = ""
    """SHA-256 of one element of each row of the loaded parameters, in hexadecimal; empty until
    they are loaded. Weights that differ in no such element have the same one."""
    _digests: dict[str, bytes] = field(default_factory=dict)
    _after_loading: list[Callable[[], None]] = field(default_factory=list)
    _workspace: torch.Tensor | None = None
    _spare: list[torch.Tensor] = field(default_factory=list)
    """Of matrices that were packed: their values' memory in the model's dtype, in vectors."""
    _is_elsewhere: bool = False

    @property
    def form(self) -> str:
        """What became of a quantised file, and whether scales were chosen by calibration, for the
        line at the start; empty if there is nothing to tell."""
        forms = []
        if self.stored_bits:
            forms.append(f"{' and '.join(map(str, sorted(self.stored_bits)))} bits as stored")
        if self.is_rounded:
            forms.append(f"{'others ' if forms else ''}rounded to 8 bits in groups of 32")
        if self.is_dequantized:
            kind = str(self.dtype).removeprefix("torch.")
            if self.quantization is not None:
                kind += f", then rounded to {self.quantization}"
            forms.append(f"{'others ' if forms else ''}dequantised to {kind}")
        if self.importance:
            forms.append("calibrated")
        return ", ".join(forms)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocates an uninitialised parameter, in the model's dtype unless told."""
        device = torch.device("meta") if self._is_elsewhere else self.device
        parameter = torch.empty(shape, dtype=dtype or self.dtype, device=device)
        if not self._is_elsewhere:
            self.num_bytes += parameter.nbytes
        return parameter

    def note_looked_up(self, parameter: torch.Tensor) -> torch.Tensor:
        """Counts a parameter among those of which a step reads single rows only; returns it."""
        if not self._is_elsewhere:
            self.looked_up_bytes += parameter.nbytes
        return parameter

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """Counts the bytes of a table that a layer computes, e.g. rotary angles; returns it."""
        self.num_bytes += values.nbytes
        self.looked_up_bytes += values.nbytes
        return values

    def workspace(self, num_bytes: int) -> torch.Tensor:
        """Returns memory, uint8, that all layers share; it is counted once, and has the size of the
        first call."""
        if self._workspace is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._workspace = self.table(memory)
        return self._workspace

    def take_spare(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns memory for the values of a matrix on a CPU: that of one which is packed, since
        the first write to new memory takes longer than the copy, or a mapping of its own: malloc
        keeps much of what is freed for later."""
        count = math.prod(shape)
        for place, vector in enumerate(self._spare):
            if len(vector) >= count:
                return self._spare.pop(place)[:count].view(shape)
        self._spare.clear()
        return huge_pages.empty(shape, self.dtype)

    def give_spare(self, values: torch.Tensor) -> None:
        """Takes back memory from `take_spare`; the caller holds no view of it."""
        size = values.untyped_storage().nbytes() // values.itemsize
        self._spare.append(values.as_strided((size,), (1,), 0))

    def declare(self, name: str, shard: WeightShard) -> None:
        """Declares which part of the checkpoint's tensor `name` fills which parameter. If the name
        was declared before, the part is of the section after those declared: the tensor is fused.
        """
        if self._is_elsewhere:
            self.elsewhere.add(name)
        elif name in self.elsewhere:  # two stages hold it: a table that is tied to the head
            self.elsewhere.remove(name)
            del self.shards[name]
        self.shards.setdefault(name, []).append(shard)

    @contextmanager
    def held(self, is_here: bool) -> Iterator[None]:
        """In the context parameters are declared that this stage holds, or that others hold."""
        before, self._is_elsewhere = self._is_elsewhere, not is_here
        try:
            yield
        finally:
            self._is_elsewhere = before

    def through_layers(self, count: int, make: Callable[[int], Layer]) -> list[Layer]:
        """Makes the layers that this stage holds, and declares those of the others.

        Args:
            count: of the whole model.
            make: makes a layer; gets its number.
        """
        own, layers = self.parallel.stage.layers or range(count), []
        for number in range(count):
            num_declared = len(self.shards)
            with self.held(number in own):
                layer = make(number)
            if number in own:
                layers.append(layer)
            declared = list(self.shards.values())[num_declared:]
            self.layer_sizes.append(sum(math.prod(tensor_shape(shards)) for shards in declared))
        return layers

    def transpose(self, endings: tuple[str, ...]) -> None:
        """Declares that the checkpoint has the matrices whose names end so as `[in, out]`."""
        for name, shards in self.shards.items():
            if name.endswith(endings):
                self.shards[name] = [transposed(shard) for shard in shards]

    def declare_repeat(self, name: str, original: str) -> None:
        """Declares that the checkpoint's tensor `name`, if it exists, must equal `original`."""
        self.repeats[name] = original

    def replicated(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocates and declares a parameter that every rank holds whole."""
        parameter = self.empty(*shape, dtype=dtype)
        self.declare(name, WeightShard(parameter))
        return parameter

    def read(self, name: str, source: TensorSource) -> None:
        """Reads this rank's parts of the checkpoint's tensor `name`."""
        digest, offset = hashlib.sha256(), 0
        for shard in self.shards[name]:
            if shard.matrix is not None:
                numbers = shard.matrix.read(shard, source, offset)
            else:
                numbers = copy_part(shard.target, shard, source, offset)
                self.is_dequantized |= isinstance(source, QuantizedSource)
            digest.update(numbers.float().cpu().numpy().tobytes())
            offset += shard.total
        self._digests[name] = digest.digest()

    def after_loading(self, action: Callable[[], None]) -> None:
        """Registers an action that runs after the parameters are filled, e.g. packing."""
        if not self._is_elsewhere:
            self._after_loading.append(action)

    def finish(self) -> None:
        """Computes the digest, runs the registered actions, each once, and forgets the
        declarations."""
        whole = b"".join(self._digests[name] for name in sorted(self._digests))
        self.digest = hashlib.sha256(whole).hexdigest()
        self.shards.clear()
        self.linears.clear()
        self._spare.clear()
        actions, self._after_loading = self._after_loading, []
        for action in actions:
            action()
