"""Every command and every piece of Python in README.md and docs/ runs as it is written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.programs import forks, python
from support.server_process import ServerProcess

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make chat": "it fetches a model of 93 MB; tests/cli/test_chat.py runs `tpengine chat` with "
    "the embedded model",
    "make ": "`make test` is this run, and CI has the set-up of `make demo` already; "
    "`examples/offline_inference.py`, all that follows the set-up, runs below",
    "PYTHONPATH=. python3": "it needs a GPU; tests/bench/test_visit.py runs the same command",
    "cmake ": "the build of the CUDA library takes minutes; `make setup` runs the same files",
    "ray ": "tests/executor walks these commands over machines made of namespaces",
}
"""Beginnings of commands, with the reason why this test does not run them."""
SERVES = "tpengine serve"
NEEDS_SERVER = ("tpengine client", "GenerationClient(")
ADDRESS, HTTP_ADDRESS = "127.0.0.1:50051", "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Snippet:
    """A command, or a block of Python."""

    page: str
    is_python: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"

    @property
    def needs_server(self) -> bool:
        return any(word in self.text for word in NEEDS_SERVER)


def snippets() -> Iterator[Snippet]:
    for page in PAGES:
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M):
            if language == "python":
                yield Snippet(page.name, True, body)
                continue
            for line in body.splitlines():
                command = re.split(r"\s{2,}#", line)[0].strip()
                if re.match(r"(\.venv/bin/|make |ray |python |PYTHONPATH=|cmake )", command):
                    yield Snippet(page.name, False, command)


def reason_not_to_run(snippet: Snippet) -> str | None:
    return next((why for start, why in NOT_RUN.items() if snippet.text.startswith(start)), None)


ALL = list(snippets())
RUN = [block for block in ALL if reason_not_to_run(block) is None and SERVES not in block.text]


def words(snippet: Snippet, server: ServerProcess) -> list[str]:
    """A command's words for Python, and for the server of this test."""
    program, *options = shlex.split(snippet.text)
    module = ["-m", "tpengine"] if program == ".venv/bin/tpengine" else []
    assert module or program in (".venv/bin/python", "python"), snippet.text
    target_option = ["--target", server.target] if snippet.needs_server else []
    return [*module, *options, *target_option]


def test_few_commands_are_not_run() -> None:
    assert len(RUN) > 10
    for start in NOT_RUN:
        assert any(block.text.startswith(start) for block in ALL), f"no page has {start!r} any more"
    assert any(SERVES in block.text for block in ALL), "the fixture below runs it"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--device", "cpu", "--cpu-kv-cache-space", "0.05", "--http-port", "0"]
    with ServerProcess(*options, log=log) as server:
        yield server


@pytest.mark.check
@pytest.mark.parametrize("command", [block for block in RUN if not block.is_python], ids=str)
def test_a_command_runs(command: Snippet, server: ServerProcess) -> None:
    assert python(*words(command, server), cwd=ROOT).stdout.strip()


@pytest.mark.check
def test_python_runs(server: ServerProcess, tmp_path: Path) -> None:
    texts = [block.text for block in RUN if block.is_python]
    scripts = [tmp_path / f"{number}.py" for number in range(len(texts))]
    for script, text in zip(scripts, texts, strict=True):
        text = text.replace(ADDRESS, server.target)
        script.write_text(text.replace(HTTP_ADDRESS, server.http_address))
    assert all(out.strip() for out in forks(*scripts, cwd=ROOT))


@pytest.mark.check
def test_the_demo_completes_four_prompts() -> None:
    assert python("examples/offline_inference.py", cwd=ROOT).stdout.count("\nOutput: ") == 4


def test_the_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    for name in ("draw.py", "recovery.json", "blocks.json", "steps.json", "pipeline.json"):
        (tmp_path / name).write_bytes((ROOT / "docs" / name).read_bytes())
    python(tmp_path / "draw.py")
    for name in ("engine.svg", "recovery.svg", "blocks.svg", "steps.svg", "pipeline.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def test_the_family_in_contributing_is_the_real_one() -> None:
    """Each line that it shows stands in the file that it is about."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## A model family")[1]
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```", text, re.S | re.M)[:3]
    files = "tpengine/models/phi.py", "tpengine/config.py", "tests/data/variants.json"
    for block, file in zip(blocks, files, strict=True):
        written = (ROOT / file).read_text().splitlines()
        assert set(block.splitlines()) <= {line.split("  #")[0] for line in written}
