"""Packed weights that outlive their engine, for the next one of the same model on this machine.

A rank packs its weights into a file without a name (a memfd) and seals it, so that no process can
write into it any more. A process that outlives the engine holds its descriptor
(`weights_holder.py`). A later rank opens it by /proc, which the kernel allows processes of the same
user, and maps it: no weight is read, none is packed. Ranks that live at the same time share the
memory; what a rank writes there is its own (MAP_PRIVATE).

Which weights these are is said by a key: the model's configuration, its files as the file system
knows them (number, size, times of change), instruction set, rank, and the files of this package.
The key is in the sealed file, too. A holder compares a checksum, of values and layout, with that of
the engine which wrote the file, before it holds it. What was checked so cannot change. If anything
differs or fails, the rank reads its weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from tpengine.config import EngineConfig
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger
from tpengine.ops.library import cpu_isa
from tpengine.worker import weights_holder
from tpengine.worker.rank_memory import SEALS, RankMemory
from tpengine.worker.worker import Worker

logger = init_logger(__name__)

_START_S = 120.0
_identity = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
"""What differs if a file was written or replaced. No program can choose the time at which its inode
changed, so that a copy with the old time of its content differs, too."""


class KeptWeights(RankMemory):
    """The memory of a rank whose weights lie in a sealed file of their own, beside the blocks.

    Args:
        fd: of the blocks' file; belongs to this object from now on.

    Attributes:
        peak_bytes: of activations, as an engine before has measured that was alone in its process
            too; None: no such engine has.
    """

    def __init__(self, fd: int, config: EngineConfig, rank: int, *owner: Any) -> None:
        super().__init__(fd, config, rank, *owner)
        self._blocks = FileIO(fd, "r+")  # closes it
        self._config, self._rank, self._key, self._checksum = config, rank, "", ""
        self._file: FileIO | None = None
        self.peak_bytes: int | None = None

    def load(self, shared: dict[str, Any]) -> Any:
        """Returns what was saved, in this engine or in one before; None: it is not held."""
        self._key, reason = _key(self._config, self._rank), "none are held for this model as it is"
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text(errors="replace").split("\0")
                if words[4:5] != [self._key] or process.stat().st_uid != os.geteuid():
                    continue
                file = FileIO(process / "fd" / words[5])
                state = RankMemory(file.fileno(), None, self._rank, self._key).load(shared)
                self._file, self._checksum = file, ""
                self.peak_bytes = int(words[8]) if self._config.parallel.ranks is None else None
                logger.info("weights are mapped, as %s holds them: none are read", process)
                return state | {"_outlives": True}
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except Exception as error:  # of any kind, as from the objects in the state
                reason = str(error)
        logger.info("weights are read: %s", reason)
        return None

    def save(self, state: Any, shared: dict[str, Any]) -> bool:
        """See `RankMemory`; the file is sealed then."""
        file = FileIO(os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
        is_saved = RankMemory(file.fileno(), None, self._rank, self._key).save(state, shared)
        if is_saved:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            self._file, self._checksum = file, weights_holder.checksum(file.fileno())
        return is_saved

    def hold(self, peak_bytes: int) -> None:
        """Has the weights held for later engines, if there are some."""
        if self._file is None:
            return
        file, stay_s = self._file.fileno(), self._config.model.keep_weights
        words = map(str, (self._key, file, os.getpid(), stay_s, peak_bytes, self._checksum))
        command = [sys.executable, "-I", "-S", weights_holder.__file__, *words]
        try:
            subprocess.run(command, pass_fds=[file], process_group=0, timeout=_START_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("weights are not kept for the next engine: %s", error)


class KeepingWorker(Worker):
    """A worker whose weights outlive its engine, if its memory keeps them."""

    def profile_num_available_blocks(self, known_peak_bytes: int | None = None) -> MemoryLedger:
        """See `Worker`. With weights of an engine before it may know the peak."""
        if not isinstance(memory := self._memory, KeptWeights):
            return super().profile_num_available_blocks(known_peak_bytes)
        ledger = super().profile_num_available_blocks(memory.peak_bytes or known_peak_bytes)
        memory.hold(ledger.activation_peak_bytes)
        return ledger


def make_worker(config: EngineConfig) -> Worker:
    """Returns the worker of an engine with one rank in its own process."""
    if not config.model.keep_weights:
        return Worker(config)
    file = os.memfd_create("tpengine blocks", os.MFD_CLOEXEC)
    return KeepingWorker(config, memory=KeptWeights(file, config, 0))


def _key(config: EngineConfig, rank: int) -> str:
    """Says which weights a rank has, and with which limits its worst step was measured."""
    files = [p for p in Path(__file__).parents[1].rglob("*") if p.suffix in (".py", ".so")]
    models = [each.model for each in (config, config.of_draft_model) if each is not None]
    for folder in (Path(model.model) for model in models):
        files += folder.rglob("*") if folder.is_dir() else folder.parent.glob("*")
    facts = [(path, _identity(path.stat())) for path in sorted(files) if path.is_file()]
    text = repr((models, config.parallel, config.lora, config.scheduler, rank, cpu_isa(), facts))
    return hashlib.sha256(f"{torch.__version__} {sys.version} {text}".encode()).hexdigest()
