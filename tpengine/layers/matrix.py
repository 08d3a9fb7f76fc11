"""The weight of a linear layer while it is read, in the model's dtype or in its file's numbers.

A layer declares views of an outline that has no memory. Memory is taken when the first part is
read, and the layer gives the weight its form as soon as the last part is there. So loading a model
takes the memory of its forms, and that of one layer before it has its form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tpengine.layers import gpu_quantized
from tpengine.layers.quantized_linear import (
    LinearForm,
    PartsForm,
    QuantizedForm,
    can_join,
    join,
    packed_form,
)
from tpengine.layers.weights import (
    QuantizedSource,
    StoredGroups,
    TensorSource,
    Weights,
    WeightShard,
    check_scales,
    copy_part,
)
from tpengine.ops.linear_reference import LINEAR_PANEL
from tpengine.ops.quantized_ops import (
    QuantizedFormat,
    QuantizedWeight,
    empty_quantized,
    pack_quantized_into,
    pad_columns,
    quantize_weight_into,
)
from tpengine.ops.quantized_reference import NUMBERS, numbers_of

_FROM_VALUES = QuantizedFormat(8, 32)
"""Of parts of a quantised file that cannot keep its numbers."""
_PIECE_VALUES, _MAPPED_VALUES = 1 << 18, 1 << 22
"""Values of one piece: malloc keeps what is freed, so pieces are small. What is packed or rounded
from the mapping of its file takes no memory, and long pieces keep all threads at work."""


class Matrix:
    """The weight `[out_features, in_features]` of a layer, or a table, until all parts are read.

    Args:
        take: called once with the whole weight: a tensor in the model's dtype, or a form if it is
            rounded, or if parts of it keep the numbers of their file.
        rounded: the format to which it is rounded; None: it is not.
        may_be_stored: whether parts of it may keep the numbers of a quantised file.
        importance: see `ops.quantized_ops.quantize_weight_into`.

    Attributes:
        outline: a tensor without memory. The targets of the declared parts are views of it.
    """

    def __init__(
        self,
        weights: Weights,
        out_features: int,
        in_features: int,
        take: Callable[[torch.Tensor | LinearForm], None],
        rounded: QuantizedFormat | None = None,
        may_be_stored: bool = True,
        importance: torch.Tensor | None = None,
    ) -> None:
        shape = (out_features, in_features)
        self.outline = torch.empty(shape, dtype=weights.dtype, device="meta")
        self._weights = weights
        self._take = take
        self._rounded = rounded
        self._importance = importance
        self._rounds_parts = rounded is not None and not gpu_quantized.is_on_gpu(weights)
        """Else a weight that is rounded is rounded whole."""
        self._may_be_stored = may_be_stored and weights.as_stored
        self._values: torch.Tensor | None = None
        self._parts: dict[range, QuantizedForm | None] = {}
        """By outputs: a part that is quantised; None: it is in `_values`."""
        self._packed: QuantizedWeight | None = None
        """Memory for all outputs in the format of the first part."""
        self._num_missing = self.outline.numel()

    def read(self, shard: WeightShard, source: TensorSource, offset: int) -> torch.Tensor:
        """Reads one part; returns one number of each row. See `weights.PartReader`."""
        place, form = _Place.of(shard, source, offset), None
        is_quantized = isinstance(source, QuantizedSource)
        is_stored = is_quantized and self._may_be_stored
        self._weights.is_dequantized |= is_quantized and not is_stored
        if is_stored or self._rounds_parts:
            form, numbers = self._read_quantized(place, source)
        else:
            numbers = self._read_values(shard, source, offset)
        self._parts[place.target] = form
        self._num_missing -= shard.target.numel()
        if self._num_missing == 0:
            whole, self._values, self._packed, self._parts = self._whole(), None, None, {}
            self._take(whole)
        return numbers

    def _read_values(self, shard: WeightShard, source: TensorSource, offset: int) -> torch.Tensor:
        outline = self.outline
        if self._values is None and self._weights.device.type == "cpu":
            self._values = self._weights.take_spare(tuple(outline.shape))
        elif self._values is None:
            device = self._weights.device
            self._values = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        outline = shard.target
        view = outline.shape, outline.stride(), int(outline.storage_offset())
        numbers = copy_part(self._values.as_strided(*view), shard, source, offset)
        return numbers.clone()  # a view would keep all values in memory

    def _read_quantized(
        self, place: _Place, source: TensorSource
    ) -> tuple[QuantizedForm, torch.Tensor]:
        """Packs a part by pieces, so that little is held in another form at a time."""
        stored = source if isinstance(source, QuantizedSource) and self._rounded is None else None
        first = place.first_output(stored)
        form = self._rounded or _FROM_VALUES if first is None else first.format
        weight = self._empty(place, form)
        numbers = torch.zeros(len(place.outputs))  # one tensor, as small ones split freed memory
        if first is None:
            is_mapped = getattr(source, "dtype", None) == self.outline.dtype
        else:
            is_mapped = first.layout != NUMBERS
        for rows in place.pieces(_MAPPED_VALUES if is_mapped else _PIECE_VALUES):
            own = slice(rows.start - place.outputs.start, rows.stop - place.outputs.start)
            piece = weight.rows(own.start, own.stop)
            if stored is None or first is None:
                numbers[own] = self._round(piece, place.sort(place.values(source, rows)))
            else:
                numbers[own] = _pack(piece, place, stored.stored(rows, place.inputs))
        if first is not None:
            self._weights.stored_bits.add(form.bits)
        elif stored is not None and not place.is_empty:
            self._weights.is_rounded = True
        return QuantizedForm(weight, None if first is None else first.order), numbers

    def _round(self, piece: QuantizedWeight, values: torch.Tensor) -> torch.Tensor:
        """Rounds values into a piece; returns the first of each row."""
        values = values.to(self.outline.dtype if self._rounded else torch.float32)
        _check_range(values, piece.format)
        padded = pad_columns(values, piece.in_features).contiguous()
        quantize_weight_into(piece, padded, self._importance)
        return values[:, 0]

    def _empty(self, place: _Place, form: QuantizedFormat) -> QuantizedWeight:
        """Allocates a part, beside its neighbours if they have its format; what is padding is
        zero."""
        outputs, shape = place.target, self.outline.shape
        if self._packed is None:
            self._packed = empty_quantized(shape[0], shape[1], form, self._weights.arena)
        if self._packed.format == form and outputs.start % LINEAR_PANEL == 0:
            weight = self._packed.rows(outputs.start, outputs.stop)
        else:
            weight = empty_quantized(len(outputs), shape[1], form)  # it may be moved later
        if place.is_empty or len(place.outputs) < len(outputs):
            weight.packed.zero_()
        return weight

    def _whole(self) -> torch.Tensor | LinearForm:
        """Returns the weight; neighbouring parts of one format are joined."""
        parts = self._parts
        if not any(parts.values()):
            assert self._values is not None
            if self._rounded is None:
                return self._values
            _check_range(self._values, self._rounded)
            return gpu_quantized.gpu_quantized_form(self._values, self._rounded, self._weights)
        runs: list[list[range]] = []
        for outputs in sorted(parts, key=lambda outputs: outputs.start):
            if runs and can_join(parts[runs[-1][-1]], parts[outputs]):
                runs[-1].append(outputs)
            else:
                runs.append([outputs])
        forms = [(slice(run[0].start, run[-1].stop), self._form(run)) for run in runs]
        return forms[0][1] if len(forms) == 1 else PartsForm(tuple(forms))

    def _form(self, run: list[range]) -> LinearForm:
        quantized = [form for outputs in run if (form := self._parts[outputs]) is not None]
        if not quantized:
            assert self._values is not None
            packed = packed_form(self._values[run[0].start : run[0].stop], self._weights)
            assert packed is not None, "parts keep their numbers where kernels multiply packed ones"
            return packed
        return quantized[0] if len(self._parts) == 1 else join(quantized, self._weights.arena)


def _check_range(values: torch.Tensor, form: QuantizedFormat) -> None:
    """Raises `RangeError` if float16 does not hold the scales of rounded values."""
    check_scales(torch.stack(values.aminmax()) / ((1 << form.bits - 1) - 1))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part lies.

    Attributes:
        outputs, inputs: this rank's, in the source.
        target: the part's outputs in the matrix, those included that are padding.
        order: for each output of the part in the matrix its number in the source; None: the same.
        is_transposed: whether an index of the source takes inputs first.
    """

    outputs: range
    inputs: slice
    target: range
    order: torch.Tensor | None
    is_transposed: bool

    @classmethod
    def of(cls, shard: WeightShard, source: TensorSource, offset: int) -> _Place:
        """Returns the place of a part in the section of the source that begins at `offset`."""
        ranges = [range(size) for size in source.get_shape()]
        if shard.dim is not None:
            start = offset + shard.start
            ranges[shard.dim] = range(start, start + shard.length)
        target = shard.target
        if shard.is_transposed:
            target, ranges = target.t(), ranges[::-1]
        *sizes, in_features = target.shape
        first, num_outputs = int(target.storage_offset()) // in_features, math.prod(sizes)
        order = None
        if shard.split:
            strides = [stride // in_features for stride in target.stride()[:-1]]
            order = torch.arange(num_outputs).as_strided(sizes, strides).flatten().argsort()
        inputs = slice(ranges[1].start, ranges[1].stop)
        rows = range(first, first + num_outputs)
        return cls(ranges[0], inputs, rows, order, shard.is_transposed)

    @property
    def is_empty(self) -> bool:
        """Whether all of the part is padding."""
        return not self.outputs or self.inputs.start == self.inputs.stop

    def first_output(self, source: QuantizedSource | None) -> StoredGroups | None:
        """Returns one output as the file stores it, which tells the form of the whole part; None:
        the part has no such form."""
        if source is None or self.is_empty:
            return None
        return source.stored(slice(self.outputs.start, self.outputs.start + 1), self.inputs)

    def pieces(self, most: int) -> Iterator[slice]:
        """Yields outputs in the source: whole panels of a packed weight, up to the last one, with
        at most so many values if a panel has no more."""
        if self.is_empty:
            return
        at_once = len(self.outputs)
        if self.order is None:
            panel_values = LINEAR_PANEL * (self.inputs.stop - self.inputs.start)
            at_once = max(1, most // panel_values) * LINEAR_PANEL
        for start in range(self.outputs.start, self.outputs.stop, at_once):
            yield slice(start, min(start + at_once, self.outputs.stop))

    def values(self, source: TensorSource, outputs: slice) -> torch.Tensor:
        """Returns dequantised values of some outputs."""
        if self.is_transposed:
            return source[self.inputs, outputs].t()
        return source[outputs, self.inputs]

    def sort(self, rows: torch.Tensor) -> torch.Tensor:
        """Puts all rows of the part into their order in the matrix."""
        return rows if self.order is None else rows[self.order]


def _pack(piece: QuantizedWeight, place: _Place, groups: StoredGroups | None) -> torch.Tensor:
    """Packs numbers of the file into a piece; returns the first value of each row."""
    assert groups is not None, "a part of a weight has one form"
    q, scales = place.sort(groups.q), place.sort(groups.scales)
    offsets = None if groups.offsets is None else place.sort(groups.offsets)
    pack_quantized_into(piece, q, scales, offsets, groups.layout)
    numbers = q if groups.layout == NUMBERS else numbers_of(q[:, :1], groups.layout)
    return numbers[:, 0] * scales[:, 0].float()
