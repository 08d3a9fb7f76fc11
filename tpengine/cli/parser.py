"""The parser of the `tpengine` command, and options that its commands share."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from tpengine.errors import InvalidSamplingParamsError, closest
from tpengine.options import Options, option
from tpengine.sampling_params import SamplingParams


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


@dataclass
class SamplingOptions(Options):
    """The most used fields of `SamplingParams` as options; `SamplingParams` checks their values."""

    group: ClassVar[str] = "sampling"

    max_tokens: int | None = option(None)
    """Most tokens to generate; default: max_new_tokens of the model's generation_config.json, else
    100, and 1024 in `tpengine chat`; `tpengine client chat` always asks for 1024."""
    temperature: float | None = option(None)
    """How freely tokens are drawn; 0 takes the most likely one; default: what the model recommends
    in its generation_config.json, or a GGUF file under general.sampling, with do_sample: false 0,
    and 0.7 if it recommends nothing. A client leaves this to its server."""
    top_p: float | None = option(None)
    """Draw from the most likely tokens whose probabilities reach this sum, in (0, 1]; default: what
    the model recommends, and 0.9 if it recommends nothing."""
    top_k: int | None = option(None)
    """Draw from this many most likely tokens; -1 draws from all; default: what the model
    recommends, else -1."""
    min_p: float | None = option(None)
    """Leave out tokens below this share of the most likely one's probability, in [0, 1]; default:
    what the model recommends, else 0."""
    repetition_penalty: float | None = option(None)
    """Make tokens of prompt and output less likely, in (0, 2]; 1 is neutral; default: what the
    model recommends, else 1."""
    sampling_seed: int | None = option(None)
    """Seed of each prompt; default: made from the engine's seed and the number of the request, so
    that `tpengine generate` repeats its texts, and a server does not."""
    stop: Sequence[str] | None = option(None, metavar="TEXT")
    """Text that ends the output; may be given more than once."""
    ignore_eos: bool = option(False)
    """Go on after the model's end token."""
    structured_outputs: str | None = option(None, metavar="JSON")
    """What the output must look like, as in '{"choice": ["yes", "no"]}' or '{"json": SCHEMA}': one
    of json, json_object, regex, choice, grammar and structural_tag (docs/structured.md)."""

    def given(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the user has set.

        Raises:
            InvalidSamplingParamsError: a value is out of its range.
        """
        unset = (None, False)
        fields = {k: v for k, v in vars(self).items() if not any(v is one for one in unset)}
        if "sampling_seed" in fields:
            fields["seed"] = fields.pop("sampling_seed")
        if "structured_outputs" in fields:
            try:
                fields["structured_outputs"] = json.loads(fields["structured_outputs"])
            except ValueError as error:
                raise InvalidSamplingParamsError(
                    f"--structured-outputs is no JSON: {error}; put it into single quotes"
                ) from None
        SamplingParams(**fields)
        return fields


def in_words(fields: Mapping[str, Any], given: Mapping[str, Any], source: str) -> str:
    """Says which sampling parameters hold.

    Args:
        given: those of `fields` that the user gave.
        source: whose the others are; empty: there are no others.
    """
    shown = (f"{name} {fields[name]}{' (given)' * (name in given)}" for name in sorted(fields))
    return ", ".join(shown) + (f"; defaults: {source}" if source else "")
