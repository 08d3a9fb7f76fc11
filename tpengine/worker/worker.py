"""One rank: its device, its share of the model, its KV cache."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Iterator

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.collectives import connect_ranks
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import RendezvousStore
from tpengine.errors import CacheSizeError
from tpengine.layers.weights import Weights
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, Rendezvous, StepInput, StepOutput
from tpengine.models.loader import load_model
from tpengine.worker import memory
from tpengine.worker.cache_engine import CacheEngine, block_bytes
from tpengine.worker.device import check_quantization, resolve_dtype, set_num_threads
from tpengine.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class Worker:
    """Holds one shard of the model. The executor calls, in this order: `init_device`,
    `load_model`, `profile_num_available_blocks`, `init_cache_engine`, then `execute_model`.

    With several ranks, `open_rendezvous` (rank 0) and `connect` (all at the same time) come before.
    A rank that fails in a call after that tells the others, whose calls fail in their turn.

    Args:
        parallel: where this rank is connected with the others already; instead of `rank`.
    """

    def __init__(
        self, config: EngineConfig, parallel: ParallelState | None = None, rank: int = 0
    ) -> None:
        self._config = config
        self._parallel = parallel or ParallelState(rank, config.parallel.tensor_parallel_size)
        self._num_local_ranks = self._parallel.tp_size
        self._store: RendezvousStore | None = None
        self._device = torch.device(config.device)
        self._dtype = torch.float32
        self._runner: ModelRunner | None = None
        self._cache_engine: CacheEngine | None = None

    def open_rendezvous(self, address: str) -> int:
        """Starts the store at which the ranks meet, on rank 0; returns its port.

        Args:
            address: IP address of this rank's node.

        Raises:
            RendezvousError: it is none of this machine's.
        """
        self._store = RendezvousStore(address)
        return self._store.port

    def connect(self, rendezvous: Rendezvous) -> str:
        """Connects with the other ranks; returns a line that says how.

        Raises:
            RendezvousError: ranks did not arrive, failed, or cannot reach each other.
            SharedMemoryError: all are on one host, whose shared memory is too small.
        """
        rank = self._parallel.tp_rank
        self._parallel, how = connect_ranks(rank, rendezvous, self._device, self._store)
        self._num_local_ranks = rendezvous.addresses.count(rendezvous.addresses[rank])
        return how

    def init_device(self) -> str:
        """Claims device and threads, settles the dtype; returns a line that describes them.

        Raises:
            ConfigError: the device cannot do what was asked.
        """
        self._dtype = resolve_dtype(self._config.model.dtype, self._device.type)
        check_quantization(self._config.model.quantization, self._device.type)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            return f"{torch.cuda.get_device_name(self._device)}, {self._dtype_name}"
        threads = set_num_threads(self._num_local_ranks)
        return f"{platform.machine()} CPU, {threads} threads, {self._dtype_name}"

    def load_model(self) -> None:
        """Builds this rank's shard and fills it.

        Raises:
            ConfigError, ModelLoadError: see `models.loader.load_model`.
        """
        with torch.inference_mode():
            weights = Weights(
                self._dtype, self._device, self._parallel, self._config.model.quantization
            )
            model = load_model(self._config.model, weights)
        self._runner = ModelRunner(
            self._config, model, weights.num_bytes, self._device, self._parallel
        )

    def profile_num_available_blocks(self, known_peak_bytes: int | None = None) -> MemoryLedger:
        """Runs the worst step and counts the blocks that fit into what is left.

        Args:
            known_peak_bytes: what the activations of that step took on an equal rank; then it is
                not run again, and only the free memory is measured.

        Raises:
            CacheSizeError: not even one block fits.
        """
        peak_bytes = self._activation_peak() if known_peak_bytes is None else known_peak_bytes
        one_block = self._block_bytes()
        total, budget = self._kv_budget(peak_bytes)
        wanted = self._config.cache.num_device_blocks_override
        num_blocks = budget // one_block if wanted is None else wanted
        ledger = MemoryLedger(
            rank=self._parallel.tp_rank,
            device=str(self._device),
            total_bytes=total,
            weights_bytes=self._require_runner().weights_bytes,
            activation_peak_bytes=peak_bytes,
            kv_budget_bytes=budget,
            block_bytes=one_block,
            num_device_blocks=num_blocks,
            num_host_blocks=self._swap_space_bytes() // one_block,
            communicator_bytes=self._parallel.communicator_bytes,
            held_by_others_bytes=self._held_by_others_bytes(),
        )
        if num_blocks < 1:
            raise CacheSizeError(
                f"no block of the KV cache fits on rank {ledger.rank}: one takes "
                f"{one_block / memory.GIB:.6f} GiB and {budget / memory.GIB:.6f} GiB may be used; "
                f"{self._how_to_get_more(one_block)}"
            )
        return ledger

    def _activation_peak(self) -> int:
        probe = self._make_cache(1)
        with self._forward(), memory.PeakMemory(self._device) as peak:
            self._require_runner().run_worst_case(probe.kv_caches)
        return peak.peak_bytes

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the cache and the host's pool, and warms up.

        Raises:
            CacheSizeError: the memory cannot be had, for them or the running sequences' tables.
        """
        try:
            self._cache_engine = self._make_cache(num_blocks, num_host_blocks)
        except (MemoryError, RuntimeError) as error:
            size, host_size = (
                count * self._block_bytes() / memory.GIB for count in (num_blocks, num_host_blocks)
            )
            raise CacheSizeError(
                f"{num_blocks} blocks of the KV cache ({size:.2f} GiB) on {self._device} and "
                f"{num_host_blocks} on the host ({host_size:.2f} GiB, swap_space) cannot be "
                f"allocated: {error}; choose fewer"
            ) from error
        runner = self._require_runner()
        try:
            runner.attach_cache(self._cache_engine)
        except (MemoryError, RuntimeError) as error:
            scheduler = self._config.scheduler
            raise CacheSizeError(
                f"the tables of running sequences (max_num_seqs = {scheduler.max_num_seqs}, each "
                f"of up to {scheduler.max_model_len} tokens) cannot be allocated: {error}; lower "
                "max_num_seqs or max_model_len"
            ) from error
        with self._forward():
            runner.warm_up()

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step."""
        with self._forward():
            return self._require_runner().execute(step)

    def shutdown(self) -> None:
        """Lets go of weights, cache and the other ranks."""
        self._parallel.close()
        self._store = None
        self._runner = None
        self._cache_engine = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """In which ranks wait for each other: whoever fails says so."""
        try:
            with torch.inference_mode():
                yield
        except BaseException:
            self._parallel.abandon()
            raise

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _require_runner(self) -> ModelRunner:
        assert self._runner is not None, "the model is not loaded"
        return self._runner

    def _cache_shape(self) -> tuple[int, int, int, int]:
        model = self._config.model
        kv_heads = max(1, model.total_num_kv_heads // self._parallel.tp_size)
        return self._config.cache.block_size, model.num_layers, kv_heads, model.head_dim

    def _make_cache(self, num_blocks: int, num_host_blocks: int = 0) -> CacheEngine:
        shape = self._cache_shape()
        return CacheEngine(self._device, self._dtype, num_blocks, *shape, num_host_blocks)

    def _block_bytes(self) -> int:
        return block_bytes(self._device, self._dtype, *self._cache_shape())

    def _kv_budget(self, peak_bytes: int) -> tuple[int, int]:
        """(all memory of the device, what the KV cache may take), in bytes."""
        if self._device.type == "cpu":
            wanted = self._config.cache.cpu_kv_cache_bytes
            return memory.cpu_total_bytes(), memory.cpu_kv_budget_bytes(
                wanted, self._num_local_ranks
            )
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # What others hold counts against the share, whether it came before or after us.
        unusable = total - int(total * self._config.cache.gpu_memory_utilization)
        return total, max(0, free - unusable - peak_bytes)

    def _swap_space_bytes(self) -> int:
        return memory.host_swap_bytes(self._config.cache.swap_space_bytes, self._num_local_ranks)

    def _held_by_others_bytes(self) -> int:
        if self._device.type == "cpu":
            return memory.cpu_held_by_others_bytes()
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, total - free - torch.cuda.memory_reserved(self._device))

    def _how_to_get_more(self, one_block: int) -> str:
        if self._device.type == "cpu":
            needed = math.ceil(1e6 * one_block / memory.GIB) / 1e6  # the named value must do
            return f"raise cpu_kv_cache_space to at least {needed:.6f} (GiB)"
        return "raise gpu_memory_utilization, or free memory on the device"
