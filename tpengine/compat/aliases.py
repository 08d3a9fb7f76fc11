"""The names and module paths of vLLM 0.5.4 that scripts import, and what they mean here.

A script of that time changes only `vllm` into `tpengine` in its imports. Nothing below `compat/`
knows of this: `tpengine/__init__.py` installs a finder, which Python asks about every module.

- `MODULES` lists vLLM's paths. A path that is no file here becomes a module with the names that the
  table gives it; a file of ours whose path is in the table gets them besides its own.
- `ROOF` lists files of ours whose classes vLLM's have more to them: arguments, methods, attributes.
  The class of the roof is derived from ours, and takes its name over when our file is imported.
- `REFUSED` lists names that tpengine has nothing for: importing one raises an ImportError that says
  what to use, and `hasattr` is False for it.

Nothing is imported before it is used. The second half of this file holds small things that only
such scripts need.

A refused name is a missing attribute, and `from tpengine import ModelRegistry` would drop the text
of that AttributeError. But Python first asks the finder for a module of this name, as it does below
every module with a `__path__`, and the finder raises the ImportError.
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_WITHOUT_NAMES = """
    tpengine tpengine.adapter_commons.request tpengine.config tpengine.entrypoints.api_server
    tpengine.entrypoints.openai.api_server tpengine.executor.ray_utils tpengine.inputs
    tpengine.model_executor.layers.quantization tpengine.model_executor.models
    tpengine.model_executor.utils tpengine.multimodal tpengine.outputs
    tpengine.prompt_adapter.request
"""
"""Modules of vLLM that have no names here but those of our file of that path, if there is one."""

MODULES = dict.fromkeys(_WITHOUT_NAMES.split(), "") | {
    "tpengine.distributed": "tpengine.compat.aliases",
    "tpengine.distributed.parallel_state": "tpengine.compat.aliases",
    "tpengine.engine.arg_utils": "tpengine.engine_args tpengine.compat.aliases",
    "tpengine.engine.async_llm_engine": "tpengine.async_engine.async_llm_engine tpengine.errors",
    "tpengine.engine.metrics": "tpengine.engine.stats",
    "tpengine.entrypoints.llm": "tpengine.llm",
    "tpengine.inputs.data": "tpengine.inputs",
    "tpengine.lora.request": "tpengine.inputs",
    "tpengine.model_executor.guided_decoding.guided_fields": "tpengine.compat.guided",
    "tpengine.model_executor.parallel_utils.parallel_state": "tpengine.compat.aliases",
    "tpengine.pooling_params": "tpengine.inputs",
    "tpengine.sampling_params": "tpengine.inputs tpengine.compat.guided",
    "tpengine.sequence": "tpengine.scheduling.sequence tpengine.outputs",
    "tpengine.transformers_utils.tokenizer": "tpengine.engine.tokenizer",
    "tpengine.usage.usage_lib": "tpengine.compat.aliases",
    "tpengine.utils": "tpengine.compat.aliases tpengine.cli.parser",
    "tpengine.version": "tpengine",
}
"""Module of vLLM, with its first word changed: modules of ours that have its names."""

ROOF = {
    "tpengine.async_engine.async_llm_engine": "tpengine.compat.online",
    "tpengine.config": "tpengine.compat.config_names",
    "tpengine.engine.llm_engine": "tpengine.compat.engine_names",
    "tpengine.engine_args": "tpengine.compat.arguments",
    "tpengine.llm": "tpengine.compat.offline",
}
"""File of ours: the file whose classes take over the names of its classes. It imports nothing that
imports this file of ours: that would still get the class below the roof."""

REFUSED = {
    "AdapterRequest": "import LoRARequest, which has no base class",
    "DecodingConfig": "leave it out; llguidance holds every grammar",
    "INPUT_REGISTRY MULTIMODAL_REGISTRY MultiModalDataDict": "prompts are text or ids; give those",
    "LLMInputs parse_and_batch_prompt": "it is internal to vLLM; give prompts as PromptInputs",
    "SequenceGroup attention core is_cpu": "it is internal to vLLM; use LLMEngine and EngineArgs",
    "protocol serving_chat": (
        "it is internal to vLLM; `tpengine serve --http-port` serves OpenAI's HTTP"
    ),
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
            names = vars(importlib.import_module(place))
            if name in names:
                return names[name]
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def add_names(module: ModuleType) -> None:
    """Makes a module serve the names that vLLM has in it, besides those that it defines itself.

    It sets `__getattr__` from outside, so that type checkers still find a wrong name of ours.
    """
    vars(module).setdefault("__getattr__", partial(find_name, module.__name__))
    vars(module).setdefault("__path__", [])


def take_over(module: ModuleType, *classes: type) -> None:
    """Puts classes of the roof in the place of the classes of the same names in a file of ours."""
    vars(module).update({each.__name__: each for each in classes})


class _FileLoader:
    """Loader of a file of ours that gets names or classes of vLLM's: around the file's own loader,
    which an editable install chooses."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the file, and adds to its module what `MODULES` and `ROOF` say."""
        self._inner.exec_module(module)
        if module.__name__ in MODULES:
            add_names(module)
        if module.__name__ in ROOF:
            importlib.import_module(ROOF[module.__name__])


class _Finder(MetaPathFinder, Loader):
    """Finder of the modules in the tables, and loader of those that are no files."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in the tables, or of a package around one; None: it is no
        affair of this finder.

        Raises:
            ImportError: the name is refused; the message says what to use.
        """
        parent, _, name = fullname.rpartition(".")
        is_refused = parent in _PATHS and name in _REASONS
        if not is_refused and fullname not in _PATHS and fullname not in ROOF:
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self)
        specs = (find(fullname, path, target) for find in others)
        if (spec := next(filter(None, specs), None)) is not None:
            loader: Any = _FileLoader(spec.loader)
            spec.loader = loader
            return spec
        if is_refused:
            raise ImportError(f"tpengine has no {name}: {_REASONS[name]}", name=fullname)
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Gives a new module its names."""
        add_names(module)

    def get_code(self, fullname: str) -> NoReturn:
        """Refuses `python -m`.

        Raises:
            ImportError: always.
        """
        raise ImportError(
            f"{fullname} is no program; `tpengine serve --http-port 8000` serves OpenAI's HTTP"
        )


_FINDER = _Finder()


def install() -> None:
    """Installs the finder, once in a process. It stands first, since it also serves files."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class UsageContext(enum.StrEnum):
    """From where an engine is used. It has no effect: tpengine reports usage to no one."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter(Iterator[int]):
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
