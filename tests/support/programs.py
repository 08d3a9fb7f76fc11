"""Programs that tests run: `tpengine` in this process, others each in a process of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tpengine.cli.main import main

TESTS = Path(__file__).parents[1]
PYTHONPATH = f"{TESTS}:{TESTS.parent}"
"""On which a program finds the package and the tests."""
END_S = 120.0
_FORKS = """
import os, runpy, sys
from support import forked
forked.preload()
for script in sys.argv[1:]:
    if (child := os.fork()) == 0:
        with open(f"{script}.out", "w") as out:
            os.dup2(out.fileno(), 1)
        sys.argv[:] = [script]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{script} has failed")
"""


def run_program(
    *command: object, code: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program until it ends; nothing comes from its standard input.

    Args:
        code: the exit status that it must have.
        options: of `subprocess.run`.
    """
    options = {"input": "", "capture_output": True, "text": True, "timeout": 240.0, **options}
    done = subprocess.run(list(map(str, command)), check=False, **options)
    assert done.returncode == code, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done


def python(
    *words: object,
    code: int = 0,
    stdin: str = "",
    cwd: Path | None = None,
    timeout_s: float = 240.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words on its command line; see `run_program`.

    Args:
        environment: variables besides those of this process.
    """
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    options = {"input": stdin, "cwd": cwd, "env": env, "timeout": timeout_s}
    return run_program(sys.executable, *words, code=code, **options)


def imported(*statements: str) -> set[str]:
    """Names of all modules after these statements in a fresh interpreter."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules, sep='\\n')"])
    return set(python("-c", program).stdout.split())


def forks(*scripts: Path, cwd: Path | None = None, **environment: str) -> list[str]:
    """What each of these scripts prints. One after another runs in a process of its own, forked
    from one that has imported torch, which takes longer than most of them."""
    python("-c", _FORKS, *scripts, cwd=cwd, **environment)
    return [script.with_name(f"{script.name}.out").read_text() for script in scripts]


Cli = Callable[..., Any]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `tpengine` in this process with words of a command line; returns what it has printed.

    The function takes also `code`, the exit status that it must have, and `typed`, its standard
    input.
    """

    def run(*words: str, code: int = 0, typed: str | None = None) -> Any:
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(list(words)) == code
        return capsys.readouterr()

    return run


@contextmanager
def running(*command: object, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process with these options of `Popen`, which is killed at the end, and reaped."""
    options = {"env": {**os.environ, "PYTHONPATH": PYTHONPATH}, **options}
    process = subprocess.Popen(list(map(str, command)), **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=END_S)


def err_of_interrupted(
    words: Sequence[str],
    begin: str,
    sent: signal.Signals,
    on_sigint: Any = signal.default_int_handler,
) -> str:
    """What `tpengine` says on standard error that gets a signal once it has printed this beginning.
    It must end in order.

    Args:
        on_sigint: what SIGINT does when the command starts; a shell's background jobs ignore it.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    prepare = partial(signal.signal, signal.SIGINT, on_sigint)
    with running(sys.executable, "-m", "tpengine", *words, preexec_fn=prepare, **pipes) as child:
        assert child.stdout.read(len(begin)) == begin
        child.send_signal(sent)
        out, err = child.communicate(timeout=END_S)
    assert child.returncode == 128 + sent, err
    assert out.endswith("\n")
    assert "Traceback" not in err
    return str(err)
