"""The names and module paths of vLLM 0.5.4 that scripts import, and what they mean here.

A script of that time changes only `vllm` into `tpengine` in its imports. `MODULES` lists the paths,
and `REFUSED` the names that tpengine has nothing for: importing one raises an ImportError that says
what to use, and `hasattr` is False for it.

A path that is no file here is served by a finder at the end of `sys.meta_path`, which Python asks
about modules that no other finder knows. A file of ours whose path is in `MODULES` calls
`add_names`. Nothing is imported before it is used. The second half of this file holds small things
that only such scripts need.

A refused name is a missing attribute, and `from tpengine import PoolingParams` would drop the text
of that AttributeError. But Python first asks the finder for a module of this name, as it does below
every module with a `__path__`, and the finder raises the ImportError.
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

MODULES = {
    "tpengine": "",
    "tpengine.adapter_commons.request": "",
    "tpengine.config": "",
    "tpengine.distributed": "tpengine.compat.aliases",
    "tpengine.distributed.parallel_state": "tpengine.compat.aliases",
    "tpengine.engine.arg_utils": "tpengine.engine_args tpengine.compat.aliases",
    "tpengine.engine.async_llm_engine": "tpengine.async_engine.async_llm_engine tpengine.errors",
    "tpengine.engine.metrics": "tpengine.engine.stats",
    "tpengine.entrypoints.api_server": "",
    "tpengine.entrypoints.llm": "tpengine.llm",
    "tpengine.entrypoints.openai.api_server": "",
    "tpengine.executor.ray_utils": "",
    "tpengine.inputs": "",
    "tpengine.inputs.data": "tpengine.inputs",
    "tpengine.lora.request": "tpengine.inputs",
    "tpengine.model_executor.guided_decoding.guided_fields": "tpengine.compat.guided",
    "tpengine.model_executor.layers.quantization": "",
    "tpengine.model_executor.models": "",
    "tpengine.model_executor.parallel_utils.parallel_state": "tpengine.compat.aliases",
    "tpengine.model_executor.utils": "",
    "tpengine.multimodal": "",
    "tpengine.outputs": "",
    "tpengine.pooling_params": "",
    "tpengine.prompt_adapter.request": "",
    "tpengine.sampling_params": "tpengine.inputs tpengine.compat.guided",
    "tpengine.sequence": "tpengine.outputs",
    "tpengine.transformers_utils.tokenizer": "tpengine.engine.tokenizer",
    "tpengine.usage.usage_lib": "tpengine.compat.aliases",
    "tpengine.utils": "tpengine.compat.aliases tpengine.cli.parser",
    "tpengine.version": "tpengine",
}
"""Module of vLLM, with its first word changed: modules of ours that have its names."""

REFUSED = {
    "AdapterRequest": "import LoRARequest, which has no base class",
    "DecodingConfig": "leave it out; llguidance holds every grammar",
    "EmbeddingOutput EmbeddingRequestOutput PoolingParams": (
        "no embedding models are served; use generate"
    ),
    "INPUT_REGISTRY MULTIMODAL_REGISTRY MultiModalDataDict": "prompts are text or ids; give those",
    "LLMInputs parse_and_batch_prompt": "it is internal to vLLM; give prompts as PromptInputs",
    "SequenceGroup attention core is_cpu": "it is internal to vLLM; use LLMEngine and EngineArgs",
    "protocol serving_chat": "there is no HTTP server yet; `tpengine serve` speaks gRPC",
    "LoggingStatLogger": "leave it out; without disable_log_stats the engine logs itself",
    "ModelRegistry": "read docs/models.md, which lists the architectures and says how to add one",
    "PrometheusStatLogger": "use AsyncLLMEngine.metrics_text() or `tpengine serve --metrics-port`",
    "PromptAdapterRequest": "no prompt adapters are served; put the instruction into the prompt",
    "QUANTIZATION_METHODS": "run `tpengine serve --help`, which lists what --quantization takes",
    "StoreBoolean": "use argparse.BooleanOptionalAction",
    "__commit__": "use __version__",
    "get_cached_tokenizer": "use the tokenizer itself; there is nothing to cache",
    "get_ip": "use ray.util.get_node_ip_address() or the socket module",
    "get_open_port": "bind a socket to port 0, and read getsockname()",
    "initialize_ray_cluster": "use EngineArgs.ray_address; the engine connects to Ray itself",
    "merge_async_iterators": "read the iterators in tasks that share an asyncio.Queue",
    "ray_is_available": "use importlib.util.find_spec('ray')",
    "set_random_seed": "set seed in EngineArgs; requests use no global random numbers",
}
"""Names: why they cannot be imported, and what to use."""

_REASONS = {name: reason for names, reason in REFUSED.items() for name in names.split()}
_PATHS = {path.rsplit(".", depth)[0] for path in MODULES for depth in range(path.count(".") + 1)}
"""The paths in `MODULES` and those above them; all have a `__path__`."""


def find_name(module: str, name: str) -> Any:
    """Returns what a name means in a module of `MODULES`; this is the module's `__getattr__`.

    Raises:
        AttributeError: the module has no such name; of a refused one the message says what to use.
    """
    if name in _REASONS:
        raise AttributeError(f"tpengine has no {name}: {_REASONS[name]}")
    # Python itself asks for __path__, __file__ and the like; our own private names are no aliases.
    if name == "__version__" or not name.startswith("_"):
        for place in MODULES.get(module, "").split():
            found = vars(importlib.import_module(place))
            if name in found:
                return found[name]
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def add_names(module_name: str) -> None:
    """Makes a module serve the names that vLLM has in it, besides those that it defines itself.

    It sets `__getattr__` from outside, so that type checkers still find a wrong name of ours.
    """
    module = sys.modules[module_name]
    vars(module)["__getattr__"] = partial(find_name, module_name)
    vars(module).setdefault("__path__", [])


class _Finder:
    """Finder and loader of the modules in `MODULES` that are no files."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module, or of a package around one; None: an unknown name.

        Raises:
            ImportError: the name is refused; the message says what to use.
        """
        parent, _, name = fullname.rpartition(".")
        if parent in _PATHS and name in _REASONS:
            raise ImportError(f"tpengine has no {name}: {_REASONS[name]}", name=fullname)
        loader: Any = self
        return ModuleSpec(fullname, loader) if fullname in _PATHS else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Gives a new module its names."""
        add_names(module.__name__)

    def get_code(self, fullname: str) -> NoReturn:
        """Refuses `python -m`.

        Raises:
            ImportError: always.
        """
        raise ImportError(f"{fullname} is no program; `tpengine serve` starts a server")


_FINDER = _Finder()


def install() -> None:
    """Installs the finder, once in a process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


class UsageContext(enum.StrEnum):
    """From where an engine is used. It has no effect: tpengine reports usage to no one."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter:
    """Counts 0, 1, 2 and so on by `next`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Begins with 0 again."""
        self.counter = 0


def random_uuid() -> str:
    """Returns 32 random hexadecimal digits, for the id of a request."""
    return os.urandom(16).hex()


def nullable_str(val: str) -> str | None:
    """Returns the value of an option; None for `None` and for no text."""
    return None if val in ("", "None") else val


def destroy_model_parallel() -> None:
    """Has no effect: no state of ranks is global. `LLM.shutdown` ends an engine's ranks."""


destroy_distributed_environment = destroy_model_parallel
