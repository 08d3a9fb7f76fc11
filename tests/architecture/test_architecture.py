"""The rules of the house that a machine can check: who imports whom, and how long things get."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tpengine"

MAX_FUNCTION_LINES = 60
MAX_ROOT_FILES = 14
VAGUE_NAMES = {"one", "given", "found", "about", "told"}
"""They say what happened to a value, but not what it is."""

# Budgets. A commit that raises one says what the lines buy.
MAX_PACKAGE_LINES = 36_315
"""Lines of code of the package, without docstrings, comments, blank lines and generated stubs."""
MAX_NATIVE_LINES = 9_060
"""Lines of C++ and CUDA in csrc/, without blank lines and comments."""
MAX_CORE_LINES = 6_500
"""Lines of code of the files that docs/reading.md lists: `LLM.generate` on one device."""
MAX_TEST_LINES = 42_846
"""Lines of code of tests/."""

# room: rooms that it may import, besides itself and the files at the package's root
ALLOWED_ROOMS: dict[str, set[str]] = {
    "server": {"async_engine", "engine", "scheduling", "checkpoint", "structured", "proto"},
    "client": {"proto"},
    "proto": set(),
    "async_engine": {"engine", "scheduling", "executor"},
    "engine": {"scheduling", "executor", "checkpoint", "structured", "pictures"},
    "scheduling": set(),
    "executor": {"worker", "checkpoint", "structured"},
    "worker": {"checkpoint", "structured", "models", "layers", "ops", "distributed"},
    "checkpoint": {"models", "layers", "ops", "distributed"},
    "structured": {"layers"},
    "pictures": set(),
    "models": {"layers", "ops", "distributed"},
    "layers": {"ops", "distributed"},
    "ops": set(),
    "distributed": {"ops"},  # it holds the native side of collectives over shared memory
}
ROOT_IMPORTS = {"engine_args": {"checkpoint"}}
"""Files at the root use only each other, but for these: an engine's configuration is made from
what the model's folder says."""
ON_TOP = {"llm", "cli", "compat", "__init__", "__main__"}
"""They may import every room, and no room may import them."""
EXEMPT = {"bench"}
# foreign package: places that may import it
HOMES = {
    "ray": {"executor/launch"},
    "grpc": {"server", "client", "proto"},
    "grpc_tools": {"server/grpc"},
    "grpc_health": {"server/grpc", "client"},
    "grpc_reflection": {"server/grpc"},
    "grpc_status": {"server/grpc", "client"},
    "google": {"server/grpc", "client", "proto"},
    "smg_grpc_proto": {"server/grpc"},
    "starlette": {"server/http"},
    "uvicorn": {"server/http"},
    "httptools": {"server/http"},
    "orjson": {"server/http"},
    "torch": {"worker", "models", "layers", "distributed", "ops", "checkpoint"},
    "llguidance": {"structured"},
    "PIL": {"pictures"},
    "soundfile": {"engine/sound_prompts"},
    "transformers": {
        "config",
        "checkpoint",
        "engine/tokenizer",
        "models/fallback",
        "models/vision_tower",
    },
}


READING = ROOT / "docs" / "reading.md"
FEATURES = {
    "adapters": (
        "checkpoint.adapter_files layers.lora layers.adapter_parts worker.adapter_store "
        "ops.lora_ops scheduling.adapter_slots"
    ),
    "edits of logits": "worker.edit_slots worker.token_rules layers.logit_edits",
    "grammars": "structured engine.request_grammars",
    "log probabilities of prompts": "worker.prompt_logprobs",
    "quantised forms": (
        "layers.matrix layers.quantized_linear layers.gpu_quantized ops.quantized_ops "
        "ops.weight_only checkpoint.quantized_checkpoint checkpoint.quantized_sources"
    ),
    "fair shares": "scheduling.fairness",
    "pictures": (
        "pictures engine.picture_prompts engine.picture_reader scheduling.picture_cache "
        "worker.picture_slots worker.picture_store models.vision_tower checkpoint.text_tensors"
    ),
    "embeddings": (
        "engine.pooled_outputs engine.pooling_calls engine.pooling_requests layers.pooling "
        "worker.pooling_slots"
    ),
    "encoder prompts": (
        "engine.encoder_prompts scheduling.cross_blocks worker.cross_slots worker.encoder_pass "
        "layers.cross_attention checkpoint.two_halves engine.sound_prompts engine.log_mel "
        "checkpoint.sound_files"
    ),
    "lookahead": "scheduling.drafter scheduling.token_index worker.draft_model",
    "pipelines": "models.stages scheduling.stage_groups worker.stage_ends",
    "GGUF": "checkpoint.gguf_config checkpoint.gguf_file checkpoint.gguf_weights",
    "ranks in other processes": "executor.launch executor.group_executor distributed",
    "GPUs": "worker.gpu layers.gpu_attention",
}
"""Modules of each feature that the core may import only where docs/reading.md says so."""


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree: the rules below look at it again and again."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def code_lines(path: Path) -> frozenset[int]:
    """Numbers of the lines that hold code: no docstrings, comments and blank lines."""
    stripped = map(str.strip, path.read_text().splitlines())
    lines = {i for i, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    docstrings: set[int] = set()
    for node in nodes_of(path):
        match node:
            case ast.Expr(ast.Constant(str())):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Constant(str()) | ast.JoinedStr():  # all lines of a text are code
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(lines - docstrings)


def native_code_lines(path: Path) -> int:
    """Lines of a C++ or CUDA file that are neither blank nor comments alone."""
    number, in_comment = 0, False
    for line in map(str.strip, path.read_text().splitlines()):
        if not in_comment and line and not line.startswith(("//", "/*")):
            number += 1
        in_comment = (in_comment or line.startswith("/*")) and "*/" not in line
    return number


# Stubs that protoc makes are not written by hand.
WRITTEN = sorted(p for p in PACKAGE.rglob("*.py") if "_pb2" not in p.stem)
RULED = [p for p in WRITTEN if p.relative_to(PACKAGE).parts[0] not in EXEMPT]
ROOT_FILES = {p.stem for p in PACKAGE.glob("*.py")}


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def is_in(place: str, home: str) -> bool:
    return place == home or place.startswith(f"{home}/")


def imported_names(path: Path) -> Iterator[str]:
    """Everything that a file imports, inside functions and for type checkers too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place_of(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(path: Path) -> Iterator[str]:
    place = place_of(path)
    room = place.partition("/")[0] if "/" in place else ""
    for name in imported_names(path):
        top, *rest = name.split(".")
        if top in HOMES and not any(is_in(place, home) for home in HOMES[top]):
            yield name
        if top != "tpengine" or not rest or room in ON_TOP or place in ON_TOP:
            continue
        allowed = {room, *ALLOWED_ROOMS[room]} if room else ROOT_IMPORTS.get(place, set())
        if rest[0] not in allowed and rest[0] not in ROOT_FILES - ON_TOP:
            yield name


def test_imports_point_one_way() -> None:
    assert [(place_of(path), name) for path in RULED for name in forbidden_imports(path)] == []


def import_graph() -> dict[str, set[str]]:
    """Module: the modules of the package that it imports."""
    modules = {}
    for path in WRITTEN:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imported_names(path):
            # `from a import b` imports the module a.b, if it is one, and a if not.
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                graph[module].add(target)
    return graph


def test_no_import_circles() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()  # raises a CycleError that names a circle


N = TypeVar("N", ast.Attribute, ast.Call)


def nodes(paths: list[Path], kind: type[N], home: str) -> Iterator[tuple[str, N]]:
    """Every node of a kind in these files but one, each with its file and line."""
    for path in paths:
        for node in nodes_of(path):
            if isinstance(node, kind) and place_of(path) != home:
                yield f"{place_of(path)}, line {node.lineno}", node


def test_only_envs_reads_the_environment() -> None:
    names = {"environ", "getenv", "environb"}
    reads = nodes(RULED, ast.Attribute, home="envs")
    assert [place for place, read in reads if read.attr in names] == []


def test_only_host_handles_signals() -> None:
    handlers = re.compile(r"signal\.signal|.*\.add_signal_handler")
    calls = nodes(WRITTEN, ast.Call, home="host")
    assert [place for place, call in calls if handlers.fullmatch(ast.unparse(call.func))] == []


def vague_names(tree: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter and attribute that has one of `VAGUE_NAMES`."""
    for node in tree:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name):
                pass
            case _:
                continue
        if name in VAGUE_NAMES:
            yield node.lineno, name


def test_vague_names_are_seen() -> None:
    source = "def f(one):\n  self.given = [found for found in one]\nclass C:\n  about: str\n"
    names = [(1, "one"), (2, "given"), (2, "found"), (4, "about")]
    assert sorted(vague_names(ast.walk(ast.parse(source)))) == sorted(names)


def test_names_say_what_a_value_is() -> None:
    faults = [
        f"{path.relative_to(ROOT)}, line {line}: {name!r} does not say what the value is; rename it"
        for path in (*WRITTEN, *ROOT.glob("tests/**/*.py"))
        for line, name in vague_names(nodes_of(path))
    ]
    assert not faults, "\n".join(faults)


def test_functions_stay_small() -> None:
    for path in WRITTEN:
        lines = code_lines(path)
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
                assert length <= MAX_FUNCTION_LINES, f"{place_of(path)}: {node.name}: {length}"


def test_the_package_keeps_its_budget() -> None:
    assert sum(len(code_lines(path)) for path in WRITTEN) <= MAX_PACKAGE_LINES


def test_native_code_keeps_its_budget() -> None:
    suffixes = {".cpp", ".h", ".inc", ".cu", ".cuh"}
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes]
    assert sources
    assert sum(map(native_code_lines, sources)) <= MAX_NATIVE_LINES


def test_tests_keep_their_budget() -> None:
    assert sum(len(code_lines(path)) for path in ROOT.glob("tests/**/*.py")) <= MAX_TEST_LINES


def test_the_root_stays_small() -> None:
    assert len(ROOT_FILES) <= MAX_ROOT_FILES


def test_names_of_files_are_unique() -> None:
    names = collections.Counter(
        path.stem for path in RULED if not path.stem.startswith("__") and "cli" not in path.parts
    )
    assert [name for name, count in names.items() if count > 1] == []


def core_files() -> list[str]:
    """The files that docs/reading.md lists, in its order."""
    return re.findall(r"^\d+\. `([^`]+)`", READING.read_text(), re.MULTILINE)


def test_the_core_stays_small() -> None:
    assert sum(len(code_lines(PACKAGE / name)) for name in core_files()) <= MAX_CORE_LINES


def test_features_touch_the_core_only_where_it_says_so() -> None:
    """The table at the end of docs/reading.md names, for each feature, the core's files that import
    it; a row that is no longer true is a fault, too."""
    touched: dict[str, set[str]] = {feature: set() for feature in FEATURES}
    for name in core_files():
        imported = [n.removeprefix("tpengine.") for n in imported_names(PACKAGE / name)]
        for feature, modules in FEATURES.items():
            if any(f"{n}.".startswith(f"{m}.") for n in imported for m in modules.split()):
                touched[feature].add(name)
    rows = re.findall(r"^\| ([^|]+?) \| (`[^|]+`) \|", READING.read_text(), re.MULTILINE)
    assert {name: set(re.findall(r"`([^`]+)`", places)) for name, places in rows} == touched


def test_no_file_is_called_utils() -> None:
    assert not [p for p in PACKAGE.rglob("*util*") if "__pycache__" not in p.parts]


def test_configs_are_frozen() -> None:
    config = importlib.import_module("tpengine.config")
    classes = [value for value in vars(config).values() if inspect.isclass(value)]
    configs = [value for value in classes if value.__name__.endswith("Config")]
    assert configs
    for value in configs:
        assert value.__dataclass_params__.frozen, value.__name__
