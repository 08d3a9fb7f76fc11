"""Constraints are read and compiled in a process with bounds, which ends beyond them, and with its
driver."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.programs import running
from support.tiny_llama import byte_level_tokenizer
from support.waiting import PATIENCE_S, wait_until

from tpengine import StructuredOutputsParams
from tpengine.errors import InvalidSamplingParamsError, RequestFailedError
from tpengine.structured import grammar_checks
from tpengine.structured.constraints import Thinking
from tpengine.structured.grammar_checks import GrammarChecks
from tpengine.structured.grammars import STACK_BYTES, Vocabulary

MANY = [{"pattern": f".*a.{{{k}}}b.*"} for k in range(1, 40)]
ENDLESS: list[dict[str, Any]] = [
    {"grammar": "start: T\nT: " + " & ".join(f"/{part['pattern']}/" for part in MANY)},
    {"grammar": "\n" * 60_000 + "x"},
    {"json": {"type": "string", "allOf": MANY}},
    {
        "structural_tag": {
            "structures": [{"begin": "<", "schema": {"allOf": MANY, "type": "string"}, "end": ">"}],
            "triggers": ["<"],
        }
    },
]
"""Constraints that take more than a second of a processor, all but the second one for ever."""
BOUNDS = "more than {} s of a processor or {} MiB of memory; give a simpler one"
PROGRAM = """
import json, sys
from tpengine import StructuredOutputsParams
from tpengine.structured import grammar_checks
from tpengine.structured.constraints import Thinking
from tpengine.structured.grammars import Vocabulary
grammar_checks.CPU_S = 3600
vocabulary, checks = Vocabulary(*json.loads(sys.stdin.readline())), grammar_checks.GrammarChecks()
checks.check(vocabulary, StructuredOutputsParams(regex="a"), Thinking.NONE, [])
(process,) = checks._processes.values()
print(process._process.pid, flush=True)
endless = StructuredOutputsParams(grammar=sys.argv[1])
checks.check(vocabulary, endless, Thinking.NONE, [])
"""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = byte_level_tokenizer([], [])
    return Vocabulary(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [2])


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


def check(checks: GrammarChecks, vocabulary: Vocabulary, **constraint: Any) -> str:
    return checks.check(vocabulary, StructuredOutputsParams(**constraint), Thinking.NONE, [])


@pytest.mark.parametrize("constraint", ENDLESS, ids=lambda value: str(value)[:30])
def test_a_check_beyond_its_time_ends(
    checks: GrammarChecks,
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    constraint: dict[str, Any],
) -> None:
    monkeypatch.setattr(grammar_checks, "CPU_S", 1)
    with pytest.raises(InvalidSamplingParamsError, match=BOUNDS.format(1, 1280)):
        check(checks, vocabulary, **constraint)
    assert "one_" in check(checks, vocabulary, regex=f"one_{ENDLESS.index(constraint)}")


def test_a_check_beyond_its_memory_ends(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process has no other stack yet."""
    monkeypatch.setattr(grammar_checks, "MEMORY_BYTES", STACK_BYTES + (24 << 20))
    monkeypatch.setattr(grammar_checks, "CPU_S", 60)
    with contextlib.closing(GrammarChecks()) as checks:
        with pytest.raises(InvalidSamplingParamsError, match=BOUNDS.format(60, 536)):
            check(checks, vocabulary, choice=[f"{number}" * 2 for number in range(30_000)])
        assert "after" in check(checks, vocabulary, regex="after")


def test_processes_that_were_killed(checks: GrammarChecks, vocabulary: Vocabulary) -> None:
    """An idle one is replaced; the request of a busy one fails, which is no fault of its client."""
    check(checks, vocabulary, regex="first")
    own = threading.get_ident()
    checks._processes[own].end()
    assert "second" in check(checks, vocabulary, regex="second")
    endless = f"{ENDLESS[0]['grammar']}\n"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(check, checks, vocabulary, grammar=endless)
        wait_until(lambda: len(checks._processes) == 2)
        (busy,) = (process for thread, process in checks._processes.items() if thread != own)
        busy.end()
        with pytest.raises(RequestFailedError, match="try again later"):
            asked.result(PATIENCE_S)
        assert "third" in pool.submit(check, checks, vocabulary, regex="third").result(PATIENCE_S)
    (left,) = (process for thread, process in checks._processes.items() if thread != own)
    for process in (left, checks._processes[own]):  # as a process does with its thread
        process.end()
    check(checks, vocabulary, regex="fourth")
    assert list(checks._processes) == [own]


def test_a_process_ends_with_its_driver_in_a_check(vocabulary: Vocabulary) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with running(sys.executable, "-c", PROGRAM, ENDLESS[0]["grammar"], **pipes) as driver:
        driver.stdin.write(json.dumps(vocabulary.__reduce__()[1]) + "\n")
        driver.stdin.flush()
        child = Path(f"/proc/{int(driver.stdout.readline())}")
        ticks = cpu_ticks(child)
        wait_until(lambda: cpu_ticks(child) > ticks + 20)  # it compiles
    wait_until(lambda: not child.exists() or " Z " in (child / "stat").read_text())


def cpu_ticks(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[11])
