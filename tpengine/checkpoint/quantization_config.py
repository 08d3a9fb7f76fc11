"""What the `quantization_config` of a config.json says about weights of 4 and 8 bits.

A field that changes the result and has a value that is not supported is refused by name. Fields
that only tell how the tool worked (`damp_percent`, `observer`) are not read, nor are lists of
modules that stay plain (`ignore`, `modules_to_not_convert`): the names of the tensors tell that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.checkpoint.gguf_file import is_gguf
from tpengine.errors import ConfigError

_METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {
        "bits": (4,), "version": ("gemm", "GEMM", None), "zero_point": (True, None),
        "packing_format": (None,),
    },
    "gptq": {
        "bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None), "pack_dtype": ("int32", None),
        "is_marlin_format": (False, None), "rotation": (None,), "adapter": (None,),
        "packing_format": (None,),
    },
    "compressed-tensors": {
        "quantization_status": ("compressed", "frozen", None), "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}), "transform_config": (None, {}),
    },
    "fp8": {
        "activation_scheme": ("dynamic", "static", None), "fmt": ("e4m3", None),
        "kv_cache_scheme": ("static", None),
    },
}  # fmt: skip
"""By method: fields, and their values that are supported."""
_CACHE_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
"""The one `kv_cache_scheme` of compressed-tensors that is read: see `kv_scales.py`."""

_FORMATS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "pack-quantized": ("int", (4, 8), ("group", "channel")),
    "int-quantized": ("int", (8,), ("group", "channel", "tensor")),
    "naive-quantized": ("float", (8,), ("channel", "tensor", "block")),
    "float-quantized": ("float", (8,), ("channel", "tensor", "block")),
}
"""By format of compressed-tensors: type, bits and strategies of its weights."""

FILE_FORMS = {
    "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors", "fp8": "fp8", "gguf": "gguf",
}  # fmt: skip
"""Forms of files by the names that `quantization` has for them in scripts for vLLM."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How the weights of a checkpoint are stored.

    Attributes:
        method: one of `_METHODS`.
        bits: of a stored number, in the order in which they are tried.
        group_sizes: neighbouring inputs with one scale; 0: all inputs of an output.
        block: outputs and inputs with one scale, for weights in fp8; None: not in blocks.
        is_less_one: whether zero points are stored less one.
    """

    method: str
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...] = (0,)
    block: tuple[int, int] | None = None
    is_less_one: bool = False


def read_scheme(hf_config: Mapping[str, Any], folder: str) -> QuantizationScheme | None:
    """Returns what a model's configuration says; None: its weights are not quantised.

    Raises:
        ConfigError: a value is not supported.
    """
    section = hf_config.get("quantization_config")
    return None if section is None else _Reader(section, folder).read()


def chosen_quantization(chosen: str | None, hf: Mapping[str, Any], folder: str) -> str | None:
    """Returns the quantization that the engine does. Of a file that is quantised its name may be
    given, which changes nothing.

    Raises:
        ConfigError: the name is that of another form.
    """
    if chosen not in FILE_FORMS:
        return chosen
    form = (hf.get("quantization_config") or {}).get("quant_method")
    form = "gguf" if is_gguf(Path(folder)) else form
    if FILE_FORMS[chosen] != form:
        raise ConfigError(
            f"quantization = {chosen!r}, but the weights of {folder} are "
            f"{'not quantised' if form is None else form}; leave it unset, or use int8 or int4, "
            "which round weights when they are read"
        )
    return None


def _refusal(folder: str, field: str, value: object, supported: str) -> ConfigError:
    place = "config.json" if field == "quantization_config" else "the quantization_config"
    return ConfigError(
        f"{field} = {value!r} in {place} of {folder} is not supported; supported: "
        f"{supported}. Take the model in another form, or in 16 bits with quantization='int4' or "
        "'int8'"
    )


class _Reader:
    """Checks the fields of one `quantization_config`."""

    def __init__(self, fields: object, folder: str) -> None:
        self._folder = folder
        self._fields = self._object("quantization_config", fields)

    def read(self) -> QuantizationScheme:
        """See `read_scheme`."""
        method = self._fields.get("quant_method")
        self._check("quant_method", method, _METHODS)
        assert isinstance(method, str)
        for field, supported in _SUPPORTED[method].items():
            value = self._fields.get(field)
            if field == "bits" and value is None:
                value = self._fields.get("w_bit")  # AutoAWQ before 0.1.7
            if field == "sparsity_config" and isinstance(value, Mapping):
                value = {} if value.get("format") in (None, "dense") else value
            if field == "kv_cache_scheme" and isinstance(value, Mapping):
                is_read = {name: value.get(name) for name in _CACHE_SCHEME} == _CACHE_SCHEME
                value = None if is_read and value.get("symmetric", True) else value
            self._check(field, value, supported)
        if method == "compressed-tensors":
            return self._compressed_tensors()
        return self._fp8() if method == "fp8" else self._words(method)

    def _words(self, method: str) -> QuantizationScheme:
        """AWQ and GPTQ."""
        size = self._fields.get("group_size", self._fields.get("q_group_size"))
        bits = {self._fields.get("bits", self._fields.get("w_bit"))}
        sizes = {self._group_size(size)}
        # GPTQModel's own fields for some modules; "-:" begins a pattern of modules that stay plain.
        dynamic = self._object("dynamic", self._fields.get("dynamic") or {})
        for pattern, value in dynamic.items():
            if not pattern.startswith("-:"):
                fields = self._object(f"dynamic.{pattern}", value)
                self._check(f"dynamic.{pattern}.bits", fields.get("bits"), (4, 8, None))
                bits.add(fields.get("bits") or max(bits))
                sizes.add(self._group_size(fields.get("group_size", size)))
        formats = self._fields.get("checkpoint_format"), self._fields.get("format")
        is_less_one = method == "gptq" and "gptq_v2" not in formats
        sorted_bits, sorted_sizes = tuple(sorted(bits)), tuple(sorted(sizes))
        return QuantizationScheme(method, sorted_bits, sorted_sizes, is_less_one=is_less_one)

    def _fp8(self) -> QuantizationScheme:
        block = self._block("weight_block_size", self._fields.get("weight_block_size"))
        return QuantizationScheme("fp8", (8,), block=block)

    def _compressed_tensors(self) -> QuantizationScheme:
        groups = self._object("config_groups", self._fields.get("config_groups"))
        if not groups:
            raise _refusal(self._folder, "config_groups", groups, "groups of layers")
        bits, sizes, blocks = set(), set(), set()
        for name, value in groups.items():
            group = self._object(f"config_groups.{name}", value)
            weights = self._object(f"config_groups.{name}.weights", group.get("weights"))
            self._check_group(f"config_groups.{name}", group, weights)
            bits.add(int(weights["num_bits"]))
            if weights["strategy"] == "group":
                sizes.add(self._group_size(weights.get("group_size")))
            elif weights["strategy"] == "block":
                field = f"config_groups.{name}.weights.block_structure"
                blocks.add(self._block(field, weights.get("block_structure")))
        if len(blocks) > 1:
            raise _refusal(self._folder, "block_structure", sorted(map(str, blocks)), "one size")
        sorted_bits, block = tuple(sorted(bits)), next(iter(blocks), None)
        return QuantizationScheme("compressed-tensors", sorted_bits, (0, *sorted(sizes)), block)

    def _check_group(self, name: str, group: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        layout = group.get("format") or self._fields.get("format")
        self._check(f"{name}.format", layout, tuple(_FORMATS))
        assert isinstance(layout, str)
        kind, bits, strategies = _FORMATS[layout]
        if layout == "naive-quantized" and weights.get("type") == "int":
            kind, bits, strategies = _FORMATS["int-quantized"]
        for field, supported in self._weight_fields(kind, bits, strategies):
            self._check(f"{name}.weights.{field}", weights.get(field), supported)
        self._check(f"{name}.output_activations", group.get("output_activations"), (None,))

    def _weight_fields(
        self, kind: str, bits: tuple[int, ...], strategies: tuple[str, ...]
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        yield "type", (kind,)
        yield "num_bits", bits
        yield "strategy", strategies
        yield "dynamic", (False, None)
        yield "symmetric", (True, None) if kind == "float" else (True, False, None)
        yield "actorder", (None, False, "group", "weight", "static", "dynamic")

    def _object(self, field: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise _refusal(self._folder, field, value, "a JSON object")
        return value

    def _group_size(self, size: object) -> int:
        if type(size) is not int or not (size == -1 or size > 0):
            raise _refusal(self._folder, "group_size", size, "-1 and numbers of inputs")
        return max(size, 0)

    def _block(self, field: str, block: object) -> tuple[int, int] | None:
        if block is None:
            return None
        if isinstance(block, str):  # "128x128"
            block = [int(size) if size.isdecimal() else 0 for size in block.split("x")]
        if isinstance(block, (list, tuple)) and len(block) == 2:
            rows, columns = block
            if type(rows) is int and type(columns) is int and min(rows, columns) > 0:
                return rows, columns
        raise _refusal(self._folder, field, block, "numbers of outputs and inputs, e.g. [128, 128]")

    def _check(self, field: str, value: object, supported: tuple[Any, ...]) -> None:
        # False and 0, and True and 1, are equal in Python.
        if not any(type(value) is type(option) and value == option for option in supported):
            words = ", ".join(repr(option) for option in supported)
            raise _refusal(self._folder, field, value, words)
