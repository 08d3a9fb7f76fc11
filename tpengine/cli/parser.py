"""The parser of the `tpengine` command, and options that its commands share."""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tpengine.errors import InvalidSamplingParamsError, closest
from tpengine.options import add_option, docstrings_of_fields
from tpengine.sampling_params import PARAMETERS, SamplingParams


class CommandParser(argparse.ArgumentParser):
    """Parser that prints an error below one line of usage. A command that starts an engine has so
    many options that the full usage would push the error off the screen."""

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """All options and positional arguments."""
        return self._actions

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses words, with two more spellings: underscores in the name of an option are dashes,
        and a flag may be followed by True or False, with or without an equals sign."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        known: list[str] = []
        for word in words[:end]:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                name = name.replace("_", "-")
            elif known and self._is_flag(known[-1]) and word.lower() in ("true", "false"):
                name, equals, value = known.pop(), "=", word
            if equals and self._is_flag(name) and value.lower() in ("true", "false"):
                known.append(name if value.lower() == "true" else f"--no-{name[2:]}")
            else:
                known.append(name + equals + value)
        return super().parse_known_args(known + words[end:], namespace)

    def _is_flag(self, name: str) -> bool:
        return isinstance(self._option_string_actions.get(name), argparse.BooleanOptionalAction)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2; the message is the last line.

        Raises:
            SystemExit: always.
        """
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTION ...]")
        positionals = [action for action in self.actions if not action.option_strings]
        formatter.add_usage(None, positionals, [])
        usage = formatter.format_help().strip()
        self.exit(2, f"{usage}  (more: {self.prog} --help)\n{self.prog}: error: {message}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process for unknown words, and names the most similar option for each.

        Raises:
            SystemExit: always.
        """
        known = set(re.findall(r"--[\w-]+", self.format_usage()))
        wrong = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-"))
        meant = [(name, near) for name in wrong if (near := closest(name, known)) is not None]
        hint = ", ".join(near if len(wrong) == 1 else f"{near} for {name}" for name, near in meant)
        question = f"; did you mean {hint}?" if meant else ""
        if "--model" in known and not unknown[0].startswith("-"):
            question += "; the model is given by --model"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{question}")


FlexibleArgumentParser = CommandParser
"""Its name in vLLM."""


_OPTIONS = {name: name for name, declared in PARAMETERS.items() if declared.is_option}
_OPTIONS["sampling_seed"] = _OPTIONS.pop("seed")  # --seed is the engine's
"""Parameters that commands have, by the names of their options."""


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for sampling parameters."""
    group = parser.add_argument_group("sampling")
    texts, hints = docstrings_of_fields(SamplingParams), typing.get_type_hints(SamplingParams)
    for option, name in _OPTIONS.items():
        declared, hint = PARAMETERS[name], hints[name]
        default = False if hint is bool else None
        hint = str if declared.read else hint | None
        add_option(group, option, declared, hint, default, texts[name])


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that the user has set.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """
    values = {name: getattr(args, option) for option, name in _OPTIONS.items()}
    fields = {name: value for name, value in values.items() if value is not None}
    if not fields["ignore_eos"]:
        del fields["ignore_eos"]
    if "structured_outputs" in fields:
        try:
            fields["structured_outputs"] = json.loads(fields["structured_outputs"])
        except ValueError as error:
            raise InvalidSamplingParamsError(
                f"--structured-outputs is no JSON: {error}; put it into single quotes"
            ) from None
    SamplingParams(**fields)
    return fields


def in_words(fields: Mapping[str, Any], options: Mapping[str, Any], source: str) -> str:
    """Says which sampling parameters hold.

    Args:
        options: those of `fields` that the user gave.
        source: whose the others are; empty: there are no others.
    """
    shown = (f"{name} {fields[name]}{' (given)' * (name in options)}" for name in sorted(fields))
    return ", ".join(shown) + (f"; defaults: {source}" if source else "")
