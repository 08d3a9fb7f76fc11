"""A parser of command lines whose errors fit on a screen."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from tpengine.errors import closest


class CommandParser(argparse.ArgumentParser):
    """Says what was wrong under one line of usage: a command that starts an engine has so many
    options that all of them would push the error off the screen. `--help` has them."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2; what was wrong comes last.

        Raises:
            SystemExit: always.
        """
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTION ...]")
        positionals = [action for action in self._actions if not action.option_strings]
        formatter.add_usage(None, positionals, [])
        usage = formatter.format_help().strip()
        self.exit(2, f"{usage}  (more: {self.prog} --help)\n{self.prog}: error: {message}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process for words that the command does not know; every option among them that
        resembles one of its own is told which.

        Raises:
            SystemExit: always.
        """
        known = set(re.findall(r"--[\w-]+", self.format_usage()))
        wrong = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-"))
        meant = [(name, near) for name in wrong if (near := closest(name, known)) is not None]
        hint = ", ".join(near if len(wrong) == 1 else f"{near} for {name}" for name, near in meant)
        question = f"; did you mean {hint}?" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{question}")
