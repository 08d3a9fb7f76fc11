"""Packed weights in files, so that a later start of the same model neither reads nor packs them.

Each rank has a file in the folder `weight_cache`. Its header has a hash over all bytes of the
model's files, the configuration, and the code of this package, torch and Python: names and times do
not say what a file holds. With another hash nothing of the file is used, and it is replaced; so is
a file whose own bytes have other digests than its header says.

The file describes Python objects by a pickle, which can run code. So a folder or a file is refused
if another user owns it or may write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tpengine.checkpoint.gguf_file import all_parts, first_part, is_gguf
from tpengine.checkpoint.loader import checkpoint_files
from tpengine.config import EngineConfig, ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.host import check_trusted
from tpengine.logger import init_logger
from tpengine.ops.library import cpu_isa
from tpengine.worker.rank_memory import RankMemory, shared_objects

logger = init_logger(__name__)

_PACKAGE = Path(__file__).parents[1]
_HEADER_BYTES = 4096
_PIECE_BYTES = 16 << 20
"""Of a file, read and hashed at once by one thread."""
_Copy = Callable[[int, list[memoryview], int], int]
"""Of descriptor, buffers and position in the file; returns how many bytes it copied."""


class KeptWeights:
    """Where the weights of a rank may be, besides the model's files: in its memory, if a lost rank
    has left them there, or in its file in `weight_cache`.

    Args:
        memory: of the rank, which outlives its process; None: nothing does.

    Attributes:
        outlive: whether the weights that were loaded or saved outlive this process.
    """

    def __init__(self, config: EngineConfig, memory: RankMemory | None) -> None:
        self.outlive = False
        self._config = config
        self._memory = memory
        self._file: _WeightFile | None = None

    def load(self, parallel: ParallelState) -> Any:
        """Returns what `save` got, in this process or another one; None: there is nothing.

        Raises:
            ConfigError: the folder cannot be used.
            ModelLoadError: the model has no files.
            MemoryError: there is no room for the tensors.
        """
        shared = shared_objects(self._config, parallel)
        state = None if self._memory is None else self._memory.load(shared)
        if state is None and self._may_use_file(parallel.rank):
            self._file = _WeightFile(self._config, parallel.rank)
            with self._room() as memory:
                state = memory.load(shared) if self._file.read(memory) else None
        self.outlive = state is not None and self._memory is not None
        return state

    def save(self, state: Any, parallel: ParallelState) -> None:
        """Keeps any objects with tensors, which move.

        Raises:
            MemoryError: there is no room for the tensors.
        """
        if (self._memory is None and self._file is None) or self._has_tower:
            return
        with self._room() as memory:
            is_saved = memory.save(state, shared_objects(self._config, parallel))
            if is_saved and self._file is not None:
                self._file.write(memory)
        self.outlive = is_saved and self._memory is not None

    @property
    def block_memory(self) -> RankMemory | None:
        """Where the KV blocks may lie. On a GPU without room for a second copy of the weights these
        are not kept, and then neither are the blocks."""
        return self._memory if self.outlive or self._config.device == "cpu" else None

    @property
    def gpu_bytes(self) -> int:
        """Bytes of this rank's GPU that torch's allocator does not know."""
        return 0 if self._memory is None else self._memory.gpu_bytes

    @property
    def _has_tower(self) -> bool:
        """Whether there is a vision tower, whose weights are not kept."""
        return self._config.scheduler.pictures is not None

    def _may_use_file(self, rank: int) -> bool:
        model = self._config.model
        if model.weight_cache is None:
            return False
        obstacle = None
        if self._has_tower:
            obstacle = (
                "the model has a vision tower; limit_mm_per_prompt image=0 serves texts alone"
            )
        elif model.calibrates and self._config.parallel.world_size > 1:
            # They do it together, so that none of them may find its file alone.
            obstacle = "several ranks choose scales together; see --no-calibrate"
        if obstacle is not None and rank == 0:
            logger.warning("weights: weight_cache has no effect: %s", obstacle)
        return obstacle is None

    @contextlib.contextmanager
    def _room(self) -> Iterator[RankMemory]:
        if self._memory is not None:
            yield self._memory
            return
        fd = os.memfd_create("tpengine-weights", os.MFD_CLOEXEC)
        try:
            yield RankMemory(fd, self._config, 0)  # what is mapped stays when it is closed
        finally:
            os.close(fd)


class _WeightFile:
    """The file of one rank's weights: a header of one page, then the sections of a `RankMemory`.

    It is read and written, not mapped: where a disk fails, a mapping would end the process.

    Raises:
        ConfigError: the folder cannot be made, or another user may write it.
        ModelLoadError: the model has no files, or they cannot be read.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        folder = _open_folder(config.model.weight_cache or "")
        start = time.perf_counter()
        models = [each.model for each in (config, config.of_draft_model) if each is not None]
        self._sources = [path for model in models for path in _weight_files(model)]
        code = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".so"))
        place = f"{rank}-of-{config.parallel.world_size}"
        versions = (
            sys.version,
            np.__version__,
            torch.__version__,
            cpu_isa(),
        )  # dtype "auto" depends on the last
        try:
            self._stamps = self._stamp_sources()
            facts = place, repr(config), *versions, _hash_of(code), _hash_of(self._sources)
        except OSError as error:
            text = f"weights of {config.model.model} cannot be read: {error}"
            raise ModelLoadError(
                f"{text}; complete the model's folder, or its permissions"
            ) from error
        self._key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        self._hash_s = time.perf_counter() - start
        model = Path(config.model.model).absolute()
        own = hashlib.sha256(str(model).encode()).hexdigest()[:12]
        self._path = folder / f"{model.name}-{own}-{place}.weights"

    def _stamp_sources(self) -> list[tuple[int, ...]]:
        """What changes when a file of the model is written, or another takes its place."""
        stats = [path.stat() for path in self._sources]
        return [(x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for x in stats]

    def read(self, memory: RankMemory) -> bool:
        """Copies the weights into memory; returns whether the wanted ones were there."""
        start = time.perf_counter()
        try:
            with self._path.open("rb") as file:
                check_trusted(self._path, os.fstat(file.fileno()))
                header = json.loads(file.read(_HEADER_BYTES).rstrip(b"\0") or b"{}")
                if header.get("key") != self._key:
                    words = (
                        "weights: %s is replaced: it has those of other files, options or versions"
                    )
                    logger.info(words, self._path)
                    return False
                sections = memory.make_sections(header["sizes"])
                if self._copy(file, sections, os.preadv) != header["digests"]:
                    raise ValueError("it is damaged")
        except FileNotFoundError:
            return False
        except (OSError, MemoryError, ValueError) as error:
            memory.drop_kept()
            logger.warning("weights: %s is replaced: %s", self._path, error)
            return False
        took = time.perf_counter() - start, self._hash_s
        logger.info("weights: %s (%.1f s, the hash of all files %.1f s)", self._path, *took)
        return True

    def write(self, memory: RankMemory) -> None:
        """Replaces the file by one with the weights in this memory. If it cannot, it logs why."""
        start, part = time.perf_counter(), self._path.with_suffix(".part")
        try:
            if self._stamp_sources() != self._stamps:
                raise OSError("the model's files were changed while they were read")
            with open(part, "rb+", opener=_open_private) as file:
                _claim(part, file)
                try:
                    sections = memory.kept_sections()
                    digests = self._copy(file, sections, os.pwritev)
                    sizes = {name: section.nbytes for name, section in sections.items()}
                    header = {"key": self._key, "sizes": sizes, "digests": digests}
                    file.write(json.dumps(header).encode().ljust(_HEADER_BYTES, b"\0"))
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(part, self._path)
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
        except OSError as error:
            logger.warning("weights: %s cannot be written: %s", self._path, error)
        else:
            size, took = sum(sizes.values()) / (1 << 30), time.perf_counter() - start
            logger.info("weights: %.2f GiB are kept in %s (%.1f s)", size, self._path, took)

    @staticmethod
    def _copy(file: BinaryIO, sections: dict[str, torch.Tensor], copy: _Copy) -> list[str]:
        """Reads or writes all bytes of these sections; returns the digest of each."""
        digests, start = [], _HEADER_BYTES
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for section in sections.values():
                parts = section.numpy().data
                places = range(0, len(parts), _PIECE_BYTES)

                def copy_piece(at: int, parts: memoryview = parts, start: int = start) -> bytes:
                    piece = parts[at : at + _PIECE_BYTES]
                    if (count := copy(file.fileno(), [piece], start + at)) != len(piece):
                        raise OSError(f"{count} of {len(piece)} bytes at {start + at} were copied")
                    return hashlib.sha256(piece).digest()

                digests.append(hashlib.sha256(b"".join(pool.map(copy_piece, places))).hexdigest())
                start += len(parts)
        return digests


def _claim(path: Path, file: BinaryIO) -> None:
    """Makes this process the only writer of a file, which begins empty.

    Raises:
        BlockingIOError: it has a writer, or has just got its name.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    if not is_current:
        raise BlockingIOError("another engine writes it")
    file.truncate(0)  # what a writer that was killed has left


def _weight_files(config: ModelConfig) -> list[Path]:
    folder = Path(config.model)
    if config.load_format == "dummy":
        return []
    if is_gguf(folder):
        return all_parts(first_part(folder))
    modules = () if config.pooling is None else config.pooling.dense
    parts = [checkpoint_files(folder / dense.folder, "auto") for dense in modules]
    return sum(parts, checkpoint_files(folder, config.load_format))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _open_folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(folder, folder.stat())
    except OSError as error:
        text = f"weight_cache = {name!r} cannot be used: {error}"
        raise ConfigError(f"{text}; choose a folder that only this user may write") from error
    return folder


def _hash_of(files: Iterable[Path]) -> str:
    """SHA-256 of some files' names and bytes; all threads work on it."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = [digest for path in files for digest in _pieces_of(path, pool)]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _pieces_of(path: Path, pool: ThreadPoolExecutor) -> list[bytes]:
    with path.open("rb") as file:
        fd = file.fileno()

        def hash_piece(start: int) -> bytes:
            return hashlib.sha256(os.pread(fd, _PIECE_BYTES, start)).digest()

        starts = range(0, os.fstat(fd).st_size, _PIECE_BYTES)
        return [hashlib.sha256(path.name.encode()).digest(), *pool.map(hash_piece, starts)]
