"""GPU memory that outlives its process, by the virtual memory of CUDA's driver (libcuda).

Each section is an allocation of its own. Its descriptor is held by the agent of the rank's node;
the process that replaces a lost one imports and maps it. Not run on a card yet: tests have another
library in place of the driver's, whose device memory is the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, Protocol

import torch

from tpengine.errors import TemporaryError

_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE, _AS_DESCRIPTOR = 1, 1, 3, 1


class Files(Protocol):
    """Descriptors by name, in another process: see `executor.held_files.AgentFiles`."""

    def put(self, name: str, file: int) -> None: ...
    def take(self, name: str) -> int | None: ...
    def drop(self, name: str) -> None: ...


class GpuSections:
    """Sections of a `RankMemory` on the first device that this process sees.

    Args:
        files: of this rank.
        library: libcuda, or what stands in for it.
        device: of the tensors: the host's for a stand-in.
    """

    def __init__(self, files: Files, library: str = "libcuda.so.1", device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        self._files = files
        self._driver = ctypes.CDLL(library)
        # CUmemAllocationProp: kinds of memory and of handle, kind and number of the device, zeros.
        self._properties = (ctypes.c_int * 8)(_PINNED, _AS_DESCRIPTOR, _ON_DEVICE, 0)

    def call(self, name: str, *args: Any) -> None:
        """Calls the driver.

        Raises:
            MemoryError: the device, or the host, has no room.
            TemporaryError: another error.
        """
        wide = [ctypes.c_uint64(x) if isinstance(x, int) else x for x in args]
        code = getattr(self._driver, name)(*wide)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: no memory is left on {self.device}")
        if code:
            raise TemporaryError(f"memory of {self.device} is not kept: {name} gave error {code}")

    def make(self, name: str, num_bytes: int) -> int:
        """Makes a section, which has any content; returns 0, its first byte.

        Raises:
            MemoryError: there is no room.
            TemporaryError: the driver has failed, or cannot share memory.
            OSError: the agent does not take it.
        """
        torch.empty(1, device=self.device)  # makes the context
        torch.cuda.empty_cache()
        handle, file, size = ctypes.c_uint64(), ctypes.c_int(-1), self._rounded(num_bytes)
        self.call("cuMemCreate", ctypes.byref(handle), size, self._properties, 0)
        try:
            how = handle, _AS_DESCRIPTOR, 0
            self.call("cuMemExportToShareableHandle", ctypes.byref(file), *how)
            self._files.put(name, file.value)
        finally:
            self.call("cuMemRelease", handle)
            if file.value >= 0:
                os.close(file.value)
        return 0

    def map(self, name: str, start: int, num_bytes: int) -> torch.Tensor:
        """Returns a section as uint8 `[num_bytes]`; it is unmapped with its last tensor.

        Raises:
            MemoryError: there is no room for the mapping.
            TemporaryError: the agent does not hold it, or it is shorter, or the driver has failed.
            OSError: the agent does not answer.
        """
        torch.empty(1, device=self.device)
        file = self._files.take(name)
        if file is None:
            raise TemporaryError(f"what is kept is not used: its {name} are not held by the agent")
        handle = ctypes.c_uint64()
        try:
            how = file, _AS_DESCRIPTOR
            self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), *how)
        finally:
            os.close(file)
        try:
            mapping = _Mapping(self, handle, self._rounded(num_bytes))
        finally:
            self.call("cuMemRelease", handle)  # the mapping keeps the memory
        return mapping.tensor(num_bytes)

    def drop(self, name: str, start: int, num_bytes: int) -> None:
        """Gives the memory back, as soon as nothing maps it."""
        self._files.drop(name)

    def fill(self, room: torch.Tensor, address: int, owner: torch.Tensor) -> None:
        """Copies the bytes from an address within the memory of a tensor to its end into room."""
        storage = owner.untyped_storage()
        offset = address - storage.data_ptr() if room.nbytes else 0
        whole = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(storage)
        room.copy_(whole[offset : offset + room.nbytes])

    def synchronize(self) -> None:
        """Waits for the kernels and copies that were launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pin(self, memory: torch.Tensor) -> None:
        """Lets the device read and write memory of the host.

        Raises:
            MemoryError, TemporaryError: see `call`.
        """
        self.call("cuMemHostRegister_v2", memory.data_ptr(), memory.nbytes, 0)

    def unpin(self, memory: torch.Tensor) -> None:
        """Ends `pin`."""
        self.call("cuMemHostUnregister", memory.data_ptr())

    def _rounded(self, num_bytes: int) -> int:
        unit = ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(unit), self._properties, 0)
        return -(-max(1, num_bytes) // unit.value) * unit.value


class _Mapping:
    """Addresses with an allocation behind them, until it is deleted."""

    def __init__(self, sections: GpuSections, handle: ctypes.c_uint64, size: int) -> None:
        self._sections, self._size, self._address = sections, size, ctypes.c_uint64()
        sections.call("cuMemAddressReserve", ctypes.byref(self._address), size, 0, 0, 0)
        access = (ctypes.c_int * 3)(_ON_DEVICE, 0, _READ_WRITE)  # CUmemAccessDesc
        sections.call("cuMemMap", self._address, size, 0, handle, 0)
        sections.call("cuMemSetAccess", self._address, size, access, 1)

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """The first bytes, as uint8; the tensor keeps this object."""
        address = self._address.value
        if self._sections.device.type == "cpu":
            memory: Any = (ctypes.c_ubyte * max(1, num_bytes)).from_address(address)
            memory.mapping = self
            return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        place = {"shape": (max(1, num_bytes),), "data": (address, False)}
        self.__cuda_array_interface__ = place | {"typestr": "|u1", "version": 3}
        return torch.as_tensor(self, device=self._sections.device)[:num_bytes]

    def __del__(self) -> None:
        if not self._address.value:
            return
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._sections.synchronize()  # a kernel may use the memory
        for name in ("cuMemUnmap", "cuMemAddressFree"):
            with contextlib.suppress(MemoryError, TemporaryError):  # nothing was mapped
                self._sections.call(name, self._address, self._size)
