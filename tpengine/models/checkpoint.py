"""The files of a checkpoint: which there are, and their tensors, read in slices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tpengine.errors import ModelLoadError


class TensorSource(Protocol):
    """One tensor of a file, of which only the indexed part is read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class CheckpointFile(Protocol):
    """An open file."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> TensorSource: ...


def checkpoint_files(folder: Path, load_format: str) -> list[Path]:
    """The weights of a folder, by its index where it has one.

    Args:
        load_format: `pt` takes `pytorch_model*.bin`, everything else `*.safetensors`.

    Raises:
        ModelLoadError: there are none, the index is broken, names a file outside the folder, or
            one that is not there.
    """
    if load_format == "pt":
        whole, pattern = "pytorch_model.bin", "pytorch_model*.bin"
    else:
        whole, pattern = "model.safetensors", "*.safetensors"
    index = folder / f"{whole}.index.json"
    if index.is_file():
        return _indexed_files(folder, index)
    found = [folder / whole] if (folder / whole).is_file() else sorted(folder.glob(pattern))
    if found:
        return found
    if load_format != "pt" and any(folder.glob("pytorch_model*.bin")):
        raise ModelLoadError(
            f"{folder} has its weights as pytorch_model*.bin (pickle) only, which are read when "
            "asked for: use load_format='pt' (--load-format pt; nothing but tensors is unpickled), "
            "or convert them to safetensors"
        )
    raise ModelLoadError(
        f"{folder} has no {pattern} files; convert the weights to safetensors, or "
        "use load_format='dummy' for random ones"
    )


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
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


@contextmanager
def open_checkpoint(path: Path, load_format: str) -> Iterator[CheckpointFile]:
    """Opens one file of `checkpoint_files`.

    Raises:
        ModelLoadError: it is damaged, or holds something else than tensors.
    """
    if load_format == "pt":
        yield _TorchFile(_unpickle(path))
        return
    try:
        yield _SafetensorsFile(path)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} cannot be read: {error}; the file is damaged or was not copied whole"
        ) from error


def _unpickle(path: Path) -> Mapping[str, torch.Tensor]:
    # Mapped where the file's format allows it (files of torch before 1.6 do not): a rank then
    # reads its slices only. In both cases nothing but tensors is unpickled.
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


class _SafetensorsFile:
    """Maps the file anew for every tensor: pages that were read count as this process's memory as
    long as they are mapped, and a rank shall hold no more than its share and one tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with safe_open(path, framework="pt") as file:
            self._names = list(file.keys())

    def keys(self) -> list[str]:
        return self._names

    def get_slice(self, name: str) -> TensorSource:
        source: TensorSource = safe_open(self._path, framework="pt").get_slice(name)
        return source


class _TorchFile:
    """An unpickled file, with the face of an open safetensors file."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def keys(self) -> list[str]:
        return list(self._state)

    def get_slice(self, name: str) -> TensorSource:
        return _TorchSource(self._state[name])


class _TorchSource:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]
