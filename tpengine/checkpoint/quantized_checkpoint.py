"""Quantised weights of a folder: AWQ, GPTQ, compressed-tensors and fp8.

Such a checkpoint holds several tensors for a weight: its numbers, of which several may share a word
of 32 bits, their scales, zero points, the group of each input. They become one source under the
name that the model knows, `X.weight` `[out, in]`.

Sources: https://github.com/casper-hansen/AutoAWQ, https://github.com/ModelCloud/GPTQModel,
https://github.com/vllm-project/compressed-tensors, https://huggingface.co/docs/transformers
(finegrained_fp8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from tpengine.checkpoint.quantization_config import QuantizationScheme
from tpengine.checkpoint.quantized_sources import BlockTensor, GroupedTensor, SignedBytes, Words
from tpengine.errors import ModelLoadError
from tpengine.layers.weights import CheckpointTensor, TypedSource, WeightShard
from tpengine.logger import init_logger

logger = init_logger(__name__)

_ENDINGS = {
    "awq": ("qweight", "qzeros", "scales", "bias"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx", "bias"),
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
        "weight_g_idx",
    ),
    "fp8": ("weight", "weight_scale", "weight_scale_inv"),
}
_MARKERS = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}
"""A weight that has a tensor with one of these endings is quantised."""
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")
"""Scales of activations, found in advance; the engine scales each token by its own values."""

_WORDS = (torch.int32,)
_BYTES = (torch.int8,)
_EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
_INDICES = (torch.int32, torch.int64)


def merge_tensors(
    tensors: Iterable[tuple[str, str, TypedSource]],
    scheme: QuantizationScheme,
    declared: Callable[[str], Sequence[WeightShard]],
) -> Iterator[CheckpointTensor]:
    """Yields the tensors of a checkpoint, those of a quantised weight as one.

    Args:
        declared: the parts that the model has of the parameter of a name, or nothing.

    Raises:
        ModelLoadError: the tensors of a weight do not fit each other or the scheme.
    """
    endings, has_ignored = _ENDINGS[scheme.method], False
    pending: dict[str, dict[str, tuple[str, str, TypedSource]]] = {}
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
        entries = pending.pop(prefix)
        if not _MARKERS & entries.keys():
            yield from entries.values()
            continue
        bias = entries.pop("bias", None)
        # Older tools write a bias of zeros for layers that have none.
        if bias is not None and (declared(bias[1]) or bool(bias[2][:].any())):
            yield bias
        file, name = next(iter(entries.values()))[0], f"{prefix}.weight"
        parts = _Parts({ending: source for ending, (_, _, source) in entries.items()})
        is_transposed = any(shard.is_transposed for shard in declared(name))
        yield file, name, _join(f"{prefix} in {file}", parts, scheme, is_transposed)


def _join(
    where: str, parts: _Parts, scheme: QuantizationScheme, is_transposed: bool
) -> GroupedTensor | BlockTensor:
    try:
        if "qweight" in parts:
            source: GroupedTensor | BlockTensor = _awq_or_gptq_weight(parts, scheme, is_transposed)
        elif "weight_packed" in parts:
            source = _packed_weight(parts, scheme)
        else:
            source = _scaled_weight(parts, scheme)
        parts.check_all_taken()
    except _MisfitError as error:
        raise ModelLoadError(
            f"{where}: {error}; the checkpoint was not copied whole, or its quantization_config is "
            "of another one, or wrong"
        ) from None
    return source


class _MisfitError(Exception):
    """Tensors of a weight do not fit each other or the scheme."""


class _Parts:
    """The tensors of one quantised weight by their endings; each is checked when it is taken."""

    def __init__(self, sources: Mapping[str, TypedSource]) -> None:
        self._found = ", ".join(sorted(sources))
        self._left = dict(sources)

    def __contains__(self, ending: str) -> bool:
        return ending in self._left

    def shape(self, ending: str) -> list[int]:
        """Returns the shape of a tensor, `[0]` if it is not there."""
        return self._left[ending].get_shape() if ending in self._left else [0]

    def take(self, ending: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> TypedSource:
        """Returns a tensor.

        Args:
            shape: None: any size.

        Raises:
            _MisfitError: it is not there, or has another dtype or shape.
        """
        if ending not in self._left:
            raise _MisfitError(f"it has {self._found}, but no {ending}")
        source = self._left.pop(ending)
        _expect(ending, source, dtypes, *shape)
        return source

    def take_column(
        self, ending: str, dtypes: tuple[torch.dtype, ...], outputs: int, groups: int | None = None
    ) -> torch.Tensor:
        """Returns the values of a tensor `[outputs, groups]`; `[outputs]`, or one number for all,
        as one group.

        Raises:
            _MisfitError: see `take`.
        """
        shape = self.shape(ending)
        if groups in (None, 1) and (shape == [outputs] or math.prod(shape) == 1):
            return self.take(ending, dtypes, *shape)[...].reshape(-1, 1).expand(outputs, 1)
        return self.take(ending, dtypes, outputs, groups)[:]

    def take_groups(
        self, ending: str, inputs: int, group_size: int, num_groups: int
    ) -> torch.Tensor | None:
        """Returns the group of each input, int64 `[inputs]`; None: groups are of neighbours.

        Raises:
            _MisfitError: see `take`; or there is no such group.
        """
        if ending not in self._left:
            return None
        indices = self.take(ending, _INDICES, inputs)[:].long()
        if ending == "weight_g_idx" and bool((indices == -1).any()):
            return None  # compressed-tensors' mark of a weight without an order
        if int(indices.min()) < 0 or int(indices.max()) >= num_groups:
            raise _MisfitError(f"{ending} names a group beyond the {num_groups} of its scales")
        return None if torch.equal(indices, torch.arange(inputs) // group_size) else indices

    def check_all_taken(self) -> None:
        """Raises `_MisfitError` if a tensor is left: it would change the weight."""
        if self._left:
            names = ", ".join(sorted(self._left))
            raise _MisfitError(f"it has {self._found}, of which {names} cannot be used")


def _expect(
    name: str, source: TypedSource, dtypes: tuple[torch.dtype, ...], *shape: int | None
) -> None:
    """See `_Parts.take`."""
    actual = source.get_shape()
    fits = len(actual) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(actual, shape, strict=True)
    )
    kind, *kinds = (str(dtype).removeprefix("torch.") for dtype in (source.dtype, *dtypes))
    if source.dtype not in dtypes:
        raise _MisfitError(f"{name} is {kind} {actual}, expected {' or '.join(kinds)}")
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise _MisfitError(f"{name} is {actual}, expected [{sizes}]")


def _awq_or_gptq_weight(
    parts: _Parts, scheme: QuantizationScheme, is_transposed: bool
) -> GroupedTensor:
    """AWQ and GPTQ: all tensors have inputs before outputs, those of a Conv1D too."""
    qweight = parts.take("qweight", _WORDS, None, None)
    factors = parts.take("scales", _SCALES, None, None)
    num_groups, num_scales = factors.get_shape()
    qzeros = parts.take("qzeros", _WORDS, num_groups, None)
    width = qzeros.get_shape()[1]
    bits = next((bits for bits in scheme.bits if width * 32 == num_scales * bits), scheme.bits[0])
    (inputs, outputs), is_awq = qweight.get_shape(), scheme.method == "awq"
    if is_awq:
        outputs *= 32 // bits
    else:
        inputs *= 32 // bits
    _expect("scales", factors, _SCALES, num_groups, outputs)
    _expect("qzeros", qzeros, _WORDS, num_groups, outputs * bits // 32)
    size = _group_size(inputs, num_groups, scheme)
    shape, scales = (outputs, inputs), factors[:].float().t()
    numbers = Words(qweight, bits, 1 if is_awq else 0, True, is_halved=is_awq)
    packed_zeros = Words(qzeros, bits, 1, True, is_halved=is_awq, is_less_one=scheme.is_less_one)
    zeros = packed_zeros.read(slice(0, outputs), slice(0, num_groups))
    groups = parts.take_groups("g_idx", inputs, size, num_groups)
    return GroupedTensor(shape, bits, size, numbers, scales, zeros, groups, is_transposed)


def _packed_weight(parts: _Parts, scheme: QuantizationScheme) -> GroupedTensor:
    """compressed-tensors' pack-quantized: numbers share words along the inputs, zero points along
    the outputs."""
    outputs, inputs = parts.take("weight_shape", _INDICES, 2)[:].tolist()
    packed = parts.take("weight_packed", _WORDS, outputs, None)
    width = packed.get_shape()[1]
    fitting = [bits for bits in scheme.bits if -(-inputs * bits // 32) == width]
    if not fitting:
        raise _MisfitError(
            f"weight_packed has {width} words a row for {inputs} inputs of "
            f"{' or '.join(map(str, scheme.bits))} bits"
        )
    bits = fitting[0]
    scales, zeros = parts.take_column("weight_scale", _SCALES, outputs).float(), None
    num_groups = scales.shape[1]
    size = _group_size(inputs, num_groups, scheme)
    if "weight_zero_point" in parts:
        rows = -(-outputs * bits // 32)
        packed_zeros = Words(parts.take("weight_zero_point", _WORDS, rows, num_groups), bits, 0)
        zeros = packed_zeros.read(slice(0, outputs), slice(0, num_groups))
    groups = parts.take_groups("weight_g_idx", inputs, size, num_groups)
    shape, numbers = (outputs, inputs), Words(packed, bits, 1)
    return GroupedTensor(shape, bits, size, numbers, scales, zeros, groups)


def _scaled_weight(parts: _Parts, scheme: QuantizationScheme) -> GroupedTensor | BlockTensor:
    """A weight in int8 or fp8 and its scales."""
    weight = parts.take("weight", (*_BYTES, *_EIGHT_BIT_FLOATS), None, None)
    outputs, inputs = weight.get_shape()
    ending = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    if weight.dtype not in _BYTES:
        return _fp8_weight(weight, ending, parts, scheme)
    scales, zeros = parts.take_column(ending, _SCALES, outputs).float(), None
    num_groups = scales.shape[1]
    size = _group_size(inputs, num_groups, scheme)
    if "weight_zero_point" in parts:
        zeros = parts.take_column("weight_zero_point", _BYTES, outputs, num_groups)
        zeros = zeros.contiguous().view(torch.uint8) ^ 128
    groups = parts.take_groups("weight_g_idx", inputs, size, num_groups)
    return GroupedTensor((outputs, inputs), 8, size, SignedBytes(weight), scales, zeros, groups)


def _fp8_weight(
    weight: TypedSource, ending: str, parts: _Parts, scheme: QuantizationScheme
) -> BlockTensor:
    outputs, inputs = weight.get_shape()
    shape = parts.shape(ending)
    if math.prod(shape) == 1 or shape in ([outputs], [outputs, 1]):
        return BlockTensor(weight, parts.take_column(ending, _SCALES, outputs).float(), (1, inputs))
    if scheme.block is None:
        raise _MisfitError(f"{ending} is {shape}, and no size of blocks is given")
    rows, columns = scheme.block
    source = parts.take(ending, _SCALES, -(-outputs // rows), -(-inputs // columns))
    return BlockTensor(weight, source[:].float(), scheme.block)


def _group_size(inputs: int, num_groups: int, scheme: QuantizationScheme) -> int:
    """Returns the size that the scheme names and the number of groups fits."""
    sizes = {size or inputs for size in scheme.group_sizes}
    fitting = [size for size in sizes if size and -(-inputs // size) == num_groups]
    if len(fitting) != 1:
        raise _MisfitError(
            f"{inputs} inputs have scales for {num_groups} groups, and group_size is "
            f"{' or '.join(map(str, sorted(sizes)))}"
        )
    return fitting[0]
