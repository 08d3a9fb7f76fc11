"""`EngineArgs`: what a user may set, checked, and turned into the engine's configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tpengine import config as cfg
from tpengine.config import (
    CacheConfig,
    EngineConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    RayConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from tpengine.errors import ConfigError, counted
from tpengine.logger import init_logger
from tpengine.options import Options, each, option

logger = init_logger(__name__)

GIB = 1 << 30
_MAX_GIB = 1 << 20
"""More than any machine has; as bytes it still fits into 64 bits."""
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_GPUS, _RAY = "GPUs", "ranks on Ray"


@dataclass
class EngineArgs(Options):
    """Arguments of an engine; each is also a command-line option (`max_num_seqs` is
    `--max-num-seqs`), with the same default and the text below the field in `--help`."""

    group: ClassVar[str] = "engine"

    model: str = option(cfg.EMBEDDED_MODEL)
    """Folder in Hugging Face layout, or hub name; default: the small model inside tpengine."""
    tokenizer: str | None = option(None)
    """Folder or hub name of the tokenizer; default: the model's."""
    tokenizer_mode: str = option("auto", ("auto", "slow"))
    """Which tokenizer of the model: auto prefers the fast one, slow takes the other."""
    trust_remote_code: bool = option(False)
    """Run Python code from the model's folder (configuration and tokenizer)."""
    download_dir: str | None = option(None)
    """Folder for models of the hub; default: the hub's own cache."""
    load_format: str = option("auto", cfg.LOAD_FORMATS)
    """Form of the weights: auto and safetensors read *.safetensors; pt reads pytorch_model*.bin
    (only tensors are unpickled); dummy makes random weights, for benchmarks."""
    dtype: str = option("auto", cfg.DTYPES)
    """Type of weights and activations; float is float32, half is float16; auto takes bfloat16 where
    the device computes in it, else float32."""
    quantization: str | None = option(None, cfg.QUANTIZATIONS)
    """Form of linear layers: int8, on CPU, has 8 bits, with one scale per weight row and per input
    token; default: none."""
    device: str = option("auto", cfg.DEVICES)
    """Where the model runs; auto takes a GPU if the machine has one."""
    seed: int = option(0, at_least=-(1 << 63), at_most=(1 << 64) - 1)
    """Seed of requests without their own, so that each run gives the same text."""
    max_model_len: int | None = option(None, at_least=1)
    """Most tokens of a sequence, prompt and output together; default: the model's length."""
    block_size: int = option(16, cfg.BLOCK_SIZES)
    """Tokens in a block of the KV cache."""
    swap_space: float | None = option(None, at_least=0, at_most=_MAX_GIB, unit=" GiB")
    """GiB of host memory per rank for the blocks of preempted sequences, 0 for none; default: the
    smaller of 4 and 10 % of the free memory, divided by the ranks on the machine."""
    preemption_mode: str = option("swap", cfg.PREEMPTION_MODES)
    """What happens to a request that must give its blocks up because the cache is full: swap copies
    them to swap_space; recompute drops them and computes its tokens again, which is tens of times
    slower; auto swaps only requests with more than one sequence. Without room in swap_space every
    mode recomputes."""
    enable_prefix_caching: bool = option(True)
    """Reuse blocks of the KV cache for prompts that begin with the same tokens."""
    scheduling_policy: str = option("fcfs", cfg.SCHEDULING_POLICIES)
    """Order of requests: fcfs is first come, first served; priority serves the lowest number first,
    with a limit on how often a request is overtaken."""
    gpu_memory_utilization: float | Sequence[float] = option(
        0.9, more_than=0, at_most=1, only_for=_GPUS
    )
    """Share of a GPU's memory that the engine may use, in (0, 1]; or one per rank: 0.9,0.8."""
    cpu_kv_cache_space: float | Sequence[float] | None = option(
        None, more_than=0, at_most=_MAX_GIB, unit=" GiB"
    )
    """GiB of KV cache of a rank on CPU, or one per rank: 2,1; default: the smaller of 4 and 40 % of
    the free memory, divided by the ranks on the machine."""
    num_device_blocks_override: int | None = option(None, at_least=1)
    """Number of blocks of the KV cache, without regard to memory; default: as many as fit."""
    max_num_batched_tokens: int | None = option(
        None, at_least=1, at_most=1 << 20, advice="longer prompts are computed in more steps"
    )
    """Most tokens that a step computes; default: 512 on CPU, 8192 on a GPU, or the model's length
    if that is more and prompts are not chunked."""
    max_num_seqs: int = option(256, at_least=1, at_most=1 << 16, advice="more requests wait")
    """Most sequences that run at once."""
    stream_interval: int = option(1, at_least=1)
    """New tokens that a stream reports together, after the first; more than 1 saves the driver time
    for each message, and makes streams less even."""
    enable_chunked_prefill: bool = option(True)
    """Compute long prompts over more than one step, together with decodes."""
    tensor_parallel_size: int = option(1, at_least=1)
    """Number of ranks that share the model, each with its own device."""
    executor: str = option("auto", cfg.EXECUTORS)
    """Where ranks run: local runs one rank in this process; ray runs an actor per rank on a Ray
    cluster; auto takes ray for more than one rank."""
    ray_address: str | None = option(None, only_for=_RAY)
    """Address HOST:PORT of a Ray cluster, or local to start one; default: the cluster of this
    process, or one that `ray start` started on this machine, or a new local one."""
    ray_placement_strategy: str = option("PACK", cfg.PLACEMENT_STRATEGIES, only_for=_RAY)
    """How ranks are spread over nodes, by Ray's names."""
    ray_bundle: str | None = option(None, only_for=_RAY)
    """Resources of one rank by Ray's names, as in 'GPU=1,my_accelerator=1'; default: GPU=1, or
    CPU=1 for ranks on CPU."""
    placement_timeout_s: float = option(60.0, more_than=0, unit=" seconds", only_for=_RAY)
    """Seconds to wait for resources of the cluster that are in use."""
    start_timeout_s: float = option(600.0, more_than=0, unit=" seconds", only_for=_RAY)
    """Seconds that each phase of a rank's start may take."""
    step_timeout_s: float = option(30.0, more_than=0, unit=" seconds", only_for=_RAY)
    """Smallest deadline of a step in seconds; it is 10 x the predicted time if that is more."""
    max_recoveries: int = option(10, at_least=0)
    """How often within --recovery-window a group that lost a rank is rebuilt and its requests go
    on; the next loss ends the engine."""
    recovery_window: float = option(600.0, more_than=0, unit=" seconds")
    """Seconds over which recoveries are counted."""
    spare_workers: int = option(0, at_least=0, only_for=_RAY)
    """Processes on Ray kept ready with torch imported, so that a lost group is rebuilt sooner."""
    pipeline_parallel_size: int = option(1)
    """Always 1: tpengine does not spread layers over ranks."""
    enforce_eager: bool = option(False)
    """Never record decode steps (CUDA graphs; on CPU: lists of operations)."""
    async_scheduling: bool = option(True, only_for=_GPUS)
    """Let a GPU begin a decode step while the driver processes the tokens of the step before."""
    kv_cache_dtype: str = option("auto", cfg.KV_CACHE_DTYPES)
    """Type of K and V in the cache: auto is the model's dtype; fp8 (e4m3), on a GPU, holds twice as
    many tokens."""
    attention_backend: str = option("auto", cfg.ATTENTION_BACKENDS, only_for=_GPUS)
    """Kernel for the attention of prompts on a GPU; auto takes the first of xformers, varlen
    (torch's FlashAttention) and sdpa that is installed and supports this model."""
    disable_log_stats: bool = option(False)
    """No line of statistics while the engine runs."""
    logprobs_mode: str = option("raw_logprobs", cfg.LOGPROBS_MODES)
    """Which log probabilities are reported, and rank the outputs of best_of: raw_logprobs are of
    the model's logits; processed_logprobs, as in vLLM 0.5.4, of what bias, bans, penalties,
    temperature and truncation made of them."""

    @property
    def uses_ray(self) -> bool:
        """Whether the ranks are Ray's actors."""
        return self.executor == "ray" or (self.executor == "auto" and self.tensor_parallel_size > 1)

    def create_engine_config(self, device: str) -> EngineConfig:
        """Checks the arguments, reads the model's configuration and sets the defaults.

        Args:
            device: cpu or cuda, as the executor found it.

        Raises:
            ConfigError: an argument is out of range, or two contradict each other.
            ModelLoadError: the model's folder cannot be read.
        """
        self.check()
        self._check_device(device)
        shares = each(self.gpu_memory_utilization)
        cache_bytes = tuple(int(space * GIB) for space in each(self.cpu_kv_cache_space))
        model = self._model_config()
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                block_size=self.block_size,
                gpu_memory_utilization=min(shares),
                cpu_kv_cache_bytes=min(cache_bytes) if cache_bytes else None,
                num_device_blocks_override=self.num_device_blocks_override,
                swap_space_bytes=None if self.swap_space is None else int(self.swap_space * GIB),
                enable_prefix_caching=self.enable_prefix_caching,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                rank_gpu_memory_utilization=shares if len(shares) > 1 else None,
                rank_cpu_kv_cache_bytes=cache_bytes if len(cache_bytes) > 1 else None,
                ray=self._ray_config() if self.uses_ray else None,
            ),
            scheduler=self._scheduler_config(model.max_model_len, device),
            recovery=RecoveryConfig(self.max_recoveries, self.recovery_window),
            device=device,
            kernels=KernelConfig(self.attention_backend, self.enforce_eager),
        )

    def check(self) -> None:
        """Checks each argument, and the arguments against each other.

        Raises:
            ConfigError: see the message.
        """
        super().check()
        if self.pipeline_parallel_size != 1:
            raise ConfigError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: tpengine splits every "
                "layer over its ranks and does not spread layers over them; leave it at 1"
            )
        if self.tensor_parallel_size != 1 and self.executor == "local":
            raise ConfigError(
                f"executor = 'local' runs one rank, got tensor_parallel_size = "
                f"{self.tensor_parallel_size}; use executor = 'ray', or 1 rank"
            )
        for name in ("gpu_memory_utilization", "cpu_kv_cache_space"):
            given = getattr(self, name)
            if isinstance(given, (list, tuple)) and len(given) != self.tensor_parallel_size:
                raise ConfigError(
                    f"{name} must be one number or one per rank: tensor_parallel_size = "
                    f"{self.tensor_parallel_size}, got {counted(len(given), 'number')}"
                )
        idle = [] if self.uses_ray else self.changed(only_for=_RAY)
        if idle:
            raise ConfigError(
                f"{idle[0]} is for {_RAY}, and one rank runs in this process: set executor='ray', "
                "or leave it out"
            )
        if self.cpu_kv_cache_space is not None and self.num_device_blocks_override is not None:
            raise ConfigError(
                f"cpu_kv_cache_space = {self.cpu_kv_cache_space} and num_device_blocks_override = "
                f"{self.num_device_blocks_override} both size the cache; leave one of them unset"
            )

    def _check_device(self, device: str) -> None:
        if self.cpu_kv_cache_space is not None and device != "cpu":
            raise ConfigError(
                f"cpu_kv_cache_space = {self.cpu_kv_cache_space} sizes the cache on CPU, the "
                f"device is {device}; leave it unset and use gpu_memory_utilization, or set "
                "device='cpu'"
            )
        if self.kv_cache_dtype == "fp8" and device == "cpu":
            raise ConfigError(
                "kv_cache_dtype = 'fp8' has kernels for GPUs only, the device is cpu; leave it at "
                "'auto'"
            )
        idle = self.changed(only_for=_GPUS) if device == "cpu" else []
        if idle:
            logger.warning("no effect on CPU: %s", ", ".join(idle))

    def _model_config(self) -> ModelConfig:
        trust = self.trust_remote_code
        folder = cfg.resolve_model_folder(self.model, self.download_dir, self.load_format, trust)
        tokenizer = folder
        if self.tokenizer is not None:
            tokenizer = cfg.resolve_model_folder(
                self.tokenizer, self.download_dir, trust_remote_code=trust, what="tokenizer"
            )
        hf_config = cfg.read_hf_config(folder, trust)
        return ModelConfig(
            model=folder,
            tokenizer=tokenizer,
            tokenizer_mode=self.tokenizer_mode,
            trust_remote_code=trust,
            hf_config=hf_config,
            dtype=self.dtype,
            max_model_len=cfg.resolve_max_model_len(hf_config, self.max_model_len),
            seed=self.seed,
            load_format=self.load_format,
            end_token_ids=cfg.read_end_token_ids(folder, hf_config),
            quantization=self.quantization,
            logprobs_mode=self.logprobs_mode,
        )

    def _scheduler_config(self, max_model_len: int, device: str) -> SchedulerConfig:
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = _DEFAULT_BATCHED_TOKENS[device]
            if not self.enable_chunked_prefill:
                budget = max(budget, max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens = {budget} is less than max_model_len = {max_model_len}: "
                "a prompt that is not chunked could never be scheduled; raise the first, lower "
                "the second, or enable chunked prefill"
            )
        return SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            stream_interval=self.stream_interval,
            looks_ahead=self.async_scheduling and device == "cuda",
        )

    def _ray_config(self) -> RayConfig:
        return RayConfig(
            address=self.ray_address,
            placement_strategy=self.ray_placement_strategy,
            bundle=None if self.ray_bundle is None else _read_bundle(self.ray_bundle),
            placement_timeout_s=self.placement_timeout_s,
            start_timeout_s=self.start_timeout_s,
            step_timeout_s=self.step_timeout_s,
            spare_workers=self.spare_workers,
        )


def _read_bundle(text: str) -> dict[str, float]:
    """Reads `GPU=1,my_accelerator=1` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    bundle = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        try:
            bundle[name] = float(amount)
        except ValueError:
            bundle[name] = math.nan
        if not name or not 0.0 < bundle[name] < math.inf:
            raise ConfigError(
                f"ray_bundle must be of the form 'GPU=1,my_accelerator=1', with amounts above 0; "
                f"got {text!r}"
            )
    return bundle
