"""Programs that tests run, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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


def python(
    *words: object,
    code: int = 0,
    stdin: str = "",
    cwd: Path | None = None,
    timeout_s: float = 240.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words on its command line until it ends.

    Args:
        code: the exit status that it must have.
        environment: variables besides those of this process.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        input=stdin,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def imported(*statements: str) -> set[str]:
    """Names of all modules after these statements in a fresh interpreter."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules, sep='\\n')"])
    return set(python("-c", program).stdout.split())


def forks(*scripts: Path, cwd: Path | None = None, **environment: str) -> list[str]:
    """What each of these scripts prints. One after another runs in a process of its own, forked
    from one that has imported torch, which takes longer than most of them."""
    python("-c", _FORKS, *scripts, cwd=cwd, **environment)
    return [script.with_name(f"{script.name}.out").read_text() for script in scripts]


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
