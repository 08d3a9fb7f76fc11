"""Packed weights in files, so that a later start of the same model neither reads nor packs them.

Each rank has a file in the folder `weight_cache`, laid out as a `RankMemory`. Instead of an engine
its header names a hash over all bytes of the model's files, the configuration, and the code of this
package, torch and Python: names and times do not say what a file holds. With another hash nothing
of the file is used, and it is replaced.

The file describes Python objects by a pickle, which can run code. So a folder or a file is refused
if another user owns it or may write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tpengine.checkpoint.gguf_file import all_parts, first_part, is_gguf
from tpengine.checkpoint.loader import checkpoint_files
from tpengine.config import EngineConfig, ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError, TemporaryError
from tpengine.host import check_trusted
from tpengine.logger import init_logger
from tpengine.ops.library import cpu_isa
from tpengine.worker.rank_memory import RankMemory, shared_objects

logger = init_logger(__name__)

_PACKAGE = Path(__file__).parents[1]
_PIECE_BYTES = 16 << 20
"""Of a file, hashed at once by one thread."""


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
        if state is None and self._has_file:
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
    def _has_tower(self) -> bool:
        """Whether there is a vision tower, whose weights are not kept."""
        return self._config.scheduler.pictures is not None

    @property
    def _has_file(self) -> bool:
        """Ranks that calibrate do it together, so that none of them may find its file alone."""
        model, is_alone = self._config.model, self._config.parallel.world_size == 1
        is_asked = model.weight_cache is not None and self._config.device == "cpu"
        return is_asked and not self._has_tower and (is_alone or not model.calibrates)

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
    """The file of one rank's weights.

    Raises:
        ConfigError: the folder cannot be made, or another user may write it.
        ModelLoadError: the model has no files.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        folder = _open_folder(config.model.weight_cache or "")
        start = time.perf_counter()
        models = [each.model for each in (config, config.of_draft_model) if each is not None]
        files = [path for model in models for path in _weight_files(model)]
        code = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".so"))
        place = f"{rank}-of-{config.parallel.world_size}"
        versions = sys.version, torch.__version__, cpu_isa()  # which decides the dtype, too
        facts = place, repr(config), *versions, *map(_hash_of, (code, files))
        self._key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        self._hash_s = time.perf_counter() - start
        model = Path(config.model.model).absolute()
        own = hashlib.sha256(str(model).encode()).hexdigest()[:12]
        self._path = folder / f"{model.name}-{own}-{place}.weights"

    def read(self, memory: RankMemory) -> bool:
        """Copies the weights into memory; returns whether the wanted ones were there."""
        start = time.perf_counter()
        try:
            with self._path.open("rb+") as file:
                check_trusted(self._path, os.fstat(file.fileno()))
                memory.copy_weights(self._layout(file.fileno()))
        except FileNotFoundError:
            return False
        except TemporaryError:
            words = "weights: %s is replaced: it has those of other files, options or versions"
            logger.info(words, self._path)
            return False
        except (OSError, MemoryError, ValueError) as error:
            logger.warning("weights: %s is replaced: %s", self._path, error)
            return False
        took = time.perf_counter() - start, self._hash_s
        logger.info("weights: %s (%.1f s, the hash of all files %.1f s)", self._path, *took)
        return True

    def write(self, memory: RankMemory) -> None:
        """Replaces the file by one with the weights in this memory. If it cannot, it logs why."""
        start, part = time.perf_counter(), self._path.with_suffix(".part")
        try:
            with open(part, "ab+", opener=_open_private) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # against another engine
                try:
                    file.truncate(0)  # what a writer that was killed has left
                    self._layout(file.fileno()).copy_weights(memory)
                    os.fsync(file.fileno())
                    os.replace(part, self._path)
                except BaseException:
                    part.unlink()
                    raise
                size = os.fstat(file.fileno()).st_size / (1 << 30)
        except (OSError, MemoryError) as error:
            logger.warning("weights: %s cannot be written: %s", self._path, error)
        else:
            took = time.perf_counter() - start
            logger.info("weights: %.2f GiB are kept in %s (%.1f s)", size, self._path, took)

    def _layout(self, fd: int) -> RankMemory:
        """A file as it is, or an empty one."""
        return RankMemory(fd, self._config, 0, self._key)


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
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


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
