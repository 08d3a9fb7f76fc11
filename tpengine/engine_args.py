"""`EngineArgs`: what a user may set, checked, and turned into the engine's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpengine import config as cfg
from tpengine.argument_checks import check_bounds, check_budgets, check_device_arguments
from tpengine.arguments import arg, each, is_of_kind, one_or_more, read_bundle
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
from tpengine.errors import ConfigError

GIB = 1 << 30
_COUNTS = (
    "max_num_seqs",
    "stream_interval",
    "max_num_batched_tokens",
    "num_device_blocks_override",
    "tensor_parallel_size",
)
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass
class EngineArgs:
    """Arguments of an engine; each is also a command-line option (`max_num_seqs` is
    `--max-num-seqs`), with the same default and the help text given here."""

    model: str = arg(
        cfg.EMBEDDED_MODEL,
        "folder in Hugging Face layout, or hub name; default: the model that tpengine carries",
    )
    tokenizer: str | None = arg(None, "folder or hub name of the tokenizer; default: the model's")
    tokenizer_mode: str = arg(
        "auto", "auto prefers the fast tokenizer; slow forces the other", ("auto", "slow")
    )
    trust_remote_code: bool = arg(
        False, "run Python code that the model's folder brings (configuration and tokenizer)"
    )
    download_dir: str | None = arg(None, "where models of the hub are kept; default: its own cache")
    load_format: str = arg(
        "auto",
        "auto and safetensors read *.safetensors; pt reads pytorch_model*.bin (nothing but tensors "
        "is unpickled); dummy makes random weights, for benchmarks",
        cfg.LOAD_FORMATS,
    )
    dtype: str = arg(
        "auto",
        "type of weights and activations, float meaning float32 and half float16; auto: bfloat16 "
        "where the device computes in it, else float32",
        cfg.DTYPES,
    )
    quantization: str | None = arg(
        None,
        "int8, on CPU: linear layers in 8 bits, weights per output, inputs per token; default: no",
        cfg.QUANTIZATIONS,
    )
    device: str = arg("auto", "auto takes a GPU where there is one", cfg.DEVICES)
    seed: int = arg(0, "seed of requests that bring none, so that the same run gives the same text")
    max_model_len: int | None = arg(
        None, "most tokens of a sequence, prompt and output; default: what the model was made for"
    )
    block_size: int = arg(16, "tokens in a block of the KV cache", cfg.BLOCK_SIZES)
    swap_space: float | None = arg(
        None,
        "GiB of host memory per rank for the blocks of preempted sequences, 0: none; default: the "
        "smaller of 4 and 10 %% of the free memory, divided by the ranks on the machine",
    )
    preemption_mode: str = arg(
        "swap",
        "what happens to requests that give way when the cache is full: swap keeps their blocks in "
        "swap_space, which is tens of times faster than to compute their tokens again (`tpengine "
        "bench swap`); recompute does that; auto swaps requests of several sequences only. Without "
        "room in swap_space all are recomputed",
        cfg.PREEMPTION_MODES,
    )
    enable_prefix_caching: bool = arg(
        True, "find blocks of the KV cache again for prompts with the same beginning"
    )
    scheduling_policy: str = arg(
        "fcfs",
        "fcfs serves requests as they arrive; priority those of the lowest number first, but lets "
        "a request be overtaken only so often",
        cfg.SCHEDULING_POLICIES,
    )
    gpu_memory_utilization: float | Sequence[float] = arg(
        0.9, "share of a GPU's memory that the engine may use, in (0, 1]; or one per rank: 0.9,0.8"
    )
    cpu_kv_cache_space: float | Sequence[float] | None = arg(
        None,
        "GiB of KV cache of a rank on CPU, or one per rank: 2,1; default: the smaller of 4 and "
        "40 %% of the free memory, divided by the ranks on the machine",
    )
    num_device_blocks_override: int | None = arg(
        None, "blocks of the KV cache, whatever the memory says; default: as many as fit"
    )
    max_num_batched_tokens: int | None = arg(
        None,
        "most tokens computed in a step; default: 512 on CPU, 8192 on a GPU, and the model's "
        "length if that is more and prompts are not chunked",
    )
    max_num_seqs: int = arg(256, "most sequences running at once")
    stream_interval: int = arg(
        1,
        "new tokens that a stream reports together, after its first; more than 1 saves the driver "
        "time for each message, and makes streams less even",
    )
    enable_chunked_prefill: bool = arg(
        True, "compute long prompts over several steps, beside decodes"
    )
    tensor_parallel_size: int = arg(1, "ranks that share the model, each with a device")
    executor: str = arg(
        "auto",
        "local runs one rank in this process, ray an actor per rank on a Ray cluster; auto takes "
        "ray for more than one rank",
        cfg.EXECUTORS,
    )
    ray_address: str | None = arg(
        None,
        "host:port of a Ray cluster, or local to start one; default: the one that this process "
        "belongs to, or that `ray start` started here, or a new local one",
    )
    ray_placement_strategy: str = arg(
        "PACK", "how ranks are spread over nodes, by Ray's names", cfg.PLACEMENT_STRATEGIES
    )
    ray_bundle: str | None = arg(
        None,
        "resources of one rank by Ray's names, as in 'GPU=1,my_accelerator=1'; default: GPU=1, or "
        "CPU=1 for ranks on CPU",
    )
    placement_timeout_s: float = arg(
        60.0, "seconds to wait for resources of the cluster that others hold"
    )
    start_timeout_s: float = arg(600.0, "seconds that a rank may take for any phase of its start")
    step_timeout_s: float = arg(
        30.0, "least deadline of a step in seconds; it has 10 x its predicted time if that is more"
    )
    max_recoveries: int = arg(
        10,
        "how often within --recovery-window a group of ranks that lost one is rebuilt and its "
        "requests go on; the next loss ends the engine",
    )
    recovery_window: float = arg(600.0, "seconds over which recoveries are counted")
    spare_workers: int = arg(
        0, "processes on Ray kept with torch imported, so that a lost group is rebuilt sooner"
    )
    pipeline_parallel_size: int = arg(1, "only 1: layers are not spread over ranks")
    enforce_eager: bool = arg(False, "never record decode steps (CUDA graphs; on CPU: op lists)")
    async_scheduling: bool = arg(
        True, "let a GPU begin a decode step while the tokens of the one before are looked at"
    )
    kv_cache_dtype: str = arg(
        "auto",
        "auto: that of the model; fp8 (e4m3) holds twice as many tokens, on a GPU",
        cfg.KV_CACHE_DTYPES,
    )
    attention_backend: str = arg(
        "auto",
        "who computes prompts' attention on a GPU; auto takes the first of xformers, varlen "
        "(torch's FlashAttention) and sdpa that is there and computes this model's rightly",
        cfg.ATTENTION_BACKENDS,
    )
    disable_log_stats: bool = arg(False, "no statistics line while running")

    def create_engine_config(self, device: str) -> EngineConfig:
        """Checks the arguments, reads the model's configuration and settles the defaults.

        Args:
            device: cpu or cuda, as the executor found it.

        Raises:
            ConfigError: an argument is out of range, or two contradict each other.
            ModelLoadError: the model's folder cannot be read.
        """
        self._check()
        check_bounds(self)
        check_device_arguments(self, device)
        trust = self.trust_remote_code
        folder = cfg.resolve_model_folder(self.model, self.download_dir, self.load_format, trust)
        tokenizer = self.tokenizer
        if tokenizer is not None:
            tokenizer = cfg.resolve_model_folder(
                tokenizer, self.download_dir, trust_remote_code=trust, what="tokenizer"
            )
        utilization, kv_cache_bytes = self._budgets()
        hf_config = cfg.read_hf_config(folder, self.trust_remote_code)
        max_model_len = cfg.resolve_max_model_len(hf_config, self.max_model_len)
        model = ModelConfig(
            model=folder,
            tokenizer=tokenizer or folder,
            tokenizer_mode=self.tokenizer_mode,
            trust_remote_code=self.trust_remote_code,
            hf_config=hf_config,
            dtype=self.dtype,
            max_model_len=max_model_len,
            seed=self.seed,
            load_format=self.load_format,
            end_token_ids=cfg.read_end_token_ids(folder, hf_config),
            quantization=self.quantization,
        )
        cache = CacheConfig(
            block_size=self.block_size,
            gpu_memory_utilization=min(utilization),
            cpu_kv_cache_bytes=min(kv_cache_bytes) if kv_cache_bytes else None,
            num_device_blocks_override=self.num_device_blocks_override,
            swap_space_bytes=None if self.swap_space is None else int(self.swap_space * GIB),
            enable_prefix_caching=self.enable_prefix_caching,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return EngineConfig(
            model=model,
            cache=cache,
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                rank_gpu_memory_utilization=utilization if len(utilization) > 1 else None,
                rank_cpu_kv_cache_bytes=kv_cache_bytes if len(kv_cache_bytes) > 1 else None,
                ray=self._ray_config() if self.uses_ray else None,
            ),
            scheduler=self._scheduler_config(max_model_len, device),
            recovery=RecoveryConfig(self.max_recoveries, self.recovery_window),
            device=device,
            kernels=KernelConfig(self.attention_backend, self.enforce_eager),
        )

    @property
    def uses_ray(self) -> bool:
        """Whether the ranks are Ray's actors."""
        return self.executor == "ray" or (self.executor == "auto" and self.tensor_parallel_size > 1)

    def _budgets(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """(shares of a GPU, bytes on CPU): of all ranks, or the one for all; no bytes: default."""
        spaces = each(self.cpu_kv_cache_space)
        return each(self.gpu_memory_utilization), tuple(int(space * GIB) for space in spaces)

    def _ray_config(self) -> RayConfig:
        return RayConfig(
            address=self.ray_address,
            placement_strategy=self.ray_placement_strategy,
            bundle=None if self.ray_bundle is None else read_bundle(self.ray_bundle),
            placement_timeout_s=self.placement_timeout_s,
            start_timeout_s=self.start_timeout_s,
            step_timeout_s=self.step_timeout_s,
            spare_workers=self.spare_workers,
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

    def _check(self) -> None:
        types = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            value = getattr(self, spec.name)
            if not is_of_kind(value, types[spec.name]):
                raise ConfigError(f"{spec.name} must be {spec.type}, got {value!r}")
            if choices is not None and value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise ConfigError(f"{spec.name} must be one of {listed}; got {value!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        check_budgets(self)
        if self.swap_space is not None and not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(
                f"swap_space must be at least 0 GiB and finite, got {self.swap_space}"
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
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
        for name in ("placement_timeout_s", "start_timeout_s", "step_timeout_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be more than 0 seconds and finite, got {getattr(self, name)}"
                )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds one option per field."""
        group = parser.add_argument_group("engine")
        types = typing.get_type_hints(cls)
        for spec in dataclasses.fields(cls):
            option = "--" + spec.name.replace("_", "-")
            kind = types[spec.name]
            options: dict[str, Any] = {"default": spec.default, "help": spec.metadata["help"]}
            if kind is bool:
                options["help"] += f" (default: {'on' if spec.default else 'off'})"
                group.add_argument(option, action=argparse.BooleanOptionalAction, **options)
                continue
            concrete = [t for t in typing.get_args(kind) if t is not type(None)] or [kind]
            convert: Any = concrete[0]
            if Sequence[float] in concrete:
                convert = one_or_more
                options["metavar"] = "NUM,..."
            if spec.default is not None and spec.name != "model":
                options["help"] += " (default: %(default)s)"
            choices = [c for c in spec.metadata["choices"] or () if c is not None] or None
            group.add_argument(option, type=convert, choices=choices, **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Takes its fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})
