"""GGUF files: their metadata and the table of their tensors, checked before anything is allocated.

Every count, length and offset is compared with the size of the file as it is read, so that a file
that is cut off or hostile costs no more memory than its own size allows. The check keeps what it
has read, and nothing parses the file a second time: the reader of the library `gguf` takes 1.8 s
for the vocabulary of SmolLM2, this one 0.05 s. The library knows the types of tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tpengine.errors import ModelLoadError

TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
"""Types of tensors that can be read, by their names in the library `gguf`."""

_SCALARS = "BbHhIif?__Qqd"
"""By the number of a value's type: its letter in `struct` and numpy."""
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY = {"metadata": 13, "tensors": 24}
_MAX_NAME_BYTES = 65_535
_MAX_DIMS = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        file: the file that holds it.
        shape: outermost dimension first, as torch has it.
        type: one of `TENSOR_TYPES`.
        offset: of its first byte in the file.
        row_bytes: bytes of one index of all dimensions but the last; 0 if the tensor is empty.
    """

    file: Path
    shape: tuple[int, ...]
    type: str
    offset: int
    row_bytes: int

    def rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Maps the tensor's bytes as `[num_rows, row_bytes]`, uint8; nothing is read yet."""
        shape = (math.prod(self.shape[:-1]), self.row_bytes)
        return np.memmap(self.file, np.uint8, "r", self.offset, shape)


@dataclass(frozen=True)
class GGUFFile:
    """A model in one GGUF file, or in the parts of one.

    Attributes:
        metadata: by key. Arrays of strings are lists, other arrays are numpy's.
        tensors: by the name in the file; of all parts.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def is_gguf(path: str | Path) -> bool:
    """Whether `path` names a GGUF file by its ending."""
    return Path(path).suffix == ".gguf"


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder, of a split one the first part; None: it has none.

    Raises:
        ModelLoadError: it has several.
    """
    models = {first_part(path) for path in folder.glob("*.gguf")}
    if len(models) > 1:
        names = ", ".join(sorted(path.name for path in models))
        raise ModelLoadError(f"{folder} holds {len(models)} GGUF files ({names}): name one of them")
    return next(iter(models), None)


def first_part(path: Path) -> Path:
    """Returns the first part of a split file; another file is itself."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads metadata and tensor table of a file and its further parts; the last file is kept.

    Raises:
        ModelLoadError: a file is missing, damaged, or holds a type of tensor that cannot be read.
    """
    path = first_part(Path(path))
    try:
        stat = path.stat()
        return _open(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ModelLoadError(
            f"{path} cannot be read ({error.strerror}); the first part of a split file ends in "
            "-00001-of-N.gguf, and all parts lie in one folder"
        ) from error


@functools.lru_cache(maxsize=1)
def _open(path: Path, size: int, mtime_ns: int) -> GGUFFile:
    first = _Reader(path)
    tensors: dict[str, TensorEntry] = {}
    match = _PART.fullmatch(path.name)
    for number in range(1, 1 + (1 if match is None else int(match[3]))):
        part = (
            path if match is None else path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        )
        found = (first if part == path else _Reader(part)).tensors
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelLoadError(f"{part} holds {twice[0]!r}, which an earlier part holds too")
        tensors.update(found)
    return GGUFFile(path, first.metadata, tensors)


class _Reader:
    """Reads one file from its start, and refuses what the rest of it cannot hold."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        with path.open("rb") as file:
            self._size = file.seek(0, 2)
            if self._size < 24:
                self._refuse(f"it has {self._size} bytes, fewer than the 24 of a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                self._read()

    def _refuse(self, problem: str) -> NoReturn:
        raise ModelLoadError(
            f"{self._path} is no whole GGUF file: {problem} (byte {self._at} of {self._size}); it "
            "is damaged, was not copied whole, or is of another format"
        )

    def _read(self) -> None:
        if self._data[:4] != b"GGUF":
            self._refuse(f"it begins with {self._data[:4]!r} instead of b'GGUF'")
        self._at = 4
        version, num_tensors, num_values = self._numbers("IQQ")
        if version not in (2, 3):
            self._refuse(f"its version is {version}; versions 2 and 3 are read, little-endian")
        for what, count in (("tensors", num_tensors), ("metadata", num_values)):
            if count * _SMALLEST_ENTRY[what] > self._size:
                self._refuse(f"its header counts {count} entries of {what}")
        for _ in range(num_values):
            key = self._name(self.metadata)
            (kind,) = self._numbers("I")
            self.metadata[key] = self._array(key) if kind == _ARRAY else self._value(kind, key)
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name, entry = self._entry(entries)
            entries[name] = entry
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r}, which is no power of 2")
        start = -(-self._at // alignment) * alignment
        for name, (shape, kind, offset) in entries.items():
            if offset % alignment:
                self._refuse(f"{name} lies at {offset}, which is no multiple of {alignment}")
            self.tensors[name] = self._place(shape, kind, start + offset, name)

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        at, size = self._at, struct.calcsize(f"<{letters}")
        if size > self._size - at:
            self._refuse(f"{size} bytes are missing")
        self._at = at + size
        return struct.unpack_from(f"<{letters}", self._data, at)

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        if length > self._size - self._at:
            self._refuse(f"a string of {length} bytes goes beyond the end")
        self._at += length
        try:
            return self._data[self._at - length : self._at].decode()
        except UnicodeDecodeError as error:
            self._refuse(f"a string is not UTF-8 ({error.reason})")

    def _name(self, known: Mapping[str, Any]) -> str:
        name = self._string()
        if not name or len(name) > _MAX_NAME_BYTES or name in known:
            self._refuse(f"the name {name[:80]!r} is empty, too long or there twice")
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        return self._numbers(self._scalar(kind, key))[0]

    def _scalar(self, kind: int, key: str) -> str:
        if kind >= len(_SCALARS) or kind in (_STRING, _ARRAY):
            self._refuse(f"{key} has values of type {kind}, which is unknown or an array")
        return _SCALARS[kind]

    def _array(self, key: str) -> Any:
        kind, count = self._numbers("IQ")
        if kind == _STRING:
            return self._strings(count, key)
        dtype = np.dtype(f"<{self._scalar(kind, key)}")
        if count * dtype.itemsize > self._size - self._at:
            self._refuse(f"{key} has {count} values")
        self._at += count * dtype.itemsize
        return np.frombuffer(self._data[self._at - count * dtype.itemsize : self._at], dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        """Reads them in one loop without calls: vocabularies have hundreds of thousands."""
        data, at, size, length_at = (
            self._data,
            self._at,
            self._size,
            struct.Struct("<Q").unpack_from,
        )
        if count * 8 > size - at:
            self._refuse(f"{key} has {count} strings")
        found = []
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                if end > size:
                    raise struct.error("a string goes beyond the end")
                found.append(data[at + 8 : end].decode())
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            self._refuse(f"string {len(found)} of {key} cannot be read: {error}")
        self._at = at
        return found

    def _entry(self, known: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._name(known)
        (num_dims,) = self._numbers("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._refuse(f"{name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are read")
        *dims, kind, offset = self._numbers(f"{num_dims}QIQ")
        return name, (tuple(reversed(dims)), kind, offset)

    def _place(self, shape: tuple[int, ...], kind: int, offset: int, name: str) -> TensorEntry:
        kind_name, values, num_bytes = _types().get(kind, (f"number {kind}", 0, 0))
        if kind_name not in TENSOR_TYPES:
            raise ModelLoadError(
                f"{name} in {self._path} has the type {kind_name}, which is not supported; "
                f"supported: {', '.join(TENSOR_TYPES)}. Quantize the model to one of them"
            )
        if min(shape) < 1 or shape[-1] % values:
            self._refuse(f"{name} is {list(shape)}; rows of {kind_name} need blocks of {values}")
        row_bytes = shape[-1] // values * num_bytes
        if offset + math.prod(shape[:-1]) * row_bytes > self._size:
            self._refuse(f"{name} {list(shape)} at byte {offset} goes beyond the end")
        return TensorEntry(self._path, shape, kind_name, offset, row_bytes)


@functools.cache
def _types() -> dict[int, tuple[str, int, int]]:
    """By number of a tensor type: its name, the values of a block, and the bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
