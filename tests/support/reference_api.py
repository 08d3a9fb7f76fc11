"""Writes the public API of vLLM 0.5.4, as names, order and defaults, into a JSON file.

The package is read with `ast` and never imported. Types, defaults and values are kept as source
text; no docstring, help text or message is.

    python tests/support/reference_api.py UNPACKED_WHEEL/vllm

The file, `tests/reference/vllm_0_5_4.json`, has for each module and each of its names:
    kind: class, dataclass, enum, function, value or import; null: 0.5.4 has no such name.
    bases: of a class, with keywords such as `total=False`.
    fields: of a class: name -> [type, default]; null is no type or no default.
    attributes: of a class: names that `__init__` sets on `self`.
    methods: of a class: public methods and `__init__`, without `self` and `cls`.
    flags: of a class with `add_cli_args`: option -> the arguments of `add_argument`.
    parameters: name -> [type, default], with the marks of a signature: parameters before "/" are
        positional only, those after "*" or "*args" keyword only.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "reference" / "vllm_0_5_4.json"
Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = """
vllm: __all__ LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams PoolingParams
vllm: RequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput PromptInputs TextPrompt
vllm: TokensPrompt ModelRegistry initialize_ray_cluster __version__ __commit__
vllm.adapter_commons.request: AdapterRequest
vllm.config: ModelConfig CacheConfig ParallelConfig SchedulerConfig DecodingConfig EngineConfig
vllm.distributed: destroy_model_parallel destroy_distributed_environment
vllm.distributed.parallel_state: destroy_model_parallel destroy_distributed_environment
vllm.engine.arg_utils: EngineArgs AsyncEngineArgs nullable_str StoreBoolean
vllm.engine.async_llm_engine: AsyncLLMEngine AsyncEngineDeadError AsyncStream
vllm.engine.llm_engine: LLMEngine
vllm.engine.metrics: StatLoggerBase LoggingStatLogger PrometheusStatLogger Stats
vllm.entrypoints.llm: LLM
vllm.executor.ray_utils: initialize_ray_cluster ray_is_available
vllm.inputs: PromptInputs TextPrompt TokensPrompt LLMInputs parse_and_batch_prompt INPUT_REGISTRY
vllm.inputs.data: PromptInputs TextPrompt TokensPrompt LLMInputs parse_and_batch_prompt
vllm.logger: init_logger
vllm.lora.request: LoRARequest
vllm.model_executor.guided_decoding.guided_fields: GuidedDecodingRequest LLMGuidedOptions
vllm.model_executor.layers.quantization: QUANTIZATION_METHODS
vllm.model_executor.models: ModelRegistry
vllm.model_executor.utils: set_random_seed
vllm.multimodal: MULTIMODAL_REGISTRY MultiModalDataDict
vllm.outputs: RequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput
vllm.pooling_params: PoolingParams
vllm.prompt_adapter.request: PromptAdapterRequest
vllm.sampling_params: SamplingParams SamplingType LogitsProcessor RequestOutputKind
vllm.sequence: Logprob PromptLogprobs SampleLogprobs RequestMetrics SequenceStatus
vllm.transformers_utils.tokenizer: get_tokenizer get_cached_tokenizer
vllm.usage.usage_lib: UsageContext
vllm.utils: random_uuid FlexibleArgumentParser Counter get_ip get_open_port merge_async_iterators
vllm.version: __version__
"""
"""Modules that users' scripts import, and the names that they use."""


def read(package: Path, module: str) -> dict[str, ast.stmt]:
    """Returns the statements at a module's top by the names that they define or import."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path_of(package, module).read_text()).body:
        names: Iterable[str] = names_of(node)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names = read(package, source(node, package, module))
        found |= dict.fromkeys(names, node)
    return found


def path_of(package: Path, module: str) -> Path:
    """The file of a module."""
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source(node: ast.ImportFrom, package: Path, module: str) -> str:
    """The full name of the module that a statement of `module` imports from."""
    if not node.level:
        return str(node.module)
    is_package = path_of(package, module).name == "__init__.py"
    parents = module.split(".")
    return ".".join([*parents[: len(parents) - node.level + is_package], str(node.module)])


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines; overloads of a function define none."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [] if "overload" in decorators(node) else [node.name]
        case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(name)):
            return [name]
        case ast.Assign(targets=[ast.Name(name)]):
            return [name]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
    return []


def decorators(node: ast.ClassDef | Function) -> list[str]:
    """Names of the decorators, without their arguments."""
    return [ast.unparse(one).partition("(")[0] for one in node.decorator_list]


def text_of(node: ast.expr | None) -> str | None:
    """An expression as normalised source text."""
    return None if node is None else ast.unparse(node)


def facts(node: ast.stmt | None, package: Path, module: str) -> dict[str, Any] | None:
    """What is known of a name at a module's top; None: there is no such name."""
    match node:
        case ast.ClassDef():
            return class_facts(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return function_facts(node, "function")
        case ast.ImportFrom():
            return {"kind": "import", "from": source(node, package, module)}
        case ast.Assign() | ast.AnnAssign():
            return {"kind": "value", "value": text_of(node.value)}
    return None


def class_facts(node: ast.ClassDef) -> dict[str, Any]:
    """What the file says of a class."""
    bases = [ast.unparse(one) for one in [*node.bases, *node.keywords]]
    is_enum = any(one.endswith("Enum") for one in bases)
    kind = "dataclass" if "dataclass" in decorators(node) else "enum" if is_enum else "class"
    parts: dict[str, Any] = {"fields": {}, "attributes": [], "methods": {}, "flags": {}}
    for part in node.body:
        match part:
            case ast.AnnAssign(target=ast.Name(name)) if not name.startswith("_"):
                parts["fields"][name] = [ast.unparse(part.annotation), text_of(part.value)]
            case ast.Assign(targets=[ast.Name(name)]) if is_enum:
                parts["fields"][name] = [None, text_of(part.value)]
            case ast.FunctionDef() | ast.AsyncFunctionDef() if is_public(part):
                parts["methods"][part.name] = function_facts(part, "method")
                if part.name == "__init__":
                    parts["attributes"] = attributes_of(part)
                elif part.name == "add_cli_args":
                    parts["flags"] = flags_of(part, parts["fields"])
    return {"kind": kind, "bases": bases} | {name: part for name, part in parts.items() if part}


def is_public(node: Function) -> bool:
    """Whether a method is part of the API, and neither an overload nor the setter of a property."""
    has_mark = any(one == "overload" or one.endswith(".setter") for one in decorators(node))
    return not has_mark and (node.name == "__init__" or not node.name.startswith("_"))


def attributes_of(init: Function) -> list[str]:
    """Public names that `__init__` sets on `self`, in order."""
    nodes = [one for one in ast.walk(init) if isinstance(one, ast.Attribute)]
    nodes = [one for one in nodes if isinstance(one.ctx, ast.Store)]
    texts = [ast.unparse(one) for one in sorted(nodes, key=lambda one: one.lineno)]
    names = [one.removeprefix("self.") for one in texts if one.startswith("self.")]
    return [one for one in dict.fromkeys(names) if one.isidentifier() and one[0] != "_"]


def function_facts(node: Function, kind: str) -> dict[str, Any]:
    """What the file says of a function or method."""
    known = ("classmethod", "staticmethod", "property", "cached_property", "contextmanager")
    words = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    words += ["generator"] if any(isinstance(one, ast.Yield) for one in ast.walk(node)) else []
    words += [one for one in decorators(node) if one in known] or [kind]
    parameters = dict(parameters_of(node.args))
    if kind == "method" and "staticmethod" not in words:
        del parameters[next(iter(parameters))]  # self or cls
    found = {"kind": " ".join(words), "returns": text_of(node.returns)}
    return found | ({"parameters": parameters} if parameters else {})


def parameters_of(args: ast.arguments) -> Iterator[tuple[str, list[str | None]]]:
    """Yields parameters and marks in the order of the signature."""
    by_position = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(by_position) - len(args.defaults)) + list(args.defaults)
    for index, (one, default) in enumerate(zip(by_position, defaults, strict=True)):
        yield one.arg, [text_of(one.annotation), text_of(default)]
        if index == len(args.posonlyargs) - 1:
            yield "/", []
    if args.vararg or args.kwonlyargs:
        yield "*" + (args.vararg.arg if args.vararg else ""), []
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield one.arg, [text_of(one.annotation), text_of(default)]
    if args.kwarg:
        yield "**" + args.kwarg.arg, []


def flags_of(node: Function, fields: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The options, by their names; a default `EngineArgs.x` is replaced by that of the field x."""
    found = {}
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    for call in sorted(calls, key=lambda one: one.lineno):
        if ast.unparse(call.func) == "parser.add_argument":
            told = {str(one.arg): ast.unparse(one.value) for one in call.keywords}
            told.pop("help", None)
            default = told.get("default", "")
            if default.startswith("EngineArgs."):
                told["default"] = fields[default.removeprefix("EngineArgs.")][1]
            found[" ".join(ast.literal_eval(one) for one in call.args)] = told
    return found


def collect(package: Path) -> dict[str, Any]:
    """All modules of the file; see the docstring at the top."""
    modules: dict[str, dict[str, Any]] = {}
    for line in MODULES.strip().splitlines():
        module, names = line.split(": ")
        known, found = read(package, module), modules.setdefault(module, {})
        found |= {one: facts(known.get(one), package, module) for one in names.split()}
    return modules


def to_text(value: Any, indent: str = "") -> str:
    """JSON with one entry a line: a table or list that holds no other is written in one line."""
    if not isinstance(value, dict) or not any(isinstance(v, dict | list) for v in value.values()):
        return json.dumps(value)
    deeper = indent + " "
    entries = [f"{deeper}{json.dumps(name)}: {to_text(v, deeper)}" for name, v in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path, help="folder vllm/ of an unpacked wheel")
    modules = collect(parser.parse_args().package.resolve())
    TARGET.write_text(to_text(modules) + "\n")
    num_names = sum(map(len, modules.values()))
    print(f"{TARGET}: {num_names} names in {len(modules)} modules, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
