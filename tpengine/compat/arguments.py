"""`EngineArgs` with the arguments that vLLM 0.5.4 has besides ours, and in its order.

Some arguments are hidden in `--help`, since they cannot change anything: one is refused at each
value but its default, and the text below it says why and what to use; or it has no effect, and a
warning names it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

from tpengine import config, engine_args
from tpengine.compat import aliases
from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.options import NOTHING, option

if TYPE_CHECKING:
    import argparse

logger = init_logger(__name__)

_POSITIONS = """
    model served_model_name tokenizer skip_tokenizer_init tokenizer_mode trust_remote_code
    download_dir load_format dtype kv_cache_dtype quantization_param_path seed max_model_len
    worker_use_ray distributed_executor_backend pipeline_parallel_size tensor_parallel_size
    max_parallel_loading_workers block_size enable_prefix_caching disable_sliding_window
    use_v2_block_manager swap_space cpu_offload_gb gpu_memory_utilization max_num_batched_tokens
    max_num_seqs max_logprobs disable_log_stats revision code_revision rope_scaling rope_theta
    tokenizer_revision quantization enforce_eager max_context_len_to_capture max_seq_len_to_capture
    disable_custom_all_reduce tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config
    enable_lora max_loras max_lora_rank enable_prompt_adapter max_prompt_adapters
    max_prompt_adapter_token fully_sharded_loras lora_extra_vocab_size long_lora_scaling_factors
    lora_dtype max_cpu_loras device ray_workers_use_nsight num_gpu_blocks_override
    num_lookahead_slots model_loader_extra_config ignore_patterns preemption_mode
    scheduler_delay_factor enable_chunked_prefill guided_decoding_backend speculative_model
    speculative_draft_tensor_parallel_size num_speculative_tokens speculative_max_model_len
    speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min
    spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
    typical_acceptance_sampler_posterior_alpha qlora_adapter_name_or_path
    disable_logprobs_during_spec_decoding otlp_traces_endpoint
"""
"""The positional arguments of `EngineArgs` in vLLM 0.5.4."""


@dataclass
class _Positions:
    """The order of the arguments. A dataclass keeps the order of its last base, and takes each
    field itself from the class that declares it."""

    __annotations__ = dict.fromkeys(_POSITIONS.split(), Any)


@dataclass
class _AsyncPositions(_Positions):
    """The order of the arguments of `AsyncEngineArgs`."""

    __annotations__ = {"engine_use_ray": Any, "disable_log_requests": Any}


@dataclass
class EngineArgs(engine_args.EngineArgs, _Positions):
    """Arguments of an engine: `tpengine.engine_args.EngineArgs`, with the names and the positions
    of vLLM 0.5.4. Each is also a command-line option."""

    worker_use_ray: bool = option(False)
    """Same as --executor ray; with --executor local it is an error."""
    distributed_executor_backend: str | None = option(None, ("ray", "mp"))
    """ray is the same as --executor ray, mp as --executor processes, and with another --executor
    each is an error; default: what --executor says."""
    num_gpu_blocks_override: int | None = option(None, at_least=1)
    """Same as --num-device-blocks-override."""

    max_parallel_loading_workers: int | None = option(None, only_for=NOTHING)
    use_v2_block_manager: bool = option(False, only_for=NOTHING)
    max_seq_len_to_capture: int = option(8192, only_for=NOTHING)
    disable_custom_all_reduce: bool = option(False, only_for=NOTHING)
    tokenizer_pool_size: int = option(0, only_for=NOTHING)
    tokenizer_pool_type: str = option("ray", only_for=NOTHING)
    disable_logprobs_during_spec_decoding: bool | None = option(None, only_for=NOTHING)

    cpu_offload_gb: float = option(0, refused=True)
    """Weights stay on the device; use tensor_parallel_size or quantization."""
    code_revision: str | None = option(None, refused=True)
    """Code is taken from the model's own files; use revision."""
    max_context_len_to_capture: int | None = option(None, refused=True)
    """Decode steps are recorded for any length; use enforce_eager to record none."""
    tokenizer_pool_extra_config: str | None = option(None, refused=True)
    """There is no pool of tokenizers; AsyncLLMEngine has a thread of its own for text."""
    enable_prompt_adapter: bool = option(False, refused=True)
    """There are no prompt adapters; use prompts of text or ids."""
    max_prompt_adapters: int = option(1, refused=True)
    """There are no prompt adapters; use prompts of text or ids."""
    max_prompt_adapter_token: int = option(0, refused=True)
    """There are no prompt adapters; use prompts of text or ids."""
    fully_sharded_loras: bool = option(False, refused=True)
    """Ranks divide A or B as they divide the layer; one of the two is whole."""
    long_lora_scaling_factors: str | None = option(None, refused=True)
    """An adapter makes no context longer; use rope_scaling for all requests."""
    ray_workers_use_nsight: bool = option(False, refused=True)
    """Ranks are not profiled; start a script with one rank under nsys."""
    model_loader_extra_config: str | None = option(None, refused=True)
    """Loading has no further settings; use load_format."""
    guided_decoding_backend: str = option("outlines", refused=True)
    """Llguidance holds every grammar; leave it out."""
    qlora_adapter_name_or_path: str | None = option(None, refused=True)
    """A base of any form takes adapters; use quantization, and a LoRARequest."""
    otlp_traces_endpoint: str | None = option(None, refused=True)
    """There are no traces; use metrics_port of the server or metrics_text()."""
    spec_decoding_acceptance_method: str = option("rejection_sampler", refused=True)
    """A draft counts only if it is the token that is sampled without it; outputs never change."""
    typical_acceptance_sampler_posterior_threshold: float | None = option(None, refused=True)
    """A draft counts only if it is the token that is sampled without it; outputs never change."""
    typical_acceptance_sampler_posterior_alpha: float | None = option(None, refused=True)
    """A draft counts only if it is the token that is sampled without it; outputs never change."""
    _: KW_ONLY
    speculative_config: str | None = option(None, refused=True)
    """Its fields are arguments here; use speculative_model and num_speculative_tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executor == "auto":
            self.executor = self._wanted_executor or "auto"
        if self.num_device_blocks_override is None:
            self.num_device_blocks_override = self.num_gpu_blocks_override

    @property
    def _wanted_executor(self) -> str | None:
        """What `executor` is by vLLM's arguments; None: they do not say."""
        if self.distributed_executor_backend == "mp":
            return "processes"
        return "ray" if self.worker_use_ray or self.distributed_executor_backend else None

    def check(self) -> None:
        """Checks each argument, and the arguments against each other.

        Raises:
            ConfigError: see the message.
        """
        super().check()
        wanted, backend = self._wanted_executor, self.distributed_executor_backend
        if wanted not in (None, self.executor) or (self.worker_use_ray and backend == "mp"):
            raise ConfigError(
                f"executor = {self.executor!r}, worker_use_ray = {self.worker_use_ray} and "
                f"distributed_executor_backend = {backend!r} contradict each other; use executor = "
                f"{wanted!r}, and leave the others out"
            )
        blocks, other_blocks = self.num_device_blocks_override, self.num_gpu_blocks_override
        if other_blocks not in (None, blocks):
            raise ConfigError(
                f"num_device_blocks_override = {blocks} and num_gpu_blocks_override = "
                f"{other_blocks} each set the size of the cache; leave one of them unset"
            )

    def create_engine_config(self, device: str | None = None) -> config.EngineConfig:
        """Names what has no effect, and creates the configuration."""
        if idle := self.changed(only_for=NOTHING):
            logger.warning("tpengine has no such setting: no effect of %s", ", ".join(idle))
        return super().create_engine_config(device)


@dataclass
class AsyncEngineArgs(engine_args.AsyncEngineArgs, EngineArgs, _AsyncPositions):
    """Arguments of an `AsyncLLMEngine`, or of a server's engine."""

    engine_use_ray: bool = option(False, refused=True)
    """The engine runs in a thread of this process; use executor='ray' for ranks on Ray."""

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Adds a command-line option for each field.

        Args:
            async_args_only: leave out those of `EngineArgs`.
        """
        base = {spec.name for spec in fields(EngineArgs)} if async_args_only else set()
        cls._add_options(parser, [spec for spec in fields(cls) if spec.name not in base])
        return parser


aliases.take_over(engine_args, EngineArgs, AsyncEngineArgs)
