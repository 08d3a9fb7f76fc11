"""The module paths and names of vLLM 0.5.4 that scripts import, with only its name changed."""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import imported, python

import tpengine
from tpengine import inputs
from tpengine.compat import aliases
from tpengine.errors import InvalidPromptError
from tpengine.inputs import LoRARequest

REFERENCE = json.loads((Path(__file__).parent / "reference" / "vllm_0_5_4.json").read_text())
OLDER_OR_PROGRAMS = {
    "tpengine.entrypoints.api_server",
    "tpengine.entrypoints.openai.api_server",
    "tpengine.model_executor.parallel_utils.parallel_state",
}

INTERNAL = {"SequenceGroup", "attention", "core", "is_cpu", "protocol", "serving_chat"}


def test_the_tables_have_only_names_that_test_vllm_compares() -> None:
    modules = {path.replace("vllm", "tpengine", 1) for path in REFERENCE}
    assert aliases.MODULES.keys() - modules == OLDER_OR_PROGRAMS
    refused = {name for names in aliases.REFUSED for name in names.split()}
    assert refused - {name for names in REFERENCE.values() for name in names} == INTERNAL


def test_paths_before_and_after_0_5_4() -> None:
    from tpengine.model_executor.parallel_utils.parallel_state import destroy_model_parallel
    from tpengine.pooling_params import PoolingParams

    from tpengine.sampling_params import BeamSearchParams

    assert PoolingParams is inputs.PoolingParams is tpengine.PoolingParams
    assert destroy_model_parallel is aliases.destroy_model_parallel
    assert BeamSearchParams is inputs.BeamSearchParams is tpengine.BeamSearchParams


IN_THEIR_PLACES = """
import importlib
import tpengine.compat.online, tpengine.compat.arguments  # before the files that they stand on
from tpengine import llm
from tpengine.async_engine import async_llm_engine
from tpengine.compat.aliases import ROOF
from tpengine.engine import llm_engine
for ours, roof in ROOF.items():
    ours, roof = vars(importlib.import_module(ours)), vars(importlib.import_module(roof))
    own = [one for one in roof.values() if getattr(one, "__module__", "") == roof["__name__"]]
    over = [one for one in own if one.__name__ in ours]
    assert over and all(ours[one.__name__] is one for one in over), roof["__name__"]
assert llm.LLMEngine is async_llm_engine.LLMEngine is llm_engine.LLMEngine
assert llm.EngineArgs is llm_engine.EngineArgs
"""


def test_classes_of_the_roof_are_those_that_everything_imports() -> None:
    python("-c", IN_THEIR_PLACES)


def test_all_names_at_once() -> None:
    names: dict[str, Any] = {}
    exec("from tpengine import *", names)
    assert set(tpengine.__all__) <= names.keys()
    assert {"LLM", "LLMEngine", "AsyncLLMEngine", "SamplingParams"} <= set(tpengine.__all__)


REGISTRY = r"tpengine has no ModelRegistry: read docs/models.md"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("import tpengine.nothing", "^(?!tpengine has no).*nothing"),
        ("import tpengine.inputs.nothing", "^(?!tpengine has no).*nothing"),
        ("from tpengine import nothing", "^(?!tpengine has no).*nothing"),
        ("from tpengine.utils import nothing", "^(?!tpengine has no).*nothing"),
        ("from tpengine.outputs import nothing", "^(?!tpengine has no).*nothing"),
        ("from tpengine import ModelRegistry", REGISTRY),
        ("from tpengine.model_executor.models import ModelRegistry", REGISTRY),
        ("from tpengine.core.scheduler import x", r"tpengine has no \w+: .* internal"),
        ("from tpengine.entrypoints.openai.protocol import x", "has no .* internal.* --http-port"),
    ],
)
def test_names_that_are_not_there(statement: str, words: str) -> None:
    """A name of vLLM says why; any other is an ordinary error."""
    with pytest.raises(ImportError, match=words):
        exec(statement, {})
    assert not hasattr(tpengine, "nothing")
    assert not hasattr(tpengine, "ModelRegistry")


def test_nothing_is_imported_before_it_is_used() -> None:
    paths = [path for path in aliases.MODULES if path != "tpengine.distributed.parallel_state"]
    modules = imported(*(f"import {path}" for path in paths))
    assert set(paths) <= modules
    assert not {"torch", "transformers", "ray", "argparse", "tpengine.engine_args"} & modules


def test_modules_look_like_modules() -> None:
    """Tools walk over all modules of a process and ask them for attributes."""
    module = importlib.import_module("tpengine.utils")
    for name in ("__file__", "__wrapped__", "__all__", "_FINDER"):
        assert not hasattr(module, name)
    before = module.Counter
    assert importlib.reload(module).Counter is before
    importlib.reload(tpengine)
    finders = [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
    assert finders.count("_Finder") == 1
    assert inspect.getsourcefile(tpengine.config) == tpengine.config.__file__, "files come first"


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
    done = python("-m", f"tpengine.entrypoints.{module}", "--model", "a", code=1)
    assert "is no program; `tpengine serve --http-port 8000` serves" in done.stderr
    assert "Traceback" not in done.stderr


def test_adapters() -> None:
    request = LoRARequest("a", 7, lora_local_path="/folder")
    assert (request.name, request.adapter_id, request.path) == ("a", 7, "/folder")
    assert request.local_path == request.lora_path == "/folder"
    assert {request, LoRARequest("b", 7, "/other")} == {request}
    assert request != LoRARequest("a", 8, "/folder")
    with pytest.raises(InvalidPromptError, match=r"lora_path of 'a' must name its folder"):
        LoRARequest("a", 7)


def test_counters_and_ids() -> None:
    counter = aliases.Counter()
    assert [next(counter), next(counter)] == [0, 1]
    assert counter.counter == 2
    counter.reset()
    assert next(counter) == 0
    ids = {aliases.random_uuid() for _ in range(9)}
    assert len(ids) == 9
    assert {len(answer) for answer in ids} == {32}
    assert [aliases.nullable_str(text) for text in ("a", "None", "")] == ["a", None, None]
    assert aliases.UsageContext.LLM_CLASS == "LLM_CLASS"


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
    args = parser.parse_args(["--max_model_len=5", "a_b"])
    assert (args.max_model_len, args.name) == (5, "a_b")
