"""GGUF files: their metadata and the table of their tensors, checked before anything is allocated.

Every count, length and offset is compared with the size of the file as it is read, so that a file
that is cut off or hostile costs no more memory than its own size allows. The check keeps what it
has read, and nothing parses the file a second time: the reader of the library `gguf` takes 1.8 s
for the vocabulary of SmolLM2, this one 0.05 s. The library knows the types of tensors.
Names of tensors are translated in `gguf_weights.py`, names of metadata in `gguf_config.py`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
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

_MAGIC = b"GGUF"
_SCALARS = "BbHhIif?__Qqd"
"""By the number of a type of values: its letter in `struct`; strings and arrays have none."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.(?i:gguf))")
_NO_MODELS = ("adapter", "imatrix", "mmproj")
"""Values of `general.type`."""
_PROJECTOR = re.compile(
    rb"general\.architecture\x08\0{3}\x04\0{7}clip|general\.type\x08\0{3}\x06\0{7}mmproj"
)
"""What a projector has in its metadata: key, type, length, text. Old ones lack `general.type`."""
_HEAD_BYTES = 4096
"""Where it is looked for: every writer puts `general.architecture` first."""


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
    """Whether `path` names a GGUF file by its ending, or is a file that begins as one, such as a
    blob of a model store."""
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder, of a split one the first part; None: it has none. A
    projector counts only if it is alone.

    Raises:
        ModelLoadError: it has several.
    """
    files = _files(folder)
    models = [path for path in files if not _is_projector(path)] if len(files) > 1 else files
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelLoadError(f"{folder} holds {len(models)} GGUF files ({names}): name one of them")
    return next(iter(models or files), None)


def _files(folder: Path) -> list[Path]:
    return sorted({first_part(path) for path in folder.iterdir() if is_gguf(path)})


def _is_projector(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return _PROJECTOR.search(file.read(_HEAD_BYTES)) is not None
    return False  # opening it as a model says what is wrong with it


def first_part(path: Path) -> Path:
    """Returns the first part of a split file; another file is itself."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}{match[4]}")


def all_parts(first: Path) -> list[Path]:
    """The files of a model whose first one, or only one, this is."""
    match = _PART.fullmatch(first.name)
    if match is None:
        return [first]
    numbers = range(1, max(1, int(match[3])) + 1)
    return [first.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}") for i in numbers]


def model_name(name: str) -> str:
    """Name of a file without the ending, and that of a split one without its part's number."""
    match = _PART.fullmatch(name)
    return re.sub(r"\.(?i:gguf)$", "", name) if match is None else match[1]


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
            f"{error.filename or path} cannot be read ({error.strerror}); all parts of a split "
            "file, -00001-of-N.gguf and so on, must lie in one folder"
        ) from error


@functools.lru_cache(maxsize=1)
def _open(path: Path, size: int, mtime_ns: int) -> GGUFFile:
    parts, readers = all_parts(path), []
    for number, path in enumerate(parts):
        readers.append(_Reader(path))
        readers[-1].check_part(number, len(parts))
    tensors: dict[str, TensorEntry] = {}
    for reader in readers:
        if twice := sorted(tensors.keys() & reader.tensors.keys()):
            raise ModelLoadError(f"{path}: two parts hold {twice[0]!r}; take all from one source")
        tensors.update(reader.tensors)
    return GGUFFile(first_part(path), readers[0].metadata, tensors)


class _Reader:
    """Reads one file from its start, and refuses what the rest of it cannot hold."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        with path.open("rb") as file:
            self._size = file.seek(0, 2)
            if not self._size:
                self._refuse("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                self._read()

    def check_part(self, number: int, count: int) -> None:
        """Raises ModelLoadError if the file is not what its name says: it is no model, or another
        part of one, because it was renamed, or its parts were appended to each other."""
        if _is_projector(self._path):
            models = [path.name for path in _files(self._path.parent) if not _is_projector(path)]
            raise ModelLoadError(
                f"{self._path} is a projector: it turns pictures or sound into a model's inputs, "
                "which is not supported. Give the file of the language model: "
                f"{', '.join(models) or 'it is published beside this one'}"
            )
        if (kind := str(self.metadata.get("general.type"))) in _NO_MODELS:
            raise ModelLoadError(f"{self._path} holds no model, its general.type is {kind!r}")
        part = [str(self.metadata.get(f"split.{key}", 0)) for key in ("no", "count")]
        if part[1] != "0" and part != [str(number), str(count)]:
            raise ModelLoadError(
                f"{self._path} is a part of a split model (split.no = {part[0]:.20}, split.count = "
                f"{part[1]:.20}), which its name does not say; name all parts as they were, "
                "NAME-00001-of-00002.gguf and so on, in one folder, or make one file of them with "
                "llama-gguf-split --merge: appending them does not"
            )

    def _refuse(self, problem: str) -> NoReturn:
        raise ModelLoadError(
            f"{self._path} is no whole GGUF file: {problem} (byte {self._at} of {self._size}); it "
            "is damaged, was not copied whole, or is of another format"
        )

    def _read(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ModelLoadError(
                f"{self._path} is not a GGUF file: it does not begin with GGUF, but with "
                f"{self._data[:24]!r}; fetch it again, or name another one"
            )
        _, version, num_tensors, num_values = self._numbers("4sIQQ")
        if version not in (2, 3):
            self._refuse(f"it has version {version}; versions 2 and 3, little-endian, are read")
        for _ in range(num_values):
            key = self._name(self.metadata)
            self.metadata[key] = self._value(key, *self._numbers("I"))
        entries: dict[str, tuple[int, ...]] = {}
        for _ in range(num_tensors):
            name = self._name(entries)
            (num_dims,) = self._numbers("I")
            if not 1 <= num_dims <= 4:
                self._refuse(f"{name} has {num_dims} dimensions; 1 to 4 are read")
            entries[name] = self._numbers(f"{num_dims}QIQ")
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r}, which is no power of 2")
        start = -(-self._at // alignment) * alignment
        for name, (*dims, kind, offset) in entries.items():
            if offset % alignment:
                self._refuse(f"{name} lies at {offset}, which is no multiple of {alignment}")
            self.tensors[name] = self._place(name, tuple(reversed(dims)), kind, start + offset)

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        at, size = self._at, struct.calcsize(f"<{letters}")
        if size > self._size - at:
            self._refuse(f"{size} bytes are missing")
        self._at = at + size
        return struct.unpack_from(f"<{letters}", self._data, at)

    def _name(self, known: Mapping[str, Any]) -> str:
        (name,) = self._strings(1, "a name")
        if name in known:
            self._refuse(f"{name!r} is there twice")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._strings(1, key)[0]
        if kind != _ARRAY:
            return self._numbers(self._letter(key, kind))[0]
        kind, count = self._numbers("IQ")
        if kind == _STRING:
            return self._strings(count, key)
        dtype = np.dtype(f"<{self._letter(key, kind)}")
        if count * dtype.itemsize > self._size - self._at:
            self._refuse(f"{key} has {count} values, more than the file holds")
        self._at += count * dtype.itemsize
        return np.frombuffer(self._data[self._at - count * dtype.itemsize : self._at], dtype)

    def _letter(self, key: str, kind: int) -> str:
        if kind >= len(_SCALARS) or kind in (_STRING, _ARRAY):
            self._refuse(
                f"{key} has values of type {kind}, which is unknown, or an array inside an array"
            )
        return _SCALARS[kind]

    def _strings(self, count: int, key: str) -> list[str]:
        """Reads them in one loop without calls: vocabularies have hundreds of thousands."""
        data, at, size, length_at = self._data, self._at, self._size, _LENGTH.unpack_from
        strings = []
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                if end > size:
                    raise struct.error(f"it goes beyond the end, to byte {end}")
                strings.append(data[at + 8 : end].decode())
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            self._refuse(f"string {len(strings)} of {count} of {key} cannot be read: {error}")
        self._at = at
        return strings

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
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
