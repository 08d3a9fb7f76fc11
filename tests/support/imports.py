"""What a program imports."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT_S = 120.0


def imported(*statements: str) -> set[str]:
    """Names of all modules after these statements in a fresh interpreter."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules, sep='\\n')"])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return set(done.stdout.split())
