"""tpengine: a small tensor-parallel inference engine for large language models.

Public names are imported at their first use, so that `import tpengine` is fast and runs before
torch reads its environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpengine import envs
from tpengine.compat import aliases

if TYPE_CHECKING:
    from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
    from tpengine.engine.llm_engine import LLMEngine
    from tpengine.engine_args import AsyncEngineArgs, EngineArgs
    from tpengine.inputs import (
        BeamSearchParams,
        LoRARequest,
        PromptInputs,
        TextPrompt,
        TokensPrompt,
    )
    from tpengine.llm import LLM
    from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
    from tpengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PromptInputs",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "tpengine.async_engine.async_llm_engine": "AsyncLLMEngine",
    "tpengine.engine.llm_engine": "LLMEngine",
    "tpengine.engine_args": "AsyncEngineArgs EngineArgs",
    "tpengine.inputs": "BeamSearchParams LoRARequest PromptInputs TextPrompt TokensPrompt",
    "tpengine.llm": "LLM",
    "tpengine.outputs": "CompletionOutput Logprob RequestOutput",
    "tpengine.sampling_params": "RequestOutputKind SamplingParams StructuredOutputsParams",
}

envs.tune_openmp_spinning()
aliases.install()


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    return aliases.find_name("tpengine", name)


def __dir__() -> list[str]:
    return sorted(__all__)
