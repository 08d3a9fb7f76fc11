"""tpengine: a small tensor-parallel inference engine for large language models.

Public names are imported at their first use, so that `import tpengine` is fast and runs before
torch reads its environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpengine.compat import aliases

if TYPE_CHECKING:
    from tpengine.compat.arguments import AsyncEngineArgs, EngineArgs
    from tpengine.compat.engine_names import LLMEngine
    from tpengine.compat.offline import LLM
    from tpengine.compat.online import AsyncLLMEngine
    from tpengine.inputs import (
        BeamSearchParams,
        LoRARequest,
        PoolingParams,
        PromptInputs,
        TextPrompt,
        TokensPrompt,
    )
    from tpengine.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from tpengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "BeamSearchParams", "ClassificationOutput",
    "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
    "EngineArgs", "LLMEngine", "LoRARequest", "Logprob", "PoolingParams", "PoolingRequestOutput",
    "PromptInputs", "RequestOutput", "RequestOutputKind", "SamplingParams", "ScoringOutput",
    "ScoringRequestOutput", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip

_HOMES = {
    "tpengine.async_engine.async_llm_engine": "AsyncLLMEngine",
    "tpengine.engine.llm_engine": "LLMEngine",
    "tpengine.engine_args": "AsyncEngineArgs EngineArgs",
    "tpengine.inputs": (
        "BeamSearchParams LoRARequest PoolingParams PromptInputs TextPrompt TokensPrompt"
    ),
    "tpengine.llm": "LLM",
    "tpengine.outputs": (
        "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput "
        "EmbeddingRequestOutput Logprob PoolingRequestOutput RequestOutput ScoringOutput "
        "ScoringRequestOutput"
    ),
    "tpengine.sampling_params": "RequestOutputKind SamplingParams StructuredOutputsParams",
}

aliases.install()  # before any other file, some of which it adds to
importlib.import_module("tpengine.envs").tune_openmp_spinning()


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    return aliases.find_name("tpengine", name)


def __dir__() -> list[str]:
    return sorted(__all__)
