"""The house rules that a machine can check: which room may import what, and how long things get."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tpengine"
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_NOUN_FIELDS = 14
# Stubs that protoc makes: nobody reads or edits them.
WRITTEN = sorted(p for p in PACKAGE.rglob("*.py") if "_pb2" not in p.stem)
FILES = [p for p in WRITTEN if "bench" not in p.relative_to(PACKAGE).parts]
ROOT_FILES = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
ON_TOP = {"llm", "cli", "__init__"}

# room: rooms that it may import, besides itself and the package's root files
ALLOWED_ROOMS = {
    "server": {"async_engine", "engine", "scheduling"},
    "client": {"server"},  # the proto alone, see PROTO
    "async_engine": {"engine", "scheduling", "executor"},
    "engine": {"scheduling", "executor"},
    "scheduling": set(),
    "executor": {"worker"},
    "worker": {"models", "layers", "ops", "distributed"},
    "models": {"layers", "ops", "distributed"},
    "layers": {"ops", "distributed"},
    "ops": set(),
    "distributed": {"ops"},  # whose native side holds the collectives over shared memory
}
PROTO = "tpengine.server.grpc.proto"
# foreign package: where it may be imported
HOMES = {
    "ray": {"executor/launch"},
    "grpc": {"server", "client"},
    "grpc_tools": {"server/grpc"},
    "grpc_health": {"server/grpc", "client"},
    "grpc_reflection": {"server/grpc"},
    "grpc_status": {"server/grpc", "client"},
    "google": {"server/grpc", "client"},
    "torch": {"worker", "models", "layers", "distributed", "ops"},
    "transformers": {"config", "engine/tokenizer"},
}
SHARED_NOUNS = [
    "tpengine.sequence:Sequence",
    "tpengine.sequence:Request",
    "tpengine.messages:StepInput",
    "tpengine.messages:StepOutput",
    "tpengine.messages:NewSequence",
    "tpengine.scheduling.step:SchedulerOutput",
    "tpengine.layers.attention:AttentionMetadata",
    "tpengine.outputs:RequestOutput",
    "tpengine.config:ModelConfig",
]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            # `from tpengine import envs` imports a module too
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if len(parts) > 1 else ""


def _is_in(place: str, home: str) -> bool:
    return place == home or place.startswith(f"{home}/")


def _place(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_imports_point_one_way(path: Path) -> None:
    room, place = _room(path), _place(path)
    for name in _imports(path):
        top, *rest = name.split(".")
        if top in HOMES:
            homes = HOMES[top]
            assert any(_is_in(place, home) for home in homes), f"{place} imports {top}"
        if top != "tpengine" or not rest or place in ON_TOP or room == "cli":
            continue
        if room == "client" and rest[0] == "server":
            assert name.startswith(PROTO), f"{place} imports {name}"
        target = rest[0]
        if target in ALLOWED_ROOMS:
            allowed = {room, *ALLOWED_ROOMS.get(room, set())} if room else set()
            assert target in allowed, f"{place} imports {name}"
        else:
            assert target in ROOT_FILES, f"{place} imports {name}, which is no root file"
            assert target not in ON_TOP, f"{place} imports {target}, which stands on top"


@pytest.mark.parametrize("path", FILES, ids=_place)
def test_only_envs_reads_the_environment(path: Path) -> None:
    if _place(path) == "envs":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"environ", "getenv", "environb"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", WRITTEN, ids=_place)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("noun", SHARED_NOUNS)
def test_shared_nouns_stay_small(noun: str) -> None:
    module, name = noun.split(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), name))
    assert len(fields) <= MAX_NOUN_FIELDS


def test_no_room_is_called_utils() -> None:
    assert not [p for p in PACKAGE.rglob("*util*") if "__pycache__" not in p.parts]


def test_configs_are_frozen() -> None:
    config = importlib.import_module("tpengine.config")
    for name in (
        "ModelConfig",
        "CacheConfig",
        "ParallelConfig",
        "SchedulerConfig",
        "RecoveryConfig",
        "EngineConfig",
    ):
        assert getattr(config, name).__dataclass_params__.frozen, name
