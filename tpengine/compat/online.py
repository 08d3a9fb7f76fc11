"""`AsyncLLMEngine` with the parameters and the attributes of vLLM 0.5.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tpengine.async_engine import async_llm_engine
from tpengine.compat import aliases
from tpengine.compat.refused import RefusesNames, with_refused_parameters
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError


class AsyncLLMEngine(RefusesNames, async_llm_engine.AsyncLLMEngine):
    __doc__ = async_llm_engine.AsyncLLMEngine.__doc__
    REFUSED: ClassVar[Mapping[str, str]] = {
        "background_loop": "read is_running; the engine has a thread",
        "is_tracing_enabled": "read the metrics of the outputs; there is no tracing",
        "engine_step run_engine_loop": "call health(); the engine's thread runs its steps",
        "get_decoding_config": "leave it out; llguidance holds every grammar",
    }

    def __init__(self, *values: Any, **named: Any) -> None:
        if not callable(values[0] if values else named.get("build")):
            raise ConfigError(
                f"AsyncLLMEngine takes a function that builds the engine, got {values!r} and "
                f"{sorted(named)}; use AsyncLLMEngine.from_engine_args(engine_args)"
            )
        super().__init__(*values, **named)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Self:
        """Builds the engine: see `tpengine.async_engine.async_llm_engine`. `start_engine_loop` has
        no effect, since the engine's thread runs from the start; nor has `usage_context`."""
        return super().from_engine_args(engine_args, stat_loggers=stat_loggers, **named)

    generate = with_refused_parameters(async_llm_engine.AsyncLLMEngine.generate)
    encode = with_refused_parameters(async_llm_engine.AsyncLLMEngine.encode)
    add_request = with_refused_parameters(async_llm_engine.AsyncLLMEngine.add_request)


aliases.take_over(async_llm_engine, AsyncLLMEngine)
