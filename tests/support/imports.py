"""What a program imports."""

from __future__ import annotations

from support.programs import python


def imported(*statements: str) -> set[str]:
    """Names of all modules after these statements in a fresh interpreter."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules, sep='\\n')"])
    return set(python("-c", program).stdout.split())
