"""tpengine: a small tensor-parallel inference engine for large language models.

Public names are imported at their first use, so that `import tpengine` is fast and runs before
torch reads its environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpengine import aliases, envs

if TYPE_CHECKING:
    from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
    from tpengine.engine.llm_engine import LLMEngine
    from tpengine.engine_args import AsyncEngineArgs, EngineArgs
    from tpengine.inputs import PromptInputs, TextPrompt, TokensPrompt
    from tpengine.llm import LLM
    from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
    from tpengine.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PromptInputs",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "tpengine.llm",
    "AsyncEngineArgs": "tpengine.engine_args",
    "AsyncLLMEngine": "tpengine.async_engine.async_llm_engine",
    "LLMEngine": "tpengine.engine.llm_engine",
    "EngineArgs": "tpengine.engine_args",
    "PromptInputs": "tpengine.inputs",
    "SamplingParams": "tpengine.sampling_params",
    "RequestOutputKind": "tpengine.sampling_params",
    "RequestOutput": "tpengine.outputs",
    "CompletionOutput": "tpengine.outputs",
    "Logprob": "tpengine.outputs",
    "TextPrompt": "tpengine.inputs",
    "TokensPrompt": "tpengine.inputs",
}

envs.tune_openmp_spinning()
aliases.install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return aliases.find_name("tpengine", name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
