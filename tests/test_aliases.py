"""The module paths and names of vLLM 0.5.4 that scripts import, with only its name changed."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.imports import imported

import tpengine
from tpengine import aliases
from tpengine.errors import InvalidPromptError
from tpengine.inputs import LoRARequest

SERVED = {
    "tpengine": (
        "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams RequestOutput "
        "CompletionOutput PromptInputs TextPrompt TokensPrompt __version__"
    ),
    "tpengine.config": "ModelConfig CacheConfig ParallelConfig SchedulerConfig EngineConfig",
    "tpengine.distributed": "destroy_model_parallel destroy_distributed_environment",
    "tpengine.distributed.parallel_state": "destroy_model_parallel destroy_distributed_environment",
    "tpengine.engine.arg_utils": "EngineArgs AsyncEngineArgs nullable_str",
    "tpengine.engine.async_llm_engine": "AsyncLLMEngine AsyncEngineDeadError AsyncStream",
    "tpengine.engine.llm_engine": "LLMEngine",
    "tpengine.engine.metrics": "StatLoggerBase Stats",
    "tpengine.entrypoints.llm": "LLM",
    "tpengine.executor.ray_utils": "ray_is_available",
    "tpengine.inputs": "PromptInputs TextPrompt TokensPrompt",
    "tpengine.inputs.data": "PromptInputs TextPrompt TokensPrompt",
    "tpengine.logger": "init_logger",
    "tpengine.lora.request": "LoRARequest",
    "tpengine.model_executor.parallel_utils.parallel_state": "destroy_model_parallel",
    "tpengine.outputs": "RequestOutput CompletionOutput",
    "tpengine.sampling_params": "SamplingParams SamplingType LogitsProcessor RequestOutputKind",
    "tpengine.sequence": "Logprob PromptLogprobs SampleLogprobs RequestMetrics SequenceStatus",
    "tpengine.transformers_utils.tokenizer": "get_tokenizer get_cached_tokenizer",
    "tpengine.usage.usage_lib": "UsageContext",
    "tpengine.utils": (
        "random_uuid FlexibleArgumentParser Counter get_ip get_open_port merge_async_iterators"
    ),
    "tpengine.version": "__version__",
}
REFUSED = {
    "tpengine": (
        "PoolingParams EmbeddingOutput EmbeddingRequestOutput ModelRegistry initialize_ray_cluster "
        "__commit__"
    ),
    "tpengine.adapter_commons.request": "AdapterRequest",
    "tpengine.config": "DecodingConfig",
    "tpengine.engine.arg_utils": "StoreBoolean",
    "tpengine.engine.metrics": "LoggingStatLogger PrometheusStatLogger",
    "tpengine.executor.ray_utils": "initialize_ray_cluster",
    "tpengine.inputs": "LLMInputs parse_and_batch_prompt INPUT_REGISTRY",
    "tpengine.inputs.data": "LLMInputs parse_and_batch_prompt",
    "tpengine.model_executor.guided_decoding.guided_fields": (
        "GuidedDecodingRequest LLMGuidedOptions"
    ),
    "tpengine.model_executor.layers.quantization": "QUANTIZATION_METHODS",
    "tpengine.model_executor.models": "ModelRegistry",
    "tpengine.model_executor.utils": "set_random_seed",
    "tpengine.multimodal": "MULTIMODAL_REGISTRY MultiModalDataDict",
    "tpengine.outputs": "EmbeddingOutput EmbeddingRequestOutput",
    "tpengine.pooling_params": "PoolingParams",
    "tpengine.prompt_adapter.request": "PromptAdapterRequest",
}


def rows(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(module, name) for module, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), rows(SERVED))
def test_a_name_that_works(module: str, name: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from {module} import {name} as found", found)
    assert found["found"] is getattr(importlib.import_module(module), name)
    assert found["found"] is not None


@pytest.mark.parametrize(("module", "name"), rows(REFUSED))
def test_a_name_that_is_refused(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"^tpengine has no {name}: .* "):
        exec(f"from {module} import {name}", {})


def test_the_tables_are_complete() -> None:
    assert {name for _, name in rows(REFUSED)} == {
        name for names in aliases.REFUSED for name in names.split()
    }
    assert aliases.MODULES.keys() - {*SERVED, *REFUSED} == {
        "tpengine.entrypoints.api_server",
        "tpengine.entrypoints.openai.api_server",
    }


def test_all_names_at_once() -> None:
    found: dict[str, Any] = {}
    exec("from tpengine import *", found)
    assert set(tpengine.__all__) <= found.keys()
    served = SERVED["tpengine"].split()
    assert set(served) <= set(tpengine.__all__)


@pytest.mark.parametrize(
    "statement",
    [
        "import tpengine.nothing",
        "import tpengine.inputs.nothing",
        "from tpengine import nothing",
        "from tpengine.utils import nothing",
        "from tpengine.inputs import nothing",
        "from tpengine.outputs import nothing",
    ],
)
def test_an_unknown_name_is_an_ordinary_error(statement: str) -> None:
    with pytest.raises(ImportError, match="nothing") as raised:
        exec(statement, {})
    assert "tpengine has no" not in str(raised.value)
    assert not hasattr(tpengine, "nothing")


def test_nothing_is_imported_before_it_is_used() -> None:
    paths = [path for path in aliases.MODULES if path != "tpengine.distributed.parallel_state"]
    found = imported(*(f"import {path}" for path in paths))
    assert set(paths) <= found
    assert not {"torch", "transformers", "ray", "argparse", "tpengine.engine_args"} & found


def test_modules_look_like_modules() -> None:
    """Tools walk over all modules of a process and ask them for attributes."""
    module = importlib.import_module("tpengine.utils")
    for name in ("__file__", "__path__", "__wrapped__", "__all__", "_private"):
        assert not hasattr(module, name)
    before = module.Counter
    assert importlib.reload(module).Counter is before
    importlib.reload(tpengine)
    finders = [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path]
    assert finders.count("_Finder") == 1
    assert finders.index("_Finder") > finders.index("PathFinder"), "files come first"


def describe(value: Any) -> str:
    """Runs in a process that has not imported anything."""
    return f"{type(value).__module__}:{value.lora_name}"


def test_objects_reach_other_processes() -> None:
    request = importlib.import_module("tpengine.lora.request").LoRARequest("a", 1, "/folder")
    assert pickle.loads(pickle.dumps(request)) == request
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(describe, (request,)) == "tpengine.inputs:a"


@pytest.mark.parametrize("module", ["api_server", "openai.api_server"])
def test_a_server_of_vllm_is_refused(module: str) -> None:
    command = [sys.executable, "-m", f"tpengine.entrypoints.{module}", "--model", "a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "is no program; `tpengine serve` starts a server" in done.stderr
    assert "Traceback" not in done.stderr


def test_adapters() -> None:
    request = LoRARequest("a", 7, lora_local_path="/folder")
    assert (request.name, request.adapter_id, request.path) == ("a", 7, "/folder")
    assert request.local_path == request.lora_path == "/folder"
    assert {request, LoRARequest("b", 7, "/other")} == {request}
    assert request != LoRARequest("a", 8, "/folder")
    with pytest.raises(InvalidPromptError, match=r"lora_path of 'a' is empty"):
        LoRARequest("a", 7)


def test_counters_and_ids() -> None:
    counter = aliases.Counter()
    assert [next(counter), next(counter)] == [0, 1]
    assert counter.counter == 2
    counter.reset()
    assert next(counter) == 0
    ids = {aliases.random_uuid() for _ in range(9)}
    assert len(ids) == 9
    assert {len(one) for one in ids} == {32}
    assert [aliases.nullable_str(text) for text in ("a", "None", "")] == ["a", None, None]
    assert aliases.UsageContext.LLM_CLASS == "LLM_CLASS"


def test_addresses() -> None:
    socket.inet_aton(aliases.get_ip())
    with socket.socket() as taken:
        taken.bind(("", aliases.get_open_port()))
        port = taken.getsockname()[1]
        assert aliases.get_open_port(port) > port


def test_what_has_no_effect() -> None:
    aliases.destroy_model_parallel()
    aliases.destroy_distributed_environment()
    assert aliases.get_cached_tokenizer("a") == "a"
    assert aliases.ray_is_available()


def test_a_tokenizer_by_its_folder(tmp_path: Path) -> None:
    from tpengine.transformers_utils.tokenizer import get_tokenizer

    from tpengine.config import EMBEDDED_MODEL

    tokenizer = get_tokenizer(EMBEDDED_MODEL, trust_remote_code=False, download_dir=str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.truncation_side == "left"
    assert tokenizer.is_fast


def test_a_parser_takes_underscores() -> None:
    parser = aliases.find_name("tpengine.utils", "FlexibleArgumentParser")(prog="script")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("name")
    given = parser.parse_args(["--max_model_len=5", "a_b"])
    assert (given.max_model_len, given.name) == (5, "a_b")


async def count(number: int, name: str) -> AsyncIterator[str]:
    for index in range(number):
        await asyncio.sleep(0)
        yield f"{name}{index}"


async def fail() -> AsyncIterator[str]:
    raise OSError("on purpose")
    yield


def test_merged_iterators() -> None:
    async def collect(*iterators: AsyncIterator[str]) -> list[tuple[int, str]]:
        return [one async for one in aliases.merge_async_iterators(*iterators)]

    async def leave() -> None:
        merged = aliases.merge_async_iterators(count(9, "a"), count(9, "b"))
        async for _ in merged:
            break
        await merged.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    found = asyncio.run(collect(count(3, "a"), count(0, "b"), count(5, "c")))
    for index, name, number in ((0, "a", 3), (2, "c", 5)):
        assert [item for one, item in found if one == index] == [
            f"{name}{i}" for i in range(number)
        ]
    assert len(found) == 8
    asyncio.run(leave())
    with pytest.raises(OSError, match="on purpose"):
        asyncio.run(collect(count(3, "a"), fail()))
