"""`EngineArgs`: what a user may set, checked, and turned into the engine's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any

from tpengine import config as cfg
from tpengine.argument_checks import check_bounds, check_device_arguments
from tpengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from tpengine.errors import ConfigError

GIB = 1 << 30
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def _arg(default: Any, help_text: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass
class EngineArgs:
    """Arguments of an engine; each is also a command-line option (`max_num_seqs` is
    `--max-num-seqs`), with the same default and the help text given here."""

    model: str = _arg(
        cfg.EMBEDDED_MODEL,
        "folder in Hugging Face layout, or hub name; default: the model that tpengine carries",
    )
    tokenizer: str | None = _arg(None, "folder or hub name of the tokenizer; default: the model's")
    tokenizer_mode: str = _arg(
        "auto", "auto prefers the fast tokenizer; slow forces the other", ("auto", "slow")
    )
    trust_remote_code: bool = _arg(
        False, "run Python code that the model's folder brings (configuration and tokenizer)"
    )
    download_dir: str | None = _arg(None, "where models fetched from the hub are kept")
    load_format: str = _arg(
        "auto",
        "safetensors reads the weights; pt reads pytorch_model*.bin (tensors only, nothing else is "
        "unpickled); dummy makes random ones, for benchmarks",
        cfg.LOAD_FORMATS,
    )
    dtype: str = _arg(
        "auto",
        "type of weights and activations; auto: bfloat16 where the device computes in it, else "
        "float32",
        cfg.DTYPES,
    )
    quantization: str | None = _arg(
        None,
        "int8: linear layers in 8 bits, weights per output and inputs per token; CPU only",
        cfg.QUANTIZATIONS,
    )
    device: str = _arg("auto", "auto takes a GPU where there is one", cfg.DEVICES)
    seed: int = _arg(0, "seed of requests that bring none; the same run gives the same tokens")
    max_model_len: int | None = _arg(
        None, "most tokens of a sequence, prompt and output; default: what the model was made for"
    )
    block_size: int = _arg(16, "tokens in a block of the KV cache", cfg.BLOCK_SIZES)
    swap_space: float | None = _arg(
        None,
        "GiB of host memory per rank for the blocks of preempted sequences, 0: none; default: the "
        "smaller of 4 and 10 %% of the free memory",
    )
    preemption_mode: str = _arg(
        "swap",
        "what happens to requests that give way when the cache is full: swap keeps their blocks in "
        "swap_space, which is tens of times faster than to compute their tokens again (`tpengine "
        "bench swap`); recompute does that; auto swaps requests of several sequences only. Without "
        "room in swap_space all are recomputed",
        cfg.PREEMPTION_MODES,
    )
    enable_prefix_caching: bool = _arg(
        True, "find blocks of the KV cache again for prompts with the same beginning"
    )
    scheduling_policy: str = _arg(
        "fcfs",
        "fcfs serves requests as they arrive; priority serves those of lower priority first, with "
        "a bound on how many later ones are",
        cfg.SCHEDULING_POLICIES,
    )
    gpu_memory_utilization: float = _arg(
        0.9, "share of a GPU's memory that the engine may use, in (0, 1]"
    )
    cpu_kv_cache_space: float | None = _arg(
        None, "GiB of KV cache on CPU; default: the smaller of 4 and 40 %% of the free memory"
    )
    num_device_blocks_override: int | None = _arg(
        None, "number of blocks of the KV cache, whatever the memory says"
    )
    max_num_batched_tokens: int | None = _arg(
        None,
        "most tokens computed in a step; default: 512 on CPU, 8192 on a GPU, and the model's "
        "length if that is more and prompts are not chunked",
    )
    max_num_seqs: int = _arg(256, "most sequences running at once")
    enable_chunked_prefill: bool = _arg(
        True, "compute long prompts over several steps, beside decodes"
    )
    tensor_parallel_size: int = _arg(1, "ranks that share the model; only 1 in this version")
    pipeline_parallel_size: int = _arg(1, "only 1: layers are not spread over ranks")
    enforce_eager: bool = _arg(
        False, "never use CUDA graphs (there are none on CPU, nor in this version)"
    )
    disable_log_stats: bool = _arg(False, "no statistics line while running")

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
                tokenizer, self.download_dir, trust_remote_code=trust
            )
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
            gpu_memory_utilization=self.gpu_memory_utilization,
            cpu_kv_cache_bytes=(
                None if self.cpu_kv_cache_space is None else int(self.cpu_kv_cache_space * GIB)
            ),
            num_device_blocks_override=self.num_device_blocks_override,
            swap_space_bytes=None if self.swap_space is None else int(self.swap_space * GIB),
            enable_prefix_caching=self.enable_prefix_caching,
        )
        return EngineConfig(
            model=model,
            cache=cache,
            parallel=ParallelConfig(tensor_parallel_size=self.tensor_parallel_size),
            scheduler=self._scheduler_config(max_model_len, device),
            device=device,
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
        )

    def _check(self) -> None:
        types = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            value = getattr(self, spec.name)
            if not _is_of_kind(value, types[spec.name]):
                raise ConfigError(f"{spec.name} must be {spec.type}, got {value!r}")
            if choices is not None and value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise ConfigError(f"{spec.name} must be one of {listed}; got {value!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_device_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        space = self.cpu_kv_cache_space
        if space is not None and not 0.0 < space < math.inf:
            raise ConfigError(f"cpu_kv_cache_space must be more than 0 GiB and finite, got {space}")
        if self.swap_space is not None and not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(
                f"swap_space must be at least 0 GiB and finite, got {self.swap_space}"
            )
        self._check_unsupported()

    def _check_unsupported(self) -> None:
        if self.pipeline_parallel_size != 1:
            raise ConfigError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: tpengine splits every "
                "layer over its ranks and does not spread layers over them; leave it at 1"
            )
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size = {self.tensor_parallel_size}: this version runs one rank "
                "only; leave it at 1"
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
                group.add_argument(option, action=argparse.BooleanOptionalAction, **options)
                continue
            concrete = [t for t in typing.get_args(kind) if t is not type(None)] or [kind]
            if spec.default is not None and spec.name != "model":
                options["help"] += " (default: %(default)s)"
            choices = [c for c in spec.metadata["choices"] or () if c is not None] or None
            group.add_argument(option, type=concrete[0], choices=choices, **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Takes its fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})


def _is_of_kind(value: object, kind: Any) -> bool:
    """Whether a value is what its field's type hint says; a whole number is a float, too."""
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(value, bool):  # in Python also an int, and never meant as one
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)
