"""Compares tpengine with the API of vLLM 0.5.4, and writes the result as docs/vllm.md.

    python tests/support/compare_api.py

Every name, parameter, method, attribute and flag in `tests/reference/vllm_0_5_4.json` is an item.
It is the same, or tpengine refuses it with an error that names it, or
`tests/reference/differences.json` says how it differs and why; `other_values.json` does so for
names that exist with another value; arguments without effect, and choices of an argument that are
refused, follow from the declarations of `EngineArgs`. Names are looked up in the module of the same
path, with `vllm` replaced by `tpengine`; a parameter must have the same place and default.

`vllm_0_5_4.json` was read once from the sources of 0.5.4. It has for each module and each name:
    kind: class, dataclass, enum, function, value or import; null: 0.5.4 has no such name.
    bases: of a class, with keywords such as `total=False`.
    fields: of a class: name -> [type, default], as source text; null is no type or no default.
    attributes: of a class: names that `__init__` sets on `self`.
    methods: of a class: public methods and `__init__`, without `self` and `cls`.
    flags: of a class with `add_cli_args`: option -> the arguments of `add_argument`.
    parameters: name -> [type, default], with the marks of a signature: parameters before "/" are
        positional only, those after "*" or "*args" keyword only.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from tpengine import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, SamplingParams
from tpengine.compat.refused import PARAMETERS
from tpengine.engine.stats import StatLoggerBase, Stats
from tpengine.inputs import LoRARequest, PoolingParams
from tpengine.options import NOTHING
from tpengine.outputs import EmbeddingRequestOutput

FOLDER = Path(__file__).parents[1] / "reference"
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
_INTERNAL = ("__init__", "add_cli_args", "from_seq_group")
_PYTHONS_OWN = ("has no attribute", "cannot import name", "No module named", "unexpected keyword")
Probe = Callable[[], str | None]
"""Uses an item as a script would; returns how it differs, None if it does not."""


class Status(Enum):
    """What a script meets that uses an item."""

    SAME = "same"
    DIFFERENT = "different"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Item:
    """One item of the comparison.

    Attributes:
        name: as a user would write it, such as `LLM.generate()`.
        detail: how a different item differs, or why it is refused and what to use.
    """

    name: str
    status: Status
    detail: str = ""


class Comparison:
    """Looks at every item.

    Args:
        examples: an object of each class whose attributes and methods are compared.
    """

    def __init__(self, examples: dict[str, Any]) -> None:
        self._examples = examples
        self._reference = json.loads((FOLDER / "vllm_0_5_4.json").read_text())
        self._differences: dict[str, str] = json.loads((FOLDER / "differences.json").read_text())
        self._other_values: dict[str, str] = json.loads((FOLDER / "other_values.json").read_text())
        self._declarations = _declarations(self._reference)
        self._unused = {*self._differences, *self._other_values}

    def items(self) -> list[Item]:
        """Every item of the reference, in its order."""
        probes = (
            probe
            for module, names in self._reference.items()
            for name, facts in names.items()
            if facts is not None  # 0.5.4 has no such name
            for probe in self._of_name(module, name, facts)
        )
        return [self._examine(label, probe) for label, probe in probes]

    def unused_differences(self) -> list[str]:
        """Entries of differences.json and other_values.json that no item needed: out of date."""
        return sorted(self._unused)

    def _examine(self, label: str, probe: Probe) -> Item:
        try:
            deviation = probe()
        except (ValueError, AttributeError, ImportError, TypeError) as error:
            deviation = str(error)
            word = label.rstrip("()").replace("(", ".").rpartition(".")[2]
            is_pythons_own = deviation == word or any(text in deviation for text in _PYTHONS_OWN)
            if word in deviation and not is_pythons_own:
                self._unused.discard(label)
                return Item(label, Status.REFUSED, " ".join(deviation.split()).partition(": ")[2])
        if deviation is None and label in self._declarations:
            return Item(label, *self._declarations[label])
        if deviation is None and label in self._other_values:
            self._unused.discard(label)
            return Item(label, Status.DIFFERENT, self._other_values[label])
        if deviation is None:
            return Item(label, Status.SAME)
        for pattern in (label, *self._differences):
            if pattern in self._differences and fnmatchcase(label, pattern):
                self._unused.discard(pattern)
                return Item(label, Status.DIFFERENT, self._differences[pattern])
        return Item(label, Status.UNKNOWN, deviation)

    def _of_name(
        self, module: str, name: str, facts: dict[str, Any]
    ) -> Iterator[tuple[str, Probe]]:
        label, path = f"{module}.{name}", module.replace("vllm", "tpengine", 1)
        yield label, lambda: _has(importlib.import_module(path), name)
        try:
            item = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError):
            return  # its parts are not there either
        if facts["kind"] == "enum":
            for member in facts["fields"]:
                yield f"{name}.{member}", partial(_has, item, member)
            for method, method_facts in facts.get("methods", {}).items():
                yield self._of_method(f"{name}.{method}", item, method, method_facts)
        elif facts["kind"] in ("class", "dataclass"):
            yield from self._of_class(name, item, facts)
        elif "function" in facts["kind"]:
            yield f"{label}()", partial(_takes, item, facts.get("parameters", {}))

    def _of_class(self, name: str, kind: Any, facts: dict[str, Any]) -> Iterator[tuple[str, Probe]]:
        methods, example = facts.get("methods", {}), self._examples.get(name)
        expected = facts.get("fields", {}) if facts["kind"] == "dataclass" else {}
        expected = expected or methods.get("__init__", {}).get("parameters", {})
        inherited = self._reference["vllm.engine.arg_utils"]["EngineArgs"]["fields"]
        first = len(inherited) if name == "AsyncEngineArgs" else 0
        for index, (parameter, fact) in enumerate(expected.items(), first):
            if fact:  # not a mark such as *args
                yield f"{name}({parameter})", partial(_constructs, kind, index, parameter, fact[1])
        if example is not None:
            fields = facts["fields"] if facts["kind"] == "dataclass" else ()
            for attribute in (*facts.get("attributes", ()), *fields):
                yield f"{name}.{attribute}", partial(_has, example, attribute)
            for method, fact in methods.items():
                if method not in _INTERNAL:
                    yield self._of_method(f"{name}.{method}", example, method, fact)
        for flag in facts.get("flags", {}):
            yield f"{name} {flag}", partial(_parses, kind, flag)

    def _of_method(
        self, label: str, example: Any, name: str, facts: dict[str, Any]
    ) -> tuple[str, Probe]:
        if "property" in facts["kind"]:
            return label, partial(_has, example, name)
        return f"{label}()", lambda: _takes(getattr(example, name), facts.get("parameters", {}))


def _declarations(reference: dict[str, Any]) -> dict[str, tuple[Status, str]]:
    """What arguments declare by which they differ: they are refused, have no effect, or have fewer
    choices."""
    declarations = {}
    flags = reference["vllm.engine.arg_utils"]["EngineArgs"]["flags"]
    options = {names.split()[0]: facts for names, facts in flags.items()}
    of_llm = reference["vllm.entrypoints.llm"]["LLM"]["methods"]["__init__"]["parameters"]
    for spec in fields(AsyncEngineArgs):
        name, declared = spec.name, spec.metadata["option"]
        choices = options.get(f"--{name.replace('_', '-')}", {}).get("choices", "[]")
        status, text = Status.DIFFERENT, ""
        if declared.refused:
            status, text = Status.REFUSED, AsyncEngineArgs.why_refused(name)
        elif declared.only_for == NOTHING:
            text = "no effect; a warning names it."
        elif declared.choices and "*" not in choices:
            refused = [c for c in ast.literal_eval(choices) if c not in declared.choices]
            text = f"refuses `{'`, `'.join(refused)}`." if refused else ""
        if text:
            is_async = name not in EngineArgs.__dataclass_fields__
            owners = ["AsyncEngineArgs" if is_async else "EngineArgs", *["LLM"] * (name in of_llm)]
            declarations |= {f"{owner}({name})": (status, text) for owner in owners}
    return declarations


def _has(example: Any, name: str) -> None:
    getattr(example, name)


def _takes(function: Any, expected: dict[str, Any]) -> str | None:
    parameters = list(inspect.signature(function).parameters.values())
    place: int | None = 0
    for name, fact in expected.items():
        if not fact:  # a mark: what follows it is given by name
            place = None
            continue
        if (deviation := _deviation(parameters, place, name, fact[1])) is not None:
            return f"{name}: {deviation}"
        place = None if place is None else place + 1
    return None


def _constructs(kind: Any, index: int, name: str, default: str | None) -> str | None:
    """Looks at a constructor's parameter."""
    return _deviation([*inspect.signature(kind).parameters.values()], index, name, default)


def _parses(kind: Any, flag: str) -> str | None:
    parser = argparse.ArgumentParser()
    kind.add_cli_args(parser)
    missing = [option for option in flag.split() if option not in parser._option_string_actions]
    return f"unknown: {', '.join(missing)}" if missing else None


def _deviation(
    parameters: list[inspect.Parameter], place: int | None, name: str, default: str | None
) -> str | None:
    """How a parameter differs from the reference; None: its place and default are the same.

    Args:
        place: among the parameters; None: it is given by name.
        default: its source text; None: 0.5.4 has no default, and a script gives a value.
    """
    own = next((p for p in parameters if p.name == name), None)
    if own is None:
        by_name = place is None and any(p.kind is p.VAR_KEYWORD for p in parameters)
        return None if by_name else "missing"
    if place is not None and (own.kind is own.KEYWORD_ONLY or parameters.index(own) != place):
        return "not at the same place"
    if default is None:
        return None
    try:
        wanted = ast.literal_eval(default)
    except ValueError:
        return None  # an expression, such as the member of an enum
    same = own.default == wanted and type(own.default) is type(wanted)
    return None if same else f"default {own.default!r} instead of {default}"


def page(items: list[Item]) -> str:
    """The text of docs/vllm.md."""
    counts = Counter(item.status for item in items)
    parts = [
        "# Scripts written for vLLM 0.5.4",
        "",
        "After this page you know what such a script meets when only its imports are changed from",
        "`vllm` to `tpengine`. `tests/support/compare_api.py` writes the page: it looks at each",
        "name, parameter, method, attribute and flag of 0.5.4 in tpengine itself.",
        "",
        f"Of these {len(items)} items, {counts[Status.SAME]} are the same, "
        f"{counts[Status.DIFFERENT]} differ, and {counts[Status.REFUSED]} are refused with an "
        "error that names them.",
    ]
    parts += ["", "## Behaviour", "", (FOLDER / "behaviour.md").read_text().rstrip()]
    for title, status in (
        ("Different names and defaults", Status.DIFFERENT),
        ("Refused", Status.REFUSED),
    ):
        parts += ["", f"## {title}", ""]
        by_detail: dict[str, list[str]] = {}
        for item in items:
            if item.status is status:
                by_detail.setdefault(item.detail, []).append(item.name)
        parts += [f"- {_listed(names)}: {detail}" for detail, names in by_detail.items()]
    parts += [f"- `{name}` of a request: {advice}" for name, advice in PARAMETERS.items()]
    later = json.loads((FOLDER / "later.json").read_text())
    parts += ["", "## From later versions", "", "These names came after 0.5.4 and work here:", ""]
    parts += [f"- `{name}`: {text}" for name, text in later.items()]
    return "\n".join(parts) + "\n"


def _listed(names: list[str]) -> str:
    """The names with commas between them; parameters of one call in one pair of parentheses."""
    by_call: dict[str, list[str]] = {}
    for name in names:
        call, _, parameter = name.removesuffix(")").partition("(")
        by_call.setdefault(call + "(" * (name[-1] == ")"), []).append(parameter)
    return ", ".join(
        f"`{call}{', '.join(parameters)})`" if call[-1] == "(" else f"`{call}`"
        for call, parameters in by_call.items()
    )


class _Logger(StatLoggerBase):
    """A logger that keeps the last stats."""

    def log(self, stats: Stats) -> None:
        self.stats = stats


@contextmanager
def comparison() -> Iterator[Comparison]:
    """A comparison over engines of the embedded model, which end with it."""
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(disable_log_stats=True))
    with ExitStack() as stack:
        stack.callback(lambda: asyncio.run(engine.shutdown()))
        llm = stack.enter_context(LLM(disable_log_stats=True))
        core, logger = llm.llm_engine, _Logger(local_interval=1.0)
        core.add_logger("last", logger)
        params = SamplingParams(max_tokens=2, logprobs=1)
        output = llm.generate("A", params, use_tqdm=False)[0]
        answer = output.outputs[0]
        stream = asyncio.run(engine.add_request("a", "A", params))
        examples = [llm, core, engine, params, output, answer, output.metrics, stream, logger.stats]
        examples += [core.model_config, core.cache_config]
        examples += [core.parallel_config, core.scheduler_config, LoRARequest("a", 1, "/folder")]
        examples += [PoolingParams(), EmbeddingRequestOutput("a", None, [1], True)]
        examples += [answer.logprobs[0][answer.token_ids[0]]]
        by_class = {type(example).__name__: example for example in examples}
        yield Comparison({**by_class, "StatLoggerBase": logger})


def main() -> None:
    with comparison() as compared:
        items = compared.items()
    PAGE.write_text(page(items))
    for item in items:
        if item.status is Status.UNKNOWN:
            print(f"{item.name}: {item.detail}")
    print(Counter(item.status.value for item in items), compared.unused_differences())


if __name__ == "__main__":
    main()
