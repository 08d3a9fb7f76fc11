"""`LLMEngine` with the parameters and the attributes of vLLM 0.5.4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

from tpengine.compat import aliases
from tpengine.compat.refused import RefusesNames, with_refused_parameters
from tpengine.config import CacheConfig
from tpengine.engine import llm_engine
from tpengine.engine.stats import StatLoggerBase
from tpengine.engine_args import EngineArgs


class LLMEngine(RefusesNames, llm_engine.LLMEngine):
    __doc__ = llm_engine.LLMEngine.__doc__
    REFUSED: ClassVar[Mapping[str, str]] = {
        "remove_lora pin_lora": "leave it out; slots go to the adapters that requests name",
        "add_prompt_adapter remove_prompt_adapter list_prompt_adapters": "extend the prompt",
        "get_tokenizer_group get_tokenizer_for_seq": "use get_tokenizer",
        "get_decoding_config decoding_config": "leave it out; llguidance holds every grammar",
        "is_tracing_enabled do_tracing create_trace_span": "read the metrics of the outputs",
        "has_unfinished_requests_for_virtual_engine": "use has_unfinished_requests",
        "model_executor stop_remote_worker_execution_loop": "call shutdown() to end the ranks",
        "device_config load_config scheduler": "read the EngineArgs, or call stats()",
    }
    model_config = property(llm_engine.LLMEngine.get_model_config)
    parallel_config = property(llm_engine.LLMEngine.get_parallel_config)
    scheduler_config = property(llm_engine.LLMEngine.get_scheduler_config)
    lora_config = property(llm_engine.LLMEngine.get_lora_config)
    multimodal_config = speculative_config = prompt_adapter_config = None

    @property
    def cache_config(self) -> CacheConfig:
        """The cache's configuration, with the present numbers of blocks."""
        blocks = self._scheduler.block_manager
        on_device, on_host = blocks.num_total_blocks, blocks.host.num_blocks
        return replace(self._config.cache, num_gpu_blocks=on_device, num_cpu_blocks=on_host)

    def get_weights_bytes(self) -> list[int]:
        """Bytes of the weights on each rank."""
        return [ledger.weights_bytes for ledger in self._recovery.ledgers]

    def list_loras(self) -> set[int]:
        """Ids of the adapters that requests named: of each folder the last one."""
        return set(self._adapters.ids)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: Mapping[str, StatLoggerBase] | None = None,
    ) -> Self:
        """Builds an engine; `usage_context` has no effect: usage is reported to no one."""
        return super().from_engine_args(engine_args, stat_loggers=stat_loggers)

    add_request = with_refused_parameters(llm_engine.LLMEngine.add_request)


aliases.take_over(llm_engine, LLMEngine)
