"""Memory of a rank that outlives its process: its weights, its KV blocks and its host blocks.

All of it lies in a file without a name (a memfd). The agent of the rank's node makes the file and
keeps its descriptor (`NodeAgent.keep_memory`); the rank opens it by `/proc`. A rank that replaces a
lost one maps what that one has left, and neither reads nor computes it. On a GPU the weights and
the KV blocks are allocations beside this file, see `gpu_memory.py`.

The file is a header of one page, then sections. The header names the engine, the epoch in which the
memory began, the rank, its configuration, and the sections with their sizes. If a process expects
others, it uses nothing of the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import math
import mmap
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import TemporaryError
from tpengine.logger import init_logger
from tpengine.ops import huge_pages
from tpengine.worker.gpu_memory import GpuSections

logger = init_logger(__name__)

_HEADER_BYTES = 4096
_HEAD = struct.Struct("<8sQQ")  # magic, moves, bytes of the index
_MAGIC = b"tpemem02"
_MOVES_AT = 8
_ALIGNMENT, _GPU_ALIGNMENT = 64, 512
_POPULATE_S = 30.0
"""Limit of the time in which a part of the weights gets large pages; a GiB takes 1 s."""
_STATE, _WEIGHTS, _BLOCKS, _HOST_BLOCKS = "state", "weights", "blocks", "host blocks"
_OF_DEVICE = (_WEIGHTS, _BLOCKS)
"""Sections that lie on a rank's GPU."""
Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a tensor of this shape and dtype."""


def shared_objects(config: EngineConfig, parallel: ParallelState) -> dict[str, Any]:
    """Objects of a rank that are made anew in each epoch, which what it keeps refers to."""
    return {"config": config, "parallel": parallel, "stage": parallel.stage}


class _FileSections:
    """Sections in the file, as `GpuSections` are on a GPU."""

    device = torch.device("cpu")

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def make(self, name: str, num_bytes: int) -> int:
        start = os.fstat(self._fd).st_size
        # A whole number of large pages, so that each section begins with one.
        start = -(-start // huge_pages.PAGE_BYTES) * huge_pages.PAGE_BYTES
        try:
            os.ftruncate(self._fd, start + max(1, num_bytes))
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes cannot be kept: {error}") from error
        return start

    def map(self, name: str, start: int, num_bytes: int) -> torch.Tensor:
        return huge_pages.map_file(self._fd, start, num_bytes)

    def drop(self, name: str, start: int, num_bytes: int) -> None:
        if num_bytes:
            with mmap.mmap(self._fd, num_bytes, offset=start) as old:
                old.madvise(mmap.MADV_REMOVE)

    def fill(self, room: torch.Tensor, address: int, owner: torch.Tensor) -> None:
        ctypes.memmove(room.data_ptr(), address, room.nbytes)


class RankMemory:
    """The memory of one rank.

    Args:
        fd: of the file, which stays open; an empty one gets its header.
        config: of this rank.
        epoch: in which the memory began.
        gpu: where its weights and KV blocks lie; None: in the file, as all else.

    Raises:
        TemporaryError: the file is damaged, or belongs to another engine, epoch, rank or
            configuration.
    """

    def __init__(
        self,
        fd: int,
        config: EngineConfig,
        rank: int,
        engine_id: str = "",
        epoch: int = 1,
        gpu: GpuSections | None = None,
    ) -> None:
        self._fd = fd
        self._gpu = gpu
        self._file = _FileSections(fd)
        self._device_sections = gpu or self._file
        configuration = hashlib.sha256(repr(config).encode()).hexdigest()
        self._owner: dict[str, Any] = {"engine": engine_id, "epoch": epoch, "rank": rank}
        self._owner["configuration"] = configuration
        self._sections: dict[str, tuple[int, int]] = {}  # by name: first byte, number of bytes
        self._mapped: dict[str, torch.Tensor] = {}
        if os.fstat(fd).st_size:
            self._header = mmap.mmap(fd, _HEADER_BYTES)
            self._read_index()
        else:
            os.ftruncate(fd, _HEADER_BYTES)
            self._header = mmap.mmap(fd, _HEADER_BYTES)
            self._write_index()

    @property
    def moves_done(self) -> int:
        """Number of the latest moves of blocks that are complete, see `CacheEngine.move`."""
        return int.from_bytes(self._header[_MOVES_AT : _MOVES_AT + 8], "little")

    @moves_done.setter
    def moves_done(self, number: int) -> None:
        if self._gpu is not None:  # what is noted must be done if the process ends now
            self._gpu.synchronize()
        self._header[_MOVES_AT : _MOVES_AT + 8] = number.to_bytes(8, "little")

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the sections on a GPU."""
        sizes = [size for name, (_, size) in self._sections.items() if name in _OF_DEVICE]
        return 0 if self._gpu is None else sum(sizes)

    def _place_of(self, name: str) -> GpuSections | _FileSections:
        return self._device_sections if name in _OF_DEVICE else self._file

    def section(self, name: str, num_bytes: int) -> torch.Tensor:
        """Returns a part of the memory, uint8 `[num_bytes]`: the one that has this name already, or
        a new one, whose bytes are 0 and take no memory until they are written; on a GPU they are
        there at once, with any content.

        Raises:
            MemoryError: it cannot be mapped.
            TemporaryError: it is there with another size.
        """
        if name not in self._sections:
            self._sections[name] = self._place_of(name).make(name, num_bytes), num_bytes
            self._write_index()
        start, size = self._sections[name]
        if size != num_bytes:
            raise _refusal(f"number of bytes of {name}", size, num_bytes)
        if name not in self._mapped:
            self._mapped[name] = self._place_of(name).map(name, start, num_bytes)
        return self._mapped[name]

    def drop(self, name: str) -> None:
        """Gives the memory of a section back, if it is there."""
        mapped = self._mapped.pop(name, None)
        if name == _HOST_BLOCKS and self._gpu is not None and mapped is not None:
            self._gpu.unpin(mapped)
        if name in self._sections:
            self._place_of(name).drop(name, *self._sections.pop(name))

    def keep_blocks(self, num_bytes: int, num_tensors: int) -> Empty:
        """Returns what gives the tensors of a KV cache one after another: with their content, if a
        lost rank had them.

        Args:
            num_bytes: of all of them together.
        """
        # Each begins with a large page.
        rest = self.section(_BLOCKS, num_bytes + num_tensors * huge_pages.PAGE_BYTES)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nonlocal rest
            size = math.prod(shape) * dtype.itemsize
            taken = -(-size // huge_pages.PAGE_BYTES) * huge_pages.PAGE_BYTES
            tensor, rest = rest[:size], rest[taken:]
            return tensor.view(dtype).view(shape)

        return empty

    def keep_host_blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns pinned memory of the host for the swapped blocks of a GPU, with their content if
        a lost rank had them; None: there are none."""
        assert self._gpu is not None, "on CPU they are among all blocks"
        if not (num_bytes := math.prod(shape) * dtype.itemsize):
            return None
        is_new = _HOST_BLOCKS not in self._mapped
        memory = self.section(_HOST_BLOCKS, num_bytes)
        if is_new:
            self._gpu.pin(memory)
        return memory.view(dtype).view(shape)

    def drop_blocks(self) -> None:
        """Gives the memory of all blocks back."""
        self.moves_done = 0
        self.drop(_BLOCKS)
        self.drop(_HOST_BLOCKS)

    def _write_index(self) -> None:
        index = json.dumps(self._owner | {"sections": self._sections}).encode()
        assert _HEAD.size + len(index) <= _HEADER_BYTES, "too many sections"
        self._header[_HEAD.size : _HEAD.size + len(index)] = index
        _HEAD.pack_into(self._header, 0, _MAGIC, self.moves_done, len(index))

    def _read_index(self) -> None:
        magic, _, length = _HEAD.unpack_from(self._header)
        if magic != _MAGIC:
            raise _refusal("layout", magic, _MAGIC)
        try:
            index = json.loads(self._header[_HEAD.size : _HEAD.size + length])
        except ValueError as error:
            raise _refusal("index", error, "readable") from error
        for field, expected in self._owner.items():
            if index[field] != expected:
                raise _refusal(field, index[field], expected)
        self._sections = {name: tuple(place) for name, place in index["sections"].items()}

    def save(self, state: Any, shared: dict[str, Any]) -> bool:
        """Moves all tensors of `state`, any objects, into this memory, and notes the objects, so
        that `load` can make them again in another process.

        Args:
            shared: objects within `state` that `load` gets from its caller, by name.

        Returns:
            False: these objects cannot be noted (code of others), or a GPU has no room for the
            weights beside those that are there; nothing was moved.
        """
        notes = io.BytesIO()
        pickler = _Pickler(notes, shared, self._device_sections.device)
        try:
            pickler.dump(state)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            logger.info("weights: they are read again at each start and loss: %s", error)
            return False
        try:
            records = self._move(pickler.tensors)
        except (MemoryError, OSError, TemporaryError) as error:
            if self._gpu is None:
                raise
            logger.warning("a lost rank is not replaced with its GPU memory: %s", error)
            self.drop(_WEIGHTS)
            return False
        whole = bytearray(pickle.dumps((records, notes.getvalue())))
        self.section(_STATE, len(whole)).copy_(torch.frombuffer(whole, dtype=torch.uint8))
        return True

    def kept_sections(self) -> dict[str, torch.Tensor]:
        """Returns what `save` has filled, uint8 `[num_bytes]` each."""
        return {name: self.section(name, self._sections[name][1]) for name in (_WEIGHTS, _STATE)}

    def make_sections(self, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
        """Returns new sections that have all their memory, for what another memory's `save` filled.

        Args:
            sizes: bytes of each, by name.

        Raises:
            MemoryError, OSError: there is no room.
        """
        sections = {name: self.section(name, size) for name, size in sizes.items()}
        for section in sections.values():
            _give_large_pages(section)
        # Where there is no room, a write to the mapping would end the process.
        os.posix_fallocate(self._fd, 0, os.fstat(self._fd).st_size)
        return sections

    def drop_kept(self) -> None:
        """Gives the memory of `kept_sections` back."""
        for name in (_WEIGHTS, _STATE):
            self.drop(name)

    def _move(self, tensors: list[torch.Tensor]) -> list[_Record]:
        """Moves tensors into the section of weights; returns where they are."""
        extents: list[list[int]] = []  # first byte, end, place in the section
        order = sorted(range(len(tensors)), key=lambda i: tensors[i].data_ptr())
        for i in order:
            start = tensors[i].data_ptr()
            end = start + _span_bytes(tensors[i])
            if extents and start < extents[-1][1]:
                extents[-1][1] = max(extents[-1][1], end)
            else:
                extents.append([start, end, 0])
        total = 0
        unit = _ALIGNMENT if self._gpu is None else _GPU_ALIGNMENT
        for extent in extents:  # each keeps its distance from the border of a cache line
            extent[2] = -(-total // unit) * unit + extent[0] % unit
            total = extent[2] + extent[1] - extent[0]
        weights = self.section(_WEIGHTS, total)
        records: list[_Record] = [((), (), torch.uint8, 0)] * len(tensors)
        left = iter(extents)
        start, end, place, populated = -1, -1, 0, 0
        for i in order:  # memory that no tensor uses any more is free from then on
            tensor = tensors[i]
            if tensor.data_ptr() >= end:
                start, end, place = next(left)
                if self._gpu is None:
                    populated += _give_large_pages(weights[populated : place + end - start])
                room = weights[place : place + end - start]
                self._device_sections.fill(room, start, tensor)
            offset = place + tensor.data_ptr() - start
            records[i] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, offset)
            if tensor.numel():
                _place(tensor, weights, records[i])
        return records

    def load(self, shared: dict[str, Any]) -> Any:
        """Returns what was saved, its tensors in this memory; None: nothing was saved."""
        if _STATE not in self._sections:
            return None
        state = self.section(_STATE, self._sections[_STATE][1])
        weights = self.section(_WEIGHTS, self._sections[_WEIGHTS][1])
        records, notes = pickle.loads(state.numpy().tobytes())
        tensors = [_place(weights.new_empty(0, dtype=r[2]), weights, r) for r in records]
        return _Unpickler(io.BytesIO(notes), tensors, shared).load()


_Record = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""Shape, strides, dtype, first byte in the section of weights."""


def _give_large_pages(memory: torch.Tensor) -> int:
    """Gives large pages to memory that begins with one; returns how many of its bytes have them."""
    num_bytes = memory.nbytes // huge_pages.PAGE_BYTES * huge_pages.PAGE_BYTES
    huge_pages.populate([memory], num_bytes, _POPULATE_S)
    return num_bytes


def _refusal(what: str, actual: object, expected: object) -> TemporaryError:
    return TemporaryError(
        f"what is kept is not used: its {what} is {actual!r}, and not {expected!r}"
    )


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _place(tensor: torch.Tensor, memory: torch.Tensor, record: _Record) -> torch.Tensor:
    """Lets a tensor have its elements in this memory."""
    shape, strides, dtype, offset = record
    if not math.prod(shape):
        return tensor.resize_(shape)
    return tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, strides)


def _op(name: str, overload: str) -> Any:
    namespace, name = name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _outline(dtype: torch.dtype, length: int, *form: Any) -> torch.Tensor:
    """A tensor without memory: of this shape, these strides and this offset."""
    return torch.empty(form[-1] + length, dtype=dtype, device="meta").as_strided(*form)


class _Pickler(pickle.Pickler):
    """Notes tensors by their number, shared objects by their name, and ops of torch by theirs."""

    def __init__(self, file: io.BytesIO, shared: dict[str, Any], device: torch.device) -> None:
        super().__init__(file, protocol=5)
        self._device = device
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # by the tensor's id
        self._names = {id(value): name for name, value in shared.items()}

    def persistent_id(self, value: Any) -> int | str | None:
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            if value.device != self._device or type(value) is not torch.Tensor:
                raise pickle.PicklingError(f"a {type(value).__name__} on {value.device}")
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return self._numbers[id(value)]
        return self._names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _op, (value._schema.name, value._overloadname)
        if isinstance(value, torch.Tensor):  # on no device: torch would forget where it begins
            form = tuple(value.shape), value.stride(), value.storage_offset()
            return _outline, (value.dtype, _span_bytes(value) // value.itemsize, *form)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: list[torch.Tensor], shared: dict[str, Any]
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._shared = shared

    def persistent_load(self, number: int | str) -> Any:
        return self._shared[number] if isinstance(number, str) else self._tensors[number]
