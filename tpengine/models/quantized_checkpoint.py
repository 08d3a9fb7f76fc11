"""Quantised weights of a folder: AWQ, GPTQ, compressed-tensors and fp8.

Such a checkpoint holds several tensors for a weight: its numbers, of which several may share a word
of 32 bits, their scales, zero points, the group of each input. They become one source under the
name that the model knows, `X.weight` `[out, in]`. A rank reads only the words that hold its part.

Sources: https://github.com/casper-hansen/AutoAWQ, https://github.com/ModelCloud/GPTQModel,
https://github.com/vllm-project/compressed-tensors, https://huggingface.co/docs/transformers
(finegrained_fp8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tpengine.errors import ModelLoadError
from tpengine.layers.weights import CheckpointTensor, StoredGroups, TensorSource
from tpengine.logger import init_logger
from tpengine.ops.quantized import NO_OFFSETS, ZERO_POINTS, QuantizedFormat
from tpengine.quantization_config import QuantizationScheme

logger = init_logger(__name__)

Sources = Mapping[str, TensorSource]

_STEP = 32
"""Groups in memory have multiples of so many inputs."""
_SCALE_ERROR = 1e-3
"""A scale that loses more than this share in float16 cannot be stored so."""
_ENDINGS = {
    "awq": ("qweight", "qzeros", "scales", "bias"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx", "bias"),
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
        "weight_g_idx",
    ),
    "fp8": ("weight", "weight_scale", "weight_scale_inv"),
}
_NUMBERS = {
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale", "weight_scale_inv"),
}
"""A weight that has a tensor with one of these endings is quantised."""
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")
"""Scales of activations, found in advance; the engine scales each token by its own values."""


class Matrix(Protocol):
    """Unsigned numbers `[outputs, inputs]` or `[outputs, groups]`."""

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """Returns a part, uint8."""


@dataclass(frozen=True, slots=True)
class Words:
    """Numbers of 4 or 8 bits that share words of 32.

    Attributes:
        source: int32.
        dim: dimension of `source` along which the numbers of a word are neighbours.
        is_transposed: whether `source` has inputs or groups before outputs.
        is_halved: whether a word has its even numbers in its lower half, and its odd ones in the
            upper half (AWQ); else all are in the order of their bits.
        is_less_one: whether each number is stored less one.
    """

    source: TensorSource
    bits: int
    dim: int
    is_transposed: bool = False
    is_halved: bool = False
    is_less_one: bool = False

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """See `Matrix`."""
        parts = [columns, rows] if self.is_transposed else [rows, columns]
        wanted, per_word = parts[self.dim], 32 // self.bits
        first = wanted.start // per_word
        parts[self.dim] = slice(first, -(-wanted.stop // per_word))
        words = self.source[tuple(parts)]
        if self.is_less_one:
            # The whole word is added to: where a number was 0, writers borrow from its neighbour.
            words = words + (0x11111111 if self.bits == 4 else 0x01010101)
        numbers: torch.Tensor = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(2)
        if self.is_halved:
            numbers = numbers.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        if self.dim == 0:
            numbers = numbers.transpose(1, 2)
        numbers = numbers.flatten(self.dim, self.dim + 1)
        start = wanted.start - first * per_word
        numbers = numbers.narrow(self.dim, start, wanted.stop - wanted.start)
        return numbers.t() if self.is_transposed else numbers


@dataclass(frozen=True, slots=True)
class SignedBytes:
    """Numbers of 8 bits, stored as int8."""

    source: TensorSource

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """See `Matrix`."""
        return self.source[rows, columns].contiguous().view(torch.uint8) ^ 128


@dataclass(frozen=True, slots=True)
class Scales:
    """One scale for each output and group.

    Attributes:
        source: `[outputs, groups]`, or one scale for the whole weight.
        is_transposed: whether `source` has groups before outputs.
    """

    source: TensorSource
    is_transposed: bool = False

    @property
    def is_one(self) -> bool:
        """Whether the whole weight has one scale."""
        return math.prod(self.source.get_shape()) == 1

    @property
    def num_groups(self) -> int:
        """Groups of an output."""
        return 1 if self.is_one else self.source.get_shape()[0 if self.is_transposed else 1]

    def read(self, rows: slice) -> torch.Tensor:
        """Returns the scales of some outputs, float32 `[rows, groups]`."""
        if self.is_one:
            return self.source[...].float().reshape(1, 1).expand(rows.stop - rows.start, 1)
        if self.is_transposed:
            return self.source[:, rows].float().t()
        return self.source[rows].float()


class GroupedTensor:
    """A weight in groups of 4 or 8 bits, see `layers.weights.QuantizedSource`.

    Args:
        shape: outputs and inputs.
        group_size: neighbouring inputs with one scale.
        zeros: zero points; None: they are in the middle.
        input_groups: int32 `[inputs]`, the group of each input (GPTQ's `desc_act`); None: groups
            are of neighbours.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        group_size: int,
        numbers: Matrix,
        scales: Scales,
        zeros: Matrix | None,
        input_groups: TensorSource | None = None,
    ) -> None:
        self._shape = shape
        self._bits = bits
        self._group_size = group_size
        self._numbers = numbers
        self._scales = scales
        self._zeros = zeros
        self._groups = torch.arange(shape[1]) // group_size
        self._is_ordered = True
        if input_groups is not None:
            found = input_groups[:].long()
            if int(found.min()) < 0 or int(found.max()) >= scales.num_groups:
                raise _MisfitError(f"g_idx names a group beyond the {scales.num_groups} of scales")
            self._is_ordered = torch.equal(found, self._groups)
            self._groups = found
        self._has_zeros: bool | None = None
        self._keeps_scales: bool | None = None

    def get_shape(self) -> list[int]:
        """The shape that the model knows."""
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns rows `[a:b]`, or a part of their columns `[a:b, c:d]`, in float32."""
        rows, columns = _part(index, self._shape)
        groups = self._groups[columns]
        values = self._numbers.read(rows, columns).contiguous().float()
        values -= self._read_zeros(rows)[:, groups] if self._is_asymmetric() else self._middle
        return values.mul_(self._scales.read(rows)[:, groups])

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """See `layers.weights.QuantizedSource`.

        A border inside of a group cuts the groups of the part into smaller ones of equal scales.
        """
        rows, columns = _part((rows, columns), self._shape)
        order, first = self._order(columns), columns.start
        size = _common_size(self._group_size, columns)
        if size is None or (order is None and not self._is_ordered) or not self._fits_halves():
            return None
        groups = torch.arange(first, columns.stop, size) // self._group_size
        scales = self._scales.read(rows)[:, groups].half()
        q = self._numbers.read(rows, columns)
        offsets = self._read_zeros(rows)[:, groups].half() if self._is_asymmetric() else None
        kind = NO_OFFSETS if offsets is None else ZERO_POINTS
        form = QuantizedFormat(self._bits, size, kind)
        return StoredGroups(q if order is None else q[:, order], scales, offsets, form, order)

    @property
    def _middle(self) -> int:
        return 1 << (self._bits - 1)

    def _read_zeros(self, rows: slice) -> torch.Tensor:
        assert self._zeros is not None
        return self._zeros.read(rows, slice(0, self._scales.num_groups)).float()

    def _is_asymmetric(self) -> bool:
        """Whether a zero point is not in the middle; a symmetric file may have zero points too."""
        if self._has_zeros is None:
            self._has_zeros = self._zeros is not None and bool(
                (self._read_zeros(slice(0, self._shape[0])) != self._middle).any()
            )
        return self._has_zeros

    def _fits_halves(self) -> bool:
        """Whether float16 keeps all scales; all parts of a weight have one form."""
        if self._keeps_scales is None:
            scales = self._scales.read(slice(0, self._shape[0]))
            halves = scales.half().float()
            self._keeps_scales = torch.allclose(halves, scales, rtol=_SCALE_ERROR, atol=0)
        return self._keeps_scales

    def _order(self, columns: slice) -> torch.Tensor | None:
        """Returns the inputs in the order of their groups; None: it is theirs already, or the part
        has no whole groups."""
        if self._is_ordered or columns != slice(0, self._shape[1]):
            return None
        order = torch.argsort(self._groups, stable=True)
        plain = torch.arange(self._shape[1]) // self._group_size
        return order if torch.equal(self._groups[order], plain) else None


class BlockTensor:
    """A weight in fp8 with a scale for each block of outputs and inputs.

    It has no form in groups: the scale of fp8's numbers is not one of whole numbers.

    Args:
        source: float8 `[outputs, inputs]`.
        block: outputs and inputs of a block.
    """

    def __init__(self, source: TensorSource, scales: Scales, block: tuple[int, int]) -> None:
        self._source = source
        self._scales = scales
        self._block = block

    def get_shape(self) -> list[int]:
        """The shape that the model knows."""
        return self._source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns rows `[a:b]`, or a part of their columns `[a:b, c:d]`, in float32."""
        rows, columns = _part(index, self.get_shape())
        outputs, inputs = self._block
        first = rows.start // outputs
        scales = self._scales.read(slice(first, -(-rows.stop // outputs)))
        by_row = torch.arange(rows.start, rows.stop) // outputs - first
        by_column = torch.arange(columns.start, columns.stop) // inputs
        return self._source[rows, columns].float().mul_(scales[by_row][:, by_column])

    def stored(self, rows: slice, columns: slice) -> StoredGroups | None:
        """Returns None, see `layers.weights.QuantizedSource`."""
        return None


def _part(index: Any, shape: Iterable[int]) -> tuple[slice, slice]:
    """Returns the rows and the columns that an index names, with their borders."""
    parts = index if isinstance(index, tuple) else (index,)
    sizes = list(shape)
    whole = [*parts, slice(None)][:2]
    rows, columns = (slice(*one.indices(size)[:2]) for one, size in zip(whole, sizes, strict=True))
    return rows, columns


def _common_size(group_size: int, columns: slice) -> int | None:
    """Returns the largest size of groups that begin with the part and do not cross a border of the
    file's groups; None: it is no multiple of what the kernels need."""
    first, last = columns.start // group_size, (columns.stop - 1) // group_size
    if first == last:
        size: int = columns.stop - columns.start
        return -(-size // _STEP) * _STEP
    size = math.gcd(group_size, columns.start)
    return size if size % _STEP == 0 else None


def merge_tensors(
    tensors: Iterable[CheckpointTensor],
    scheme: QuantizationScheme,
    is_wanted: Callable[[str], bool],
) -> Iterator[CheckpointTensor]:
    """Yields the tensors of a checkpoint, those of a quantised weight as one.

    Args:
        is_wanted: whether the model has a parameter of a name.

    Raises:
        ModelLoadError: the tensors of a weight do not fit each other or the scheme.
    """
    endings, has_ignored = _ENDINGS[scheme.method], False
    pending: dict[str, dict[str, CheckpointTensor]] = {}
    for file, name, source in tensors:
        prefix, _, ending = name.rpartition(".")
        if ending in endings:
            pending.setdefault(prefix, {})[ending] = file, name, source
        elif ending in _ACTIVATIONS:
            has_ignored = True
        else:
            yield file, name, source
    if has_ignored:
        logger.info("the checkpoint's scales of activations are not used: each token has its own")
    for prefix in list(pending):
        found = pending.pop(prefix)
        if not any(ending in found for ending in _NUMBERS[scheme.method]):
            yield from found.values()
            continue
        if (bias := found.pop("bias", None)) is not None and _has_bias(bias, is_wanted):
            yield bias
        file = next(iter(found.values()))[0]
        sources = {ending: source for ending, (_, _, source) in found.items()}
        yield file, f"{prefix}.weight", _join(f"{prefix} in {file}", sources, scheme)


def _has_bias(bias: CheckpointTensor, is_wanted: Callable[[str], bool]) -> bool:
    """Whether a bias counts: older tools write one of zeros for layers that have none."""
    _, name, source = bias
    return is_wanted(name) or bool(source[:].any())


def _join(where: str, found: Sources, scheme: QuantizationScheme) -> TensorSource:
    try:
        if "qweight" in found:
            return _words_of_columns(found, scheme)
        if "weight_packed" in found:
            return _packed_weight(found, scheme)
        return _scaled_weight(found, scheme)
    except KeyError as error:
        raise ModelLoadError(
            f"{where} has {', '.join(sorted(found))}, but no {error.args[0]}; the checkpoint was "
            "not copied whole, or its quantization_config is of another one"
        ) from None
    except _MisfitError as error:
        raise ModelLoadError(
            f"{where}: {error}; the quantization_config is of another checkpoint, or wrong"
        ) from None


class _MisfitError(Exception):
    """Tensors of a weight do not fit each other or the scheme."""


def _words_of_columns(found: Sources, scheme: QuantizationScheme) -> GroupedTensor:
    """AWQ and GPTQ: all tensors have inputs before outputs."""
    scales = Scales(found["scales"], is_transposed=True)
    inputs, outputs = found["qweight"].get_shape()
    width, num_scales = found["qzeros"].get_shape()[1], found["scales"].get_shape()[1]
    bits = next((bits for bits in scheme.bits if width * 32 == num_scales * bits), scheme.bits[0])
    per_word, groups = 32 // bits, None
    if scheme.method == "awq":
        outputs *= per_word
        numbers = Words(found["qweight"], bits, 1, True, is_halved=True)
        zeros = Words(found["qzeros"], bits, 1, True, is_halved=True)
    else:
        inputs *= per_word
        numbers = Words(found["qweight"], bits, 0, True)
        zeros = Words(found["qzeros"], bits, 1, True, is_less_one=scheme.is_less_one)
        groups = found.get("g_idx")
    size = _group_size(inputs, scales.num_groups, scheme)
    _expect("scales", found["scales"], [scales.num_groups, outputs])
    _expect("qzeros", found["qzeros"], [scales.num_groups, outputs // per_word])
    if groups is not None:
        _expect("g_idx", groups, [inputs])
    return GroupedTensor((outputs, inputs), bits, size, numbers, scales, zeros, groups)


def _packed_weight(found: Sources, scheme: QuantizationScheme) -> GroupedTensor:
    """compressed-tensors' pack-quantized: numbers share words along the inputs, zero points along
    the outputs."""
    outputs, inputs = found["weight_shape"][:].tolist()
    width = found["weight_packed"].get_shape()[1]
    fitting = [bits for bits in scheme.bits if -(-inputs * bits // 32) == width]
    if not fitting:
        raise _MisfitError(
            f"weight_packed has {width} words a row for {inputs} inputs of "
            f"{' or '.join(map(str, scheme.bits))} bits"
        )
    bits = fitting[0]
    numbers, scales = Words(found["weight_packed"], bits, 1), Scales(found["weight_scale"])
    _expect("weight_packed", found["weight_packed"], [outputs, width])
    _expect("weight_scale", found["weight_scale"], [outputs, scales.num_groups])
    size, zeros = _group_size(inputs, scales.num_groups, scheme), None
    if "weight_zero_point" in found:
        zeros = Words(found["weight_zero_point"], bits, 0)
        rows = -(-outputs * bits // 32)
        _expect("weight_zero_point", found["weight_zero_point"], [rows, scales.num_groups])
    if "weight_g_idx" in found:
        _expect("weight_g_idx", found["weight_g_idx"], [inputs])
    groups = found.get("weight_g_idx")
    return GroupedTensor((outputs, inputs), bits, size, numbers, scales, zeros, groups)


def _scaled_weight(found: Sources, scheme: QuantizationScheme) -> TensorSource:
    """A weight in int8 or fp8 and its scales."""
    weight = found["weight"]
    source = found["weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"]
    outputs, inputs = weight.get_shape()
    scales, shape = Scales(source), source.get_shape()
    sample = weight[:1, :1]
    if sample.dtype == torch.int8:
        if not scales.is_one:
            _expect("weight_scale", source, [outputs, scales.num_groups])
        zeros = found.get("weight_zero_point")
        if zeros is not None:
            _expect("weight_zero_point", zeros, [outputs, scales.num_groups])
        size = _group_size(inputs, scales.num_groups, scheme)
        numbers, middles = SignedBytes(weight), None if zeros is None else SignedBytes(zeros)
        return GroupedTensor((outputs, inputs), 8, size, numbers, scales, middles)
    if not sample.is_floating_point() or sample.element_size() != 1:
        raise _MisfitError(f"weight has the dtype {sample.dtype}, neither int8 nor float8")
    if scales.is_one:
        return BlockTensor(weight, scales, (outputs, inputs))
    if shape == [outputs, 1]:
        return BlockTensor(weight, scales, (1, inputs))
    if scheme.block is None:
        raise _MisfitError(f"its scales are {shape}, and no size of blocks is given")
    rows, columns = scheme.block
    _expect("the scales", source, [-(-outputs // rows), -(-inputs // columns)])
    return BlockTensor(weight, scales, scheme.block)


def _group_size(inputs: int, num_groups: int, scheme: QuantizationScheme) -> int:
    """Returns the size that the scheme names and the number of groups fits."""
    sizes = {size or inputs for size in scheme.group_sizes}
    fitting = [size for size in sizes if -(-inputs // size) == num_groups]
    if len(fitting) != 1:
        raise _MisfitError(
            f"{inputs} inputs have scales for {num_groups} groups, and group_size is "
            f"{' or '.join(map(str, sorted(sizes)))}"
        )
    return fitting[0]


def _expect(name: str, source: TensorSource, shape: list[int]) -> None:
    if source.get_shape() != shape:
        raise _MisfitError(f"{name} is {source.get_shape()}, expected {shape}")
