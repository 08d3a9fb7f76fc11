"""Options: dataclass fields that declare their defaults and limits, with a docstring each.

`EngineArgs`, the arguments of a server and those of a command are `Options`. The check of a value,
its command-line option and its line in `--help` follow from the field alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import math
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from tpengine.errors import ConfigError

NOTHING = "nothing"
"""`only_for` of an option that is accepted with any value and has no effect."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """Which values a field accepts.

    Attributes:
        choices: the accepted values; empty: any value.
        at_least: smallest accepted number. All limits hold for each number of a list.
        more_than: a number must be greater than this.
        at_most: largest accepted number.
        unit: printed after each limit in an error message, such as " seconds".
        advice: end of the error message about another choice, or a number outside the limits; a
            number that is too small gets it only if there is no `at_most`.
        only_for: the one thing that the option has an effect on; empty: no restriction.
        refused: why no value but the default is accepted, and what to use; empty: it is accepted.
        short: a second name on the command line, such as -tp.
        takes_words: whether a list on the command line takes all words up to the next option;
            else the option is given once for each.
        metavar: placeholder of the value in `--help`; None: the field's name in capitals.
    """

    choices: tuple[Any, ...] = ()
    at_least: float = -math.inf
    more_than: float = -math.inf
    at_most: float = math.inf
    unit: str = ""
    advice: str = ""
    only_for: str = ""
    refused: str = ""
    short: str = ""
    takes_words: bool = False
    metavar: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether `--help` leaves the option out, since it cannot change anything."""
        return bool(self.refused) or self.only_for == NOTHING

    def check(self, name: str, value: Any) -> None:
        """Checks a value that has its field's type.

        Raises:
            ConfigError: it is not one of the choices, or outside the limits.
        """
        advice = f"; {self.advice}" if self.advice else ""
        if self.choices and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{name} must be one of {listed}; got {value!r}{advice}")
        for number in each(value):
            if not isinstance(number, (int, float)):
                continue
            # NaN fails every comparison; an infinity is never meant.
            if not (
                self.at_least <= number <= self.at_most
                and self.more_than < number
                and abs(number) < math.inf
            ):
                limits = " and ".join(self._limits(number))
                if number < self.at_most < math.inf:
                    advice = ""
                raise ConfigError(f"{name} must be {limits}, got {number}{advice}")

    def _limits(self, number: float) -> Iterator[str]:
        """The limits in words; "finite" only for a number that is not."""
        for word, limit in (
            ("at least", self.at_least),
            ("more than", self.more_than),
            ("at most", self.at_most),
        ):
            if math.isfinite(limit):
                yield f"{word} {limit}{self.unit}"
        if isinstance(number, float) and not math.isfinite(number):
            yield "finite"


def option(default: Any, choices: tuple[Any, ...] = (), **declared: Any) -> Any:
    """A field of `Options` with its default and its `Declaration`."""
    metadata = {"option": Declaration(choices, **declared)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Options:
    """Base of dataclasses whose fields are all made by `option`.

    The docstring below a field is its text in `--help`. The default is added to it, unless the
    docstring itself says "default: ...".

    Attributes:
        group: title of the options in `--help`.
    """

    group: ClassVar[str]

    def check(self) -> None:
        """Checks each field by its declaration.

        Raises:
            ConfigError: a value has another type, is not one of the choices, is outside the limits,
                or is refused.
        """
        types = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            refused = spec.metadata["option"].refused
            if refused and value != spec.default:
                raise ConfigError(
                    f"{spec.name} = {value!r} is refused: {refused}; leave it at {spec.default!r}"
                )
            if not _is_of_type(value, types[spec.name]):
                raise ConfigError(f"{spec.name} must be {spec.type}, got {value!r}")
            if value is not None:
                spec.metadata["option"].check(spec.name, value)

    def changed(self, only_for: str) -> list[str]:
        """Returns `name = value` of each option with this `only_for` that was changed."""
        return [
            f"{spec.name} = {getattr(self, spec.name)!r}"
            for spec in dataclasses.fields(self)
            if spec.metadata["option"].only_for == only_for
            and getattr(self, spec.name) != spec.default
        ]

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a command-line option for each field: `max_num_seqs` is `--max-num-seqs`."""
        cls._add_options(parser, dataclasses.fields(cls))
        return parser

    @classmethod
    def _add_options(
        cls, parser: argparse.ArgumentParser, specs: Iterable[dataclasses.Field[Any]]
    ) -> None:
        group = parser.add_argument_group(cls.group)
        types = typing.get_type_hints(cls)
        texts = _docstrings_of_fields(cls)
        for spec in specs:
            declared: Declaration = spec.metadata["option"]
            names = ["--" + spec.name.replace("_", "-"), *filter(None, [declared.short])]
            words = _reading(declared, types[spec.name])
            words |= {"default": spec.default, "help": argparse.SUPPRESS}
            if not declared.is_hidden:
                words["help"] = texts[spec.name].replace("%", "%%").removesuffix(".")
                words["help"] += _default_in_words(spec, texts[spec.name])
            group.add_argument(*names, **words)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Takes the fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})


def each(value: Any) -> tuple[Any, ...]:
    """The values of a list, or a single value as a tuple of one; an empty tuple for None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _reading(declared: Declaration, hint: Any) -> dict[str, Any]:
    """How argparse reads an option: the arguments of `add_argument` without default and help."""
    kinds = _types_in(hint)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if Sequence[str] in kinds:
        words = {"action": "extend", "nargs": "+"} if declared.takes_words else {"action": "append"}
        return words | {"metavar": declared.metavar}
    if Sequence[float] in kinds:
        return {"type": _one_or_more_numbers, "metavar": "NUM,..."}
    read: Callable[[str], Any] = json.loads if Mapping[str, Any] in kinds else kinds[0]
    choices = list(declared.choices)
    if type(None) in typing.get_args(hint):
        read = _or_none(read)
        choices += [None] if choices else []
    return {"type": read, "choices": choices or None, "metavar": declared.metavar}


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads the words None and "" as None, and others by `read`, which gives its name."""

    @functools.wraps(read, updated=())
    def read_or_none(text: str) -> Any:
        return None if text in ("", "None") else read(text)

    return read_or_none


def _default_in_words(spec: dataclasses.Field[Any], text: str) -> str:
    """The end of a line in `--help`; empty if the field's docstring names the default."""
    if isinstance(spec.default, bool):
        return f" (default: {'on' if spec.default else 'off'})"
    return "" if spec.default is None or "default: " in text else " (default: %(default)s)"


def _docstrings_of_fields(cls: type) -> dict[str, str]:
    """The docstring below each field of a class and of its bases, by name. It is read from the
    source, since Python does not keep it."""
    texts: dict[str, str] = {}
    for one in filter(dataclasses.is_dataclass, cls.__mro__):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        for before, after in pairwise(ast.iter_child_nodes(body)):
            match before, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts.setdefault(name, " ".join(text.split()))
    return texts


def _types_in(hint: Any) -> list[Any]:
    """The types that a hint such as `float | Sequence[float] | None` joins, without None."""
    return [one for one in typing.get_args(hint) or (hint,) if one is not type(None)]


def _is_of_type(value: object, hint: Any) -> bool:
    """Whether a value has the type of its field; an integer is also a float."""
    kinds = _types_in(hint)
    if value is None:
        return type(None) in typing.get_args(hint)
    if isinstance(value, (list, tuple)):
        items = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is Sequence]
        return any(all(_is_of_type(item, kind) for item in value) for kind in items)
    if isinstance(value, Mapping):
        return Mapping[str, Any] in kinds
    if isinstance(value, bool):  # bool is a subclass of int
        return bool in kinds
    plain = tuple(kind for kind in kinds if typing.get_origin(kind) is None)
    return isinstance(value, (*plain, int) if float in plain else plain)


def _one_or_more_numbers(text: str) -> float | list[float]:
    """Reads `0.5` as a number and `0.5,1` as a list. An option with more than one word would take a
    prompt that follows it as its last word.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, or one per rank with commas between them; got {text!r}"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def read_bundle(text: str) -> dict[str, float]:
    """Reads `GPU=1,my_accelerator=1` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    bundle = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        try:
            bundle[name] = float(amount)
        except ValueError:
            bundle[name] = math.nan
        if not name or not 0.0 < bundle[name] < math.inf:
            raise ConfigError(
                f"ray_bundle must be of the form 'GPU=1,my_accelerator=1', with amounts above 0; "
                f"got {text!r}"
            )
    return bundle
