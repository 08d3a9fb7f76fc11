"""One rank: its device, its share of the model, its KV cache."""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Iterator

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.collectives import connect_ranks
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import RendezvousStore
from tpengine.errors import CacheSizeError, counted
from tpengine.layers.weights import Weights
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, Rendezvous, StepInput, StepOutput
from tpengine.models.loader import load_model
from tpengine.ops.attention import check_decode_support
from tpengine.worker import memory
from tpengine.worker.cache_engine import CacheEngine, block_bytes, staged_blocks
from tpengine.worker.device import (
    cache_dtype,
    check_quantization,
    resolve_dtype,
    set_num_threads,
)
from tpengine.worker.gpu.attention_plans import GpuAttention
from tpengine.worker.gpu.graphs import CudaCapture, agree_on_graphs, estimate_bytes
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
        # The first that this process sees: ranks of one machine see one each.
        self._device = torch.device("cuda:0" if config.device == "cuda" else config.device)
        self._dtype = self._cache_dtype = torch.float32
        self._gpu: GpuAttention | None = None
        self._runner: ModelRunner | None = None
        self._cache_engine: CacheEngine | None = None
        self._all_record: bool | None = None

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
        self._cache_dtype = cache_dtype(self._config.cache.kv_cache_dtype, self._dtype)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            check_decode_support(
                self._config.model.head_dim,
                self._dtype,
                self._cache_dtype,
                self._config.cache.block_size,
            )
            name = torch.cuda.get_device_name(self._device)
            is_fp8 = self._cache_dtype != self._dtype
            return f"{name}, {self._dtype_name}{', fp8 KV cache' if is_fp8 else ''}"
        threads = set_num_threads(self._num_local_ranks)
        return f"{platform.machine()} CPU, {counted(threads, 'thread')}, {self._dtype_name}"

    def load_model(self) -> None:
        """Builds this rank's shard and fills it.

        Raises:
            ConfigError, ModelLoadError: see `models.loader.load_model`.
            ConfigError, NativeLibraryError: see `GpuAttention`.
        """
        with torch.inference_mode():
            weights = Weights(
                self._dtype, self._device, self._parallel, self._config.model.quantization
            )
            model = load_model(self._config.model, weights)
        if self._device.type == "cuda":
            self._gpu = GpuAttention(
                model, self._config, self._dtype, self._cache_dtype, self._device
            )
        self._runner = ModelRunner(
            self._config, model, weights.num_bytes, self._device, self._parallel, self._gpu
        )

    def profile_num_available_blocks(self, known_peak_bytes: int | None = None) -> MemoryLedger:
        """Runs the worst step and counts the blocks that fit into what is left.

        Args:
            known_peak_bytes: what the activations of that step took on an equal rank; then it is
                not run again, and only the free memory is measured.

        Raises:
            CacheSizeError: not even one block fits.
        """
        one_block = self._block_bytes()
        space = memory.host_swap_bytes(self._config.cache.swap_space_bytes, self._num_local_ranks)
        num_host_blocks = space // one_block
        scratch = self._scratch_bytes(one_block, num_host_blocks)
        logits = graphs = 0
        if known_peak_bytes is None:
            peak_bytes, logits = self._activation_peak()
        else:
            peak_bytes = max(0, known_peak_bytes - scratch)
        if self._uses_graphs() or self._records_on_cpu:
            graphs = self._graphs_bytes()
        staging = staged_blocks(one_block, num_host_blocks) * one_block if self._gpu else 0
        total, budget = self._kv_budget(peak_bytes + graphs + staging)
        wanted = self._config.cache.num_device_blocks_override
        num_blocks = budget // one_block if wanted is None else wanted
        ledger = MemoryLedger(
            rank=self._parallel.tp_rank,
            device=str(self._device),
            total_bytes=total,
            weights_bytes=self._require_runner().weights_bytes,
            activation_peak_bytes=peak_bytes + scratch,
            kv_budget_bytes=budget,
            block_bytes=one_block,
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            communicator_bytes=self._parallel.communicator_bytes,
            held_by_others_bytes=memory.held_by_others_bytes(self._device),
            logits_bytes=logits,
            graphs_bytes=graphs,
        )
        if num_blocks < 1:
            raise CacheSizeError(
                f"no block of the KV cache fits on rank {ledger.rank}: one takes "
                f"{one_block / memory.GIB:.6f} GiB and {budget / memory.GIB:.6f} GiB may be used; "
                f"{memory.how_to_get_more(self._device, one_block)}"
            )
        return ledger

    def _activation_peak(self) -> tuple[int, int]:
        """Bytes of activations in the worst step, and how many of them are due to logits and
        sampling, which is measured on a GPU only."""
        probe = self._make_cache(1)
        with self._forward(), memory.PeakMemory(self._device) as peak:
            model_peak = self._require_runner().run_worst_case(probe.kv_caches)
        if self._gpu is None:
            return peak.peak_bytes, 0
        return peak.peak_bytes, max(0, peak.start_bytes + peak.peak_bytes - model_peak)

    def _scratch_bytes(self, one_block: int, num_host_blocks: int) -> int:
        """What a GPU holds beside weights and activations: attention's scratch, swaps' staging."""
        if self._gpu is None:
            return 0
        return self._gpu.num_bytes + staged_blocks(one_block, num_host_blocks) * one_block

    def _uses_graphs(self) -> bool:
        """Whether decode steps become CUDA graphs: at every rank, or at none."""
        if self._all_record is None:
            wanted = self._device.type == "cuda" and not self._config.kernels.enforce_eager
            self._all_record = wanted and agree_on_graphs(self._parallel, self._device)
        return self._all_record

    @property
    def _records_on_cpu(self) -> bool:
        return self._gpu is None and not self._config.kernels.enforce_eager

    def _graphs_bytes(self) -> int:
        """What the graphs will take, tried over a cache of one block."""
        probe, runner = self._make_cache(1), self._require_runner()
        with self._forward():
            if self._records_on_cpu:
                recording = runner.make_recording(probe.kv_caches)
                return 0 if recording is None else recording.num_bytes
            graphs = runner.make_graphs(probe.kv_caches, CudaCapture(self._device))
            with contextlib.closing(graphs):
                num_bytes = estimate_bytes(graphs, self._device)
        del graphs, probe
        self._release()
        return num_bytes

    def _release(self) -> None:
        """Gives back to the device what torch keeps for later."""
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the cache and the host's pool, records graphs, and warms up. A second call
        begins anew.

        Raises:
            CacheSizeError: the memory cannot be had, for them or the running sequences' tables.
            GraphCaptureError: nor for the graphs.
        """
        self._drop_cache()
        try:
            self._open_cache(num_blocks, num_host_blocks)
        except BaseException:
            self._drop_cache()  # whoever measures the memory again must not find it there
            raise

    def populate_cache(self) -> None:
        """See `CacheEngine.populate`."""
        assert self._cache_engine is not None, "populate before init_cache_engine"
        self._cache_engine.populate(memory.populate_bytes(self._num_local_ranks))

    def _drop_cache(self) -> None:
        if self._cache_engine is not None:
            self._cache_engine = None
            self._require_runner().detach_cache()
            self._release()

    def _open_cache(self, num_blocks: int, num_host_blocks: int) -> None:
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
            if self._uses_graphs():
                runner.record_graphs(CudaCapture(self._device))
            elif self._records_on_cpu:
                runner.record_decodes()
            self._claim_activations(runner)
            runner.warm_up()

    def _claim_activations(self, runner: ModelRunner) -> None:
        """Runs the worst step once more, on a GPU: what it takes stays with torch, so that no other
        process can have it by the time that a request needs it."""
        if self._gpu is None or self._cache_engine is None:
            return
        try:
            runner.run_worst_case(self._cache_engine.kv_caches)
        except torch.OutOfMemoryError as error:
            raise CacheSizeError(
                f"beside the KV cache on {self._device} there is no room for the activations of a "
                f"step of {self._config.scheduler.max_num_batched_tokens} tokens ({error}); lower "
                "gpu_memory_utilization or max_num_batched_tokens"
            ) from error

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step."""
        with self._forward():
            return self._require_runner().execute(step)

    def shutdown(self) -> None:
        """Lets go of weights, cache and the other ranks."""
        try:
            if self._runner is not None:
                self._runner.detach_cache()  # graphs first, see `DecodeGraphs`
        finally:
            self._parallel.close()
        self._store = self._runner = self._gpu = self._cache_engine = None
        self._release()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """In which ranks wait for each other: whoever fails says so."""
        try:
            with torch.inference_mode():
                yield
        except BaseException:
            try:
                if self._parallel.tp_size > 1 and self._runner is not None:
                    self._runner.drop_recordings()  # as in `shutdown`; no step will come
            finally:
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
        return CacheEngine(self._device, self._cache_dtype, num_blocks, *shape, num_host_blocks)

    def _block_bytes(self) -> int:
        return block_bytes(self._device, self._cache_dtype, *self._cache_shape())

    def _kv_budget(self, reserved_bytes: int) -> tuple[int, int]:
        """See `memory.kv_budget_bytes`."""
        self._release()
        return memory.kv_budget_bytes(
            self._device, self._config.cache, self._num_local_ranks, reserved_bytes
        )
