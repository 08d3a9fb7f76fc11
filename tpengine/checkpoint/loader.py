"""Fills a model's parameters from checkpoint files; each rank reads only its own slices.

Which slices: each layer declares a `WeightShard` for its tensors (`layers/weights.py`; for a linear
layer `_declare_rows` of `layers/linear.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open

from tpengine.checkpoint.gguf_file import is_gguf
from tpengine.checkpoint.kv_scales import without_scales
from tpengine.checkpoint.model_files import POINTER, POINTER_FAULT, WEIGHT_FILES, read_json
from tpengine.checkpoint.quantization_config import read_scheme
from tpengine.checkpoint.quantized_checkpoint import merge_tensors
from tpengine.checkpoint.text_tensors import text_tensors
from tpengine.config import ModelConfig
from tpengine.errors import ModelLoadError
from tpengine.layers.weights import (
    CheckpointTensor,
    LoadedTensor,
    RangeError,
    TensorSource,
    TypedSource,
    Weights,
    WeightShard,
    tensor_shape,
)
from tpengine.logger import init_logger
from tpengine.models.registry import CausalLM, build_model

logger = init_logger(__name__)

_DUMMY_STD = 0.02
_ROWS_AT_ONCE = 4096
_WHOLE = {"*.safetensors": "model.safetensors", "pytorch_model*.bin": "pytorch_model.bin"}
"""By pattern of `WEIGHT_FILES`: the name of a checkpoint that is one file."""


def load_model(
    config: ModelConfig, weights: Weights, check: Callable[[CausalLM], None] = lambda model: None
) -> CausalLM:
    """Builds the model and fills its parameters as `config.load_format` says.

    Args:
        check: called with the model before files are read; its errors are raised.

    Raises:
        ConfigError: the architecture is not supported.
        ModelLoadError: files are missing or damaged, or do not hold what the model needs; one error
            lists every missing, unexpected and misshapen tensor.
    """
    model = build_model(config, weights)
    check(model)
    if config.load_format == "dummy":
        generator = torch.Generator(device=weights.device)
        for name, shards in weights.shards.items():
            if name not in weights.elsewhere:
                generator.manual_seed(config.seed ^ crc32(name.encode()))  # the same at all stages
                weights.read(name, _DummyTensor(tensor_shape(shards), generator))
    else:
        _CheckpointReader(config, weights, model).run()
    weights.finish()
    return model


class _DummyTensor:
    """Random numbers in the place of a tensor of a file; ones in the place of a vector, such as the
    weights of norms and the biases."""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self._shape = shape
        self._generator = generator

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = torch.empty(self._shape, device="meta")[index].shape
        if len(self._shape) < 2:
            return torch.ones(shape)
        values = torch.empty(shape, device=self._generator.device)
        return values.normal_(0.0, _DUMMY_STD, generator=self._generator)


class _CheckpointReader:
    """Reads all files of a checkpoint once, and collects every problem before it raises."""

    def __init__(self, config: ModelConfig, weights: Weights, model: CausalLM) -> None:
        self._folder = Path(config.model)
        self._load_format = config.load_format
        self._is_text_half = config.text_half_of is not None
        self._scheme = read_scheme(config.hf_config, config.model)
        modules = () if config.pooling is None else config.pooling.dense
        self._module_folders = [dense.folder for dense in modules]
        self._weights = weights
        self._shards = weights.shards
        self._repeated: dict[str, TensorSource] = {}
        self._model = model
        self._missing = set(weights.shards)
        self._names = dict.fromkeys([*weights.shards, *weights.repeats])
        self._found_repeats: list[CheckpointTensor] = []
        self._problems: list[str] = []

    def run(self) -> None:
        for tensor in self._weights.convert(self._tensors()):
            self._take(*tensor)
        for file, name, source in self._found_repeats:  # after the tensors that they repeat
            original = self._weights.repeats[name]
            if original in self._missing:  # a checkpoint may have either name
                self._read(file, name, source, original)
            else:
                self._compare(file, name, source)
        for name in sorted(self._missing):
            self._problems.append(f"missing: {name} {list(tensor_shape(self._shards[name]))}")
        if self._problems:
            raise ModelLoadError(
                f"the weights in {self._folder} do not fit the model "
                f"({len(self._problems)} tensors):\n  " + "\n  ".join(self._problems)
            )

    def _tensors(self) -> Iterator[tuple[str, str, TensorSource]]:
        if is_gguf(self._folder):
            # The library is imported for such files only.
            from tpengine.checkpoint import gguf_weights

            yield from gguf_weights.read_tensors(str(self._folder), self._names)
            return
        tensors: Iterator[tuple[str, str, TypedSource]] = (
            (path.name, name, source)
            for path in checkpoint_files(self._folder, self._load_format)
            for name, source in read_tensors(path)
        )
        if self._is_text_half:
            prefix, others = self._model.base_prefix, self._weights.others
            tensors = text_tensors(tensors, self._names, prefix, others)
        tensors = without_scales(tensors, self._names, self._weights.kv_scales)
        if self._scheme is None:
            yield from tensors
        else:
            yield from merge_tensors(tensors, self._scheme, self._declared)
        for folder in self._module_folders:
            for path in checkpoint_files(self._folder / folder, "auto"):
                for name, source in read_tensors(path):
                    yield f"{folder}/{path.name}", f"{folder}/{name}", source

    def _declared(self, name: str) -> Sequence[WeightShard]:
        return self._shards.get(name, self._shards.get(self._model.base_prefix + name, []))

    def _take(self, file: str, name: str, source: TensorSource) -> None:
        wanted = name if name in self._shards else self._model.base_prefix + name
        if wanted in self._missing:
            self._read(file, name, source, wanted)
        elif name in self._weights.repeats:
            self._found_repeats.append((file, name, source))
        elif not name.endswith(self._model.ignored_weights):
            self._problems.append(f"unexpected: {name} in {file}")

    def _read(self, file: str, name: str, source: TensorSource, wanted: str) -> None:
        self._missing.remove(wanted)
        if self._fits(file, name, source, wanted) and wanted not in self._weights.elsewhere:
            try:
                self._weights.read(wanted, source)
            except RangeError as error:
                raise ModelLoadError(f"{name} in {file} cannot be packed: {error}") from None
            if wanted in self._weights.repeats.values():
                self._repeated[wanted] = source

    def _compare(self, file: str, name: str, source: TensorSource) -> None:
        original = self._weights.repeats[name]
        first = self._repeated.get(original)
        if first is None or not self._fits(file, name, source, original):
            return
        (shard,) = self._shards[original]
        start, stop = 0, shard.target.shape[0]
        if shard.dim is not None:
            start, stop = shard.start, shard.start + shard.length
        for at in range(start, stop, _ROWS_AT_ONCE):
            rows, dtype = slice(at, min(at + _ROWS_AT_ONCE, stop)), shard.target.dtype
            if not torch.equal(source[rows].to(dtype), first[rows].to(dtype)):
                self._problems.append(
                    f"contradiction: {name} in {file} differs from {original}, and config.json "
                    "ties them (tie_word_embeddings); set it to false to use both"
                )
                return

    def _fits(self, file: str, name: str, source: TensorSource, wanted: str) -> bool:
        """Whether the tensor has the shape of `wanted`; if not, this is a problem."""
        shape, needed = tuple(source.get_shape()), tensor_shape(self._shards[wanted])
        if shape != needed:
            self._problems.append(
                f"misshapen: {name} in {file} is {list(shape)}, the model needs {list(needed)}"
            )
        return shape == needed


def checkpoint_files(folder: Path, load_format: str) -> list[Path]:
    """Returns the weight files of a folder: the one that holds the whole model, or those of the
    index, or all.

    Args:
        load_format: its forms are tried in the order of `WEIGHT_FILES`.

    Raises:
        ModelLoadError: the folder has no such files, or its index is damaged, names a file outside
            the folder, or names a file that is missing.
    """
    patterns = WEIGHT_FILES[load_format]
    for pattern in patterns:
        whole = folder / _WHOLE[pattern]
        index = whole.with_name(f"{whole.name}.index.json")
        files = sorted(folder.glob(pattern))
        if whole in files:  # as in transformers; an index beside it belongs to other files
            if unread := [path.name for path in (index, *files) if path != whole and path.exists()]:
                logger.info("weights: %s alone, without %.300s", whole, ", ".join(unread))
            return [whole]
        if index.is_file():
            return _indexed_files(folder, index)
        if files:
            return files
    raise ModelLoadError(
        f"{folder} has no {' or '.join(patterns)} files, which load_format = {load_format!r} reads;"
        " use load_format='auto' (--load-format auto) if it has the others, convert the weights to "
        "safetensors, or use load_format='dummy' for random ones"
    )


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is not a valid index: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{index} names {name!r}, which lies outside the folder")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelLoadError(
            f"{folder} lacks {len(absent)} of the {len(names)} files that its index names: "
            f"{', '.join(absent)}"
        )
    return [folder / name for name in names]


def read_tensors(path: Path) -> Iterator[tuple[str, TypedSource]]:
    """Yields name and source of every tensor of a file.

    Raises:
        ModelLoadError: the file is damaged, or holds something else than tensors.
    """
    if path.suffix == ".bin":
        with _damage_named(path):
            state = _unpickle(path)
        for name, tensor in state.items():
            yield name, LoadedTensor(tensor)
        return
    tensors: deque[tuple[str, _MappedTensor]] = deque()
    with _damage_named(path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no dict)
            part = file.get_slice(name)
            shape = part.get_shape()
            sample = part[:0] if shape else part[...]
            tensors.append((name, _MappedTensor(path, name, shape, sample.dtype)))
    while tensors:  # a tensor that is held here would keep its mapping
        yield tensors.popleft()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        with path.open("rb") as file:  # safetensors calls each failure to open it a missing file
            start = file.read(len(POINTER))
        if start == POINTER:
            raise ModelLoadError(f"{path} cannot be read: {POINTER_FAULT}")
        yield
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None)
        fault = reason or f"{error}; the file is damaged or was not copied whole"
        raise ModelLoadError(f"{path} cannot be read: {fault}") from error


class _MappedTensor:
    """A tensor of a safetensors file, see `TypedSource`.

    The file is mapped again for every tensor, when values of it are read: pages that were read
    count as memory of this process while they are mapped, and a rank must hold no more than its own
    part and one weight. Shape and dtype need no mapping: tensors of many quantised weights may wait
    for each other, and a process may have only some 65,000 mappings.
    """

    def __init__(self, path: Path, name: str, shape: list[int], dtype: torch.dtype) -> None:
        self._path = path
        self._name = name
        self._shape = shape
        self.dtype = dtype

    @cached_property
    def _slice(self) -> TensorSource:
        with _damage_named(self._path):
            source: TensorSource = safe_open(self._path, framework="pt").get_slice(self._name)
        return source

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice[index]


def _unpickle(path: Path) -> Mapping[str, torch.Tensor]:
    # The file is mapped if its format allows it (files of torch before 1.6 do not), so that a rank
    # reads only its slices. In both cases only tensors are unpickled.
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, EOFError, RuntimeError, OSError …
        first_line = str(error).strip().partition("\n")[0]
        raise ModelLoadError(
            f"{path} cannot be read with weights_only: {type(error).__name__}: {first_line}; the "
            "file is damaged, or holds more than tensors"
        ) from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise ModelLoadError(f"{path} is no checkpoint: it must hold a dict of named tensors")
    return state
