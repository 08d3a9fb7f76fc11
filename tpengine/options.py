"""Options: dataclass fields that declare their defaults and limits, with a docstring each.

`EngineArgs`, the arguments of a server and those of a command are `Options`. The check of a value,
its command-line option and its line in `--help` follow from the field alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import math
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from tpengine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Declaration:
    """Which values a field accepts.

    Attributes:
        choices: the accepted values; empty: any value.
        at_least: smallest accepted number. All limits hold for each number of a list.
        more_than: a number must be greater than this.
        at_most: largest accepted number.
        unit: printed after each limit in an error message, such as " seconds".
        advice: end of the error message about a number outside the limits.
        only_for: the one thing that the option has an effect on; empty: no restriction.
        metavar: placeholder of the value in `--help`; None: the field's name in capitals.
    """

    choices: tuple[Any, ...] = ()
    at_least: float = -math.inf
    more_than: float = -math.inf
    at_most: float = math.inf
    unit: str = ""
    advice: str = ""
    only_for: str = ""
    metavar: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Checks a value that has its field's type.

        Raises:
            ConfigError: it is not one of the choices, or outside the limits.
        """
        if self.choices and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"{name} must be one of {listed}; got {value!r}")
        for number in each(value):
            if isinstance(number, str):
                continue
            # NaN fails every comparison; an infinity is never meant.
            if not (
                self.at_least <= number <= self.at_most
                and self.more_than < number
                and abs(number) < math.inf
            ):
                advice = f"; {self.advice}" if self.advice else ""
                limits = " and ".join(self._limits(number))
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
            ConfigError: a value has another type, is not one of the choices, or outside the limits.
        """
        types = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
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
        group = parser.add_argument_group(cls.group)
        types = typing.get_type_hints(cls)
        texts = _docstrings_of_fields(cls)
        for spec in dataclasses.fields(cls):
            declared: Declaration = spec.metadata["option"]
            kinds = _types_in(types[spec.name])
            words: dict[str, Any] = {"default": spec.default, "metavar": declared.metavar}
            is_told = spec.default is None or "default: " in texts[spec.name]
            default = "" if is_told else " (default: %(default)s)"
            if bool in kinds:
                words = {"default": spec.default, "action": argparse.BooleanOptionalAction}
                default = f" (default: {'on' if spec.default else 'off'})"
            elif Sequence[str] in kinds:
                words["action"] = "append"
            elif Sequence[float] in kinds:
                words |= {"type": _one_or_more_numbers, "metavar": "NUM,..."}
            else:
                words |= {"type": kinds[0], "choices": declared.choices or None}
            words["help"] = texts[spec.name].replace("%", "%%").removesuffix(".") + default
            group.add_argument("--" + spec.name.replace("_", "-"), **words)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Takes the fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})


def each(value: Any) -> tuple[Any, ...]:
    """The values of a list, or a single value as a tuple of one; an empty tuple for None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _docstrings_of_fields(cls: type) -> dict[str, str]:
    """The docstring below each field of a class, by name. It is read from the class's source, since
    Python does not keep it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    texts = {}
    for before, after in pairwise(ast.iter_child_nodes(body)):
        match before, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
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
        return Sequence[float] in kinds and all(_is_of_type(item, float) for item in value)
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
