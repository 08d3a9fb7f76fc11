"""Programs that tests run, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


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
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done
