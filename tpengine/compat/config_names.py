"""The configurations with the names that vLLM 0.5.4 has for what is in them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from tpengine import config
from tpengine.compat import aliases


def _getter(name: str) -> Callable[..., Any]:
    """A method that returns an attribute."""
    return lambda own: getattr(own, name)


class ModelConfig(config.ModelConfig):
    """`tpengine.config.ModelConfig`."""

    get_vocab_size, get_hidden_size = _getter("vocab_size"), _getter("hidden_size")
    embedding_mode = property(lambda own: own.pooling is not None)
    get_head_size, get_total_num_kv_heads = _getter("head_dim"), _getter("total_num_kv_heads")

    def get_num_kv_heads(self, parallel_config: config.ParallelConfig) -> int:
        """Key and value heads of a rank; ranks share one if there are more ranks than heads."""
        return max(1, self.total_num_kv_heads // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: config.ParallelConfig) -> int:
        """Query heads of a rank."""
        return self.total_num_heads // parallel_config.tensor_parallel_size

    def get_num_layers(self, parallel_config: config.ParallelConfig) -> int:
        """Layers of a stage, if all have the same number."""
        return self.num_layers // parallel_config.pipeline_parallel_size


class CacheConfig(config.CacheConfig):
    """`tpengine.config.CacheConfig`."""

    cache_dtype = property(attrgetter("kv_cache_dtype"))
    num_gpu_blocks_override = property(attrgetter("num_device_blocks_override"))


class ParallelConfig(config.ParallelConfig):
    """`tpengine.config.ParallelConfig`."""

    @property
    def distributed_executor_backend(self) -> str | None:
        """ray, mp or None."""
        return "ray" if self.ray is not None else None if self.ranks is None else "mp"


class SchedulerConfig(config.SchedulerConfig):
    """`tpengine.config.SchedulerConfig`."""

    chunked_prefill_enabled = property(attrgetter("enable_chunked_prefill"))
    num_lookahead_slots = 0


class EngineConfig(config.EngineConfig):
    """`tpengine.config.EngineConfig`."""

    model_config = property(attrgetter("model"))
    cache_config = property(attrgetter("cache"))
    parallel_config = property(attrgetter("parallel"))
    scheduler_config = property(attrgetter("scheduler"))
    lora_config = property(attrgetter("lora"))


aliases.take_over(config, ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig, EngineConfig)
