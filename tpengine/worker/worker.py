"""One rank: its device, its share of the model, its KV cache."""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed import TCPStore

from tpengine.checkpoint.loader import load_model
from tpengine.config import EngineConfig, ModelConfig
from tpengine.distributed.collectives import connect_ranks
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import make_store
from tpengine.distributed.shared_memory import SharedMemoryCollectives
from tpengine.errors import CacheSizeError, TemporaryError, counted, is_device_fault
from tpengine.layers.adapter_parts import Targets
from tpengine.layers.lora import AdapterLayers
from tpengine.layers.weights import Importance, Weights
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, Rendezvous, StepInput, StepOutput
from tpengine.models.registry import CausalLM
from tpengine.models.stages import layers_of_stages
from tpengine.ops.library import cpu_isa
from tpengine.structured.grammars import Vocabulary
from tpengine.worker import device
from tpengine.worker.adapter_store import AdapterStore
from tpengine.worker.cache_engine import CacheEngine, CacheShape
from tpengine.worker.calibration import Calibration
from tpengine.worker.draft_model import DraftModel
from tpengine.worker.gpu.activations import claim_activations
from tpengine.worker.gpu.attention_plans import (
    GpuAttention,
    attention_layers,
    check_attention,
    set_kv_scales,
)
from tpengine.worker.gpu.graphs import DecodeGraphs
from tpengine.worker.gpu.pooled_blocks import staged_blocks
from tpengine.worker.model_runner import ModelRunner
from tpengine.worker.picture_store import PictureStore
from tpengine.worker.rank_memory import RankMemory
from tpengine.worker.recorder import Recorder
from tpengine.worker.stage_ends import StageEnds
from tpengine.worker.weight_cache import KeptWeights

logger = init_logger(__name__)

_KEPT = [
    *("_model", "_draft_model", "_adapters", "_digest"),
    *("_weights_bytes", "_looked_up_bytes", "_weights_form"),
]
"""What a rank that replaces a lost one takes over from it."""


class Worker:
    """Holds one shard of the model. The executor calls, in this order: `init_device`,
    `load_model`, `profile_num_available_blocks`, `init_cache_engine`, then `execute_model` and
    `finish_steps`.

    With several ranks, `open_rendezvous` (rank 0) and `connect` (all ranks at once) come first. If
    a rank fails in a later call, it tells the other ranks, whose calls then fail too.

    When a lost rank was replaced, all ranks connect again and call `load_model` and
    `init_cache_engine` again: what they hold in `memory` stays as it is.

    Args:
        parallel: of a rank that is already connected with the others; replaces `rank`.
        memory: for what outlives the process; None: nothing does.
    """

    def __init__(
        self,
        config: EngineConfig,
        parallel: ParallelState | None = None,
        rank: int = 0,
        memory: RankMemory | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._rank = rank
        self._parallel = parallel or ParallelState(rank, config.parallel.tensor_parallel_size)
        self._num_local_ranks = config.parallel.world_size
        self._store: TCPStore | None = None
        # The first device that this process sees: each rank of a machine sees its own only.
        self._device = torch.device("cuda:0" if config.device == "cuda" else config.device)
        self._dtype = self._cache_dtype = torch.float32
        self._model: CausalLM | None = None
        self._calibration: Calibration | None = None  # between `load_model` and `calibrate`
        self._weights_bytes = self._looked_up_bytes = self._features_bytes = 0
        self._weights_form = self._digest = ""
        self._gpu: GpuAttention | None = None
        self._ends: StageEnds  # from `load_model` on
        self._recorder: Recorder  # the same
        self._adapters: AdapterStore | None = None
        self._pictures: PictureStore | None = None
        self._draft_model: CausalLM | None = None
        self._vocabulary: Vocabulary | None = None
        self._runner: ModelRunner | None = None

    def open_rendezvous(self, address: str) -> int:
        """Starts the store at which the ranks meet, on rank 0; returns its port.

        Args:
            address: IP address of this rank's node.

        Raises:
            RendezvousError: this machine does not have the address.
        """
        self._store = make_store(address)
        return self._store.port

    def connect(self, rendezvous: Rendezvous) -> str:
        """Connects with the other ranks; returns a line that says how.

        Raises:
            RendezvousError: ranks did not arrive, failed, or cannot reach each other.
        """
        self._drop_runner()
        self._parallel.close()  # the ranks were connected before
        rank, config = self._rank, self._config
        dtype = device.resolve_dtype(config.model.dtype, self._device.type)
        row_bytes = config.model.hidden_size * dtype.itemsize
        num_stages, scheduler = config.parallel.pipeline_parallel_size, config.scheduler
        stages = num_stages, scheduler.max_num_batched_tokens * row_bytes
        self._parallel, how = connect_ranks(rank, rendezvous, self._device, self._store, *stages)
        if self._waits_can_end:
            self._store = None  # no longer needed, so that nothing listens
        elif self._memory is not None:
            logger.info("a lost rank is not replaced alone: waits in gloo cannot be called off")
        self._num_local_ranks = rendezvous.addresses.count(rendezvous.addresses[rank])
        return how

    @property
    def _waits_can_end(self) -> bool:
        """Whether a wait for other ranks raises an error when one of them is lost. A wait in gloo
        ends only with its process."""
        return isinstance(self._parallel.collectives, SharedMemoryCollectives | None)

    def init_device(self) -> str:
        """Claims device and threads, settles the dtypes; returns a line that describes them.

        Raises:
            ConfigError: the device cannot do what was asked.
        """
        self._dtype = device.resolve_dtype(self._config.model.dtype, self._device.type)
        self._cache_dtype = device.cache_dtype(self._config.cache.kv_cache_dtype, self._dtype)
        dtype_name, in_file = str(self._dtype).removeprefix("torch."), self._config.model.file_dtype
        if self._config.model.dtype == "auto" and in_file not in (None, dtype_name):
            dtype_name += f" (the file has {in_file})"
        if self._cache_dtype != self._dtype:
            dtype_name += f", {self._config.cache.kv_cache_dtype} KV cache"
        if self._device.type == "cuda":
            return f"{device.claim_gpu(self._device)}, {dtype_name}"
        threads = device.set_num_threads(self._num_local_ranks)
        return f"{platform.machine()} CPU ({cpu_isa()}), {counted(threads, 'thread')}, {dtype_name}"

    def load_model(self) -> str:
        """Builds this rank's shard and fills it, or finds it (`KeptWeights`); returns
        `Weights.digest`.

        Raises:
            ConfigError, ModelLoadError: see `models.loader.load_model`, `KeptWeights.load`.
            ConfigError, NativeLibraryError: see `GpuAttention`.
        """
        self._choose_layers()
        model = self._config.model
        with torch.inference_mode():
            self._kept = KeptWeights(self._config, self._memory)
            if (kept := self._kept.load(self._parallel)) is not None:
                vars(self).update(kept)
                gc.collect()  # the objects of the epoch before hold its links and memory
            elif model.calibrates and self._device.type == "cpu":
                self._calibration = Calibration(self._config, self._make_weights(model))
                return self._calibration.digest
            else:
                self._load_model()
        self._make_recorder()
        return self._digest

    def calibrate(self) -> str:
        """Measures the inputs of layers if `load_model` has loaded the model for that, and loads it
        anew with the scales that fit; returns `Weights.digest`.

        A call of its own, which begins when all ranks have loaded the model: else a rank that loads
        slowly would be lost, since ranks wait for each other no longer than in a step.

        Raises:
            CollectiveError: another rank failed.
            ConfigError, ModelLoadError: see `load_model`.
        """
        if (calibration := self._calibration) is not None:
            self._model, self._calibration = calibration.model, None
            cache = self._make_cache(calibration.model, calibration.num_blocks)
            with self._forward():
                importance = calibration.run(self._make_runner(cache, calibration.config))
                self._model = calibration = None  # free before the weights are read again
                self._load_model(importance)
            self._make_recorder()
        return self._digest

    def _make_recorder(self) -> None:
        self._gpu = self._make_gpu_attention(self._require_model())
        layers = None if self._adapters is None else self._adapters.layers
        where = self._device, self._parallel, self._gpu
        self._recorder = Recorder(self._config, *where, layers, self._ends.entering)

    def _load_model(self, importance: Importance | None = None) -> None:
        model = self._config.model
        weights = self._make_weights(model, importance)
        self._model = load_model(model, weights, lambda made: self._check(made, weights))
        self._weights_bytes, self._digest = weights.num_bytes, weights.digest
        if self._config.scheduler.pictures is not None:
            where = self._dtype, self._device, self._parallel
            self._pictures = PictureStore.load(self._config, *where)
            self._features_bytes = self._pictures.features_bytes
            self._weights_bytes += self._pictures.num_bytes
        if (config := self._config.of_draft_model) is not None:
            drafting = self._load_draft_model(config)
            self._weights_bytes += drafting.num_bytes
            self._digest += drafting.digest
        self._weights_form, self._looked_up_bytes = weights.form, weights.looked_up_bytes
        if self._cache_dtype == torch.float8_e4m3fn:
            set_kv_scales(self._model, weights, self._config, self._parallel)
        self._kept.save({name: getattr(self, name) for name in _KEPT}, self._parallel)

    def _make_weights(self, model: ModelConfig, importance: Importance | None = None) -> Weights:
        as_stored = device.keeps_stored(model.dtype, model.quantization, self._device.type)
        sharding = self._dtype, self._device, self._parallel
        return Weights(*sharding, model.quantization, as_stored, importance or {})

    def _choose_layers(self) -> None:
        """Finds which layers this rank's stage has."""
        parallel = self._config.parallel
        count, partition = parallel.pipeline_parallel_size, parallel.layer_partition
        layers = layers_of_stages(self._config.model, count, partition)
        stage = replace(self._parallel.stage, layers=layers[self._parallel.stage.index])
        self._parallel = replace(self._parallel, stage=stage)
        self._ends = StageEnds(stage, self._config, self._dtype, self._device)

    def _load_draft_model(self, config: EngineConfig) -> Weights:
        """Loads the model that makes drafts; returns its weights."""
        weights = self._make_weights(config.model)

        def check(model: CausalLM) -> None:
            check_attention(model, config, self._dtype, self._cache_dtype)

        self._draft_model = load_model(config.model, weights, check)
        return weights

    def _check(self, model: CausalLM, weights: Weights) -> None:
        """Checks a model that has no weights yet, and gives its layers slots for adapters."""
        config = self._config
        check_attention(model, config, self._dtype, self._cache_dtype)
        if config.lora is not None:
            layers = AdapterLayers(weights, model.base_prefix, config.lora)
            in_host = config.lora.max_cpu_loras
            self._adapters = AdapterStore(layers, in_host, self._parallel, self._device)

    def adapter_targets(self) -> Targets:
        """Returns the layers that can have adapters; empty: adapters are not served."""
        return {} if self._adapters is None else self._adapters.layers.targets

    def profile_num_available_blocks(self, known_peak_bytes: int | None = None) -> MemoryLedger:
        """Runs the worst step and counts the blocks that fit into what is left.

        Args:
            known_peak_bytes: `activation_peak_bytes` of an equal rank; the worst step is then not
                run again, and only the free memory is measured.

        Raises:
            CacheSizeError: not even one block fits.
        """
        own_block, cache = self._cache_shape(self._require_model()).block_bytes, self._config.cache
        one_block = own_block + self._draft_block_bytes
        share = device.SWAP_SHARE
        space = device.host_budget_bytes(cache.swap_space_bytes, share, self._num_local_ranks)
        num_host_blocks = space // own_block
        # A GPU also holds buffers for swaps, which come with the cache, and attention's scratch,
        # which is there already.
        staging = staged_blocks(one_block, num_host_blocks) * one_block if self._gpu else 0
        scratch = staging + (self._gpu.num_bytes if self._gpu else 0)
        if known_peak_bytes is None:
            peak, logits = self._activation_peak()
        else:
            peak, logits = max(0, known_peak_bytes - scratch), 0
        graphs = self._try_recording()
        self._release()
        total, budget = device.kv_budget_bytes(
            self._device,
            cache,
            self._num_local_ranks,
            peak + graphs + staging + self._features_bytes,
        )
        wanted = cache.num_device_blocks_override
        ledger = MemoryLedger(
            rank=self._parallel.rank,
            device=str(self._device),
            total_bytes=total,
            weights_bytes=self._weights_bytes,
            looked_up_bytes=self._looked_up_bytes,
            weights_form=self._weights_form,
            activation_peak_bytes=peak + scratch,
            kv_budget_bytes=budget,
            block_bytes=one_block,
            draft_block_bytes=self._draft_block_bytes,
            num_device_blocks=budget // one_block if wanted is None else wanted,
            num_host_blocks=num_host_blocks,
            communicator_bytes=self._parallel.communicator_bytes + self._ends.num_bytes,
            held_by_others_bytes=device.held_by_others_bytes(self._device, self._kept.gpu_bytes),
            logits_bytes=logits,
            graphs_bytes=graphs,
            adapters_bytes=0 if self._adapters is None else self._adapters.layers.num_bytes,
            stage=self._parallel.stage.describe(self._config.model.num_layers),
            outlives=self._kept.outlive and self._waits_can_end,
        )
        if ledger.num_device_blocks < 1:
            raise CacheSizeError(
                f"no block of the KV cache fits on rank {ledger.rank}: one takes "
                f"{one_block / device.GIB:.6f} GiB and {budget / device.GIB:.6f} GiB may be used; "
                f"{device.how_to_get_more(self._device, one_block)}"
            )
        return ledger

    def init_cache_engine(
        self, num_blocks: int, num_host_blocks: int = 0, goes_on: bool = False
    ) -> None:
        """Allocates the cache and the host's pool, records decode steps, and warms up. A second
        call replaces the first cache.

        Args:
            goes_on: whether steps follow that read what lies in the blocks of `memory`. Then
                requests wait, so that nothing is warmed up.

        Raises:
            CacheSizeError: the cache, the pool or the running sequences' tables do not fit into
                memory.
            GraphCaptureError: the graphs do not.
        """
        self._drop_runner()
        try:
            if self._memory is not None and not goes_on:
                self._memory.drop_blocks()
            runner = self._open_cache(num_blocks, num_host_blocks)
            if not goes_on:
                with self._forward():
                    runner.warm_up()
        except BaseException:
            self._drop_runner()  # the caller may measure the free memory again
            raise

    def populate_cache(self) -> None:
        """See `CacheEngine.populate`."""
        assert self._runner is not None, "populate before init_cache_engine"
        self._runner.cache_engine.populate(device.populate_bytes(self._num_local_ranks))

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Takes the vocabulary that grammars need; the rank that samples follows them."""
        assert self._runner is not None, "vocabulary before init_cache_engine"
        if self._parallel.samples:
            self._vocabulary = vocabulary
            self._runner.batch.sampling.edits.grammars.vocabulary = vocabulary

    def compile_grammars(self, grammars: list[str], dropped: list[str], wait_s: float) -> int:
        """Compiles grammars on a thread of the rank that samples; see `Vocabulary.compile`."""
        vocabulary = self._vocabulary
        return 0 if vocabulary is None else vocabulary.compile(grammars, dropped, wait_s)

    def execute_model(self, step: StepInput) -> list[StepOutput]:
        """Runs one step, or only begins it; returns the answers that are there, oldest first."""
        assert self._runner is not None, "execute before init_cache_engine"
        with self._forward():
            return self._runner.execute(step)

    def finish_steps(self) -> list[StepOutput]:
        """Waits for what `execute_model` has only begun; returns the answers."""
        assert self._runner is not None, "finish before init_cache_engine"
        with self._forward():
            return self._runner.finish()

    def shutdown(self) -> None:
        """Releases the weights, the cache and the connection with the other ranks."""
        try:
            if self._runner is not None:
                self._runner.drop_recording()  # before the group is closed, see `DecodeGraphs`
        finally:
            if self._pictures is not None:
                self._pictures.close()
            self._parallel.close()
        self._store = self._model = self._gpu = self._runner = self._adapters = None
        self._pictures = self._draft_model = None
        self._release()

    def _open_cache(self, num_blocks: int, num_host_blocks: int) -> ModelRunner:
        model, draft_model = self._require_model(), self._draft_model
        drafting = draft_cache = None
        try:
            cache = self._make_cache(model, num_blocks, num_host_blocks, self._kept.block_memory)
            if draft_model is not None:
                draft_cache = self._make_cache(draft_model, num_blocks)
                drafting = draft_model, draft_cache.kv_caches
        except (MemoryError, RuntimeError) as error:
            if is_device_fault(error) or isinstance(error, TemporaryError):
                raise
            own_block = self._cache_shape(model).block_bytes / device.GIB
            size = num_blocks * (own_block + self._draft_block_bytes / device.GIB)
            host_size = num_host_blocks * own_block
            raise CacheSizeError(
                f"{num_blocks} blocks of the KV cache ({size:.2f} GiB) on {self._device} and "
                f"{num_host_blocks} on the host ({host_size:.2f} GiB, swap_space) cannot be "
                f"allocated: {error}; choose fewer"
            ) from error
        self._runner = runner = self._make_runner(cache)
        runner.batch.sampling.edits.grammars.vocabulary = self._vocabulary
        with self._forward():
            recorded = self._recorder.record((model, cache.kv_caches), drafting)
            runner.recorded, runner.recorded_adapters = recorded.steps, recorded.with_adapters
            if draft_model is not None and draft_cache is not None:
                limit = self._config.scheduler.max_num_batched_tokens
                own = draft_model, draft_cache, recorded.drafts
                runner.draft_model = DraftModel(*own, runner.batch, self._parallel, limit)
            if isinstance(recorded.steps, DecodeGraphs):
                recorded.steps.record()
            if self._gpu is not None:
                claim_activations(runner.run_worst_case, self._config, self._device)
        return runner

    def _try_recording(self) -> int:
        """Returns the bytes that recorded decode steps take, tried over caches of one block."""
        models = [self._require_model(), self._draft_model]
        tried = [(m, self._make_cache(m, 1).kv_caches) for m in models if m is not None]
        with self._forward():
            return self._recorder.record(*tried).take_bytes()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.drop_recording()
            self._runner = None
            self._release()

    def _release(self) -> None:
        """Gives the memory that torch keeps for later use back to the device."""
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """Wraps code in which ranks wait for each other: a rank that fails tells the others."""
        try:
            with torch.inference_mode():
                yield
        except BaseException:
            try:
                if self._parallel.tp_size > 1 and self._runner is not None:
                    self._runner.drop_recording()  # as in `shutdown`; no step will follow
            finally:
                self._parallel.abandon()
            raise

    @property
    def _works_ahead(self) -> bool:
        """Whether the next step is launched before the answer of this one is there. Exchanges
        through the host would delay this answer until the next step's layers have run. Other
        stages wait for the ids of the last one, which works on another group of sequences then."""
        is_alone = self._parallel.stage.count == 1
        return self._device.type == "cuda" and self._parallel.can_be_recorded and is_alone

    def _activation_peak(self) -> tuple[int, int]:
        """Returns bytes of activations in the worst step, and how many of them logits and sampling
        take, which is measured on a GPU only."""
        runner = self._make_runner(self._make_cache(self._require_model(), 1))
        with self._forward(), device.PeakMemory(self._device) as peak:
            model_peak = runner.run_worst_case()
        if self._gpu is None:
            return peak.peak_bytes, 0
        return peak.peak_bytes, max(0, peak.start_bytes + peak.peak_bytes - model_peak)

    def _make_gpu_attention(self, model: CausalLM) -> GpuAttention | None:
        if self._device.type != "cuda":
            return None
        return GpuAttention(model, self._config, self._dtype, self._cache_dtype, self._device)

    def _make_runner(self, cache: CacheEngine, config: EngineConfig | None = None) -> ModelRunner:
        model, scheduler = self._require_model(), self._config.scheduler
        try:
            return ModelRunner(
                config or self._config,
                model,
                cache,
                self._device,
                self._parallel,
                self._ends,
                self._gpu,
                self._adapters,
                self._works_ahead,
                self._pictures,
            )
        except (MemoryError, RuntimeError) as error:
            if is_device_fault(error):
                raise
            raise CacheSizeError(
                f"the tables of running sequences (max_num_seqs = {scheduler.max_num_seqs}, each "
                f"of up to {scheduler.max_model_len} tokens) cannot be allocated: {error}; lower "
                "max_num_seqs or max_model_len"
            ) from error

    def _require_model(self) -> CausalLM:
        assert self._model is not None, "the model is not loaded"
        return self._model

    def _make_cache(
        self,
        model: CausalLM,
        num_blocks: int,
        num_host_blocks: int = 0,
        memory: RankMemory | None = None,
    ) -> CacheEngine:
        cache = CacheEngine(self._cache_shape(model), num_blocks, num_host_blocks, memory)
        if self._config.model.is_encoder:
            cache.share(len(list(attention_layers(model))))
        return cache

    @property
    def _draft_block_bytes(self) -> int:
        """Bytes of one block of the model that makes drafts, whose cache is not swapped."""
        return 0 if self._draft_model is None else self._cache_shape(self._draft_model).block_bytes

    def _cache_shape(self, model: CausalLM) -> CacheShape:
        layers = list(attention_layers(model))
        # An encoder computes a prompt in one step: its layers use the same blocks, one by one.
        num_layers = 1 if self._config.model.is_encoder else len(layers)
        block = self._config.cache.block_size, num_layers, layers[0].num_kv_heads
        return CacheShape(self._device, self._cache_dtype, *block, layers[0].head_dim)
