"""Dataclass fields that declare their defaults and limits, with a docstring each.

`EngineArgs`, the arguments of a server and those of a command are `Options`. The check of a value,
its command-line option and its line in `--help` follow from the field alone. So do those of a
parameter of a request (`Parameter`), and besides them the form of its value and who may set it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import math
import reprlib
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tpengine.errors import ConfigError, InvalidSamplingParamsError

if TYPE_CHECKING:
    import argparse

_MOST_INTEGER = 2**63 - 1
"""Largest number of a field without a limit of its own; ranks and protocols have 64 bits for it."""
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
        refused: whether no value but the default is accepted; see `Options.why_refused`.
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
    refused: bool = False
    short: str = ""
    takes_words: bool = False
    metavar: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether `--help` leaves the option out, since it cannot change anything."""
        return self.refused or self.only_for == NOTHING

    def problem(self, value: Any) -> str:
        """What is wrong with a value that has its field's type, in words that follow the field's
        name; empty: it is one of the choices, and within the limits."""
        advice = f"; {self.advice}" if self.advice else ""
        if self.choices and value not in self.choices:
            listed = ", ".join(str(choice) for choice in self.choices)
            return f" must be one of {listed}; got {value!r}{advice}"
        for number in each(value):
            if not isinstance(number, (int, float)):
                continue
            # NaN fails every comparison; an infinity is never meant.
            fits = self.at_least <= number <= self.at_most and self.more_than < number
            if not (fits and abs(number) < math.inf):
                limits = " and ".join(self._limits(number))
                if number < self.at_most < math.inf:
                    advice = ""
                return f" must be {limits}, got {number}{advice}"
        return ""

    def _limits(self, number: float) -> Iterator[str]:
        """The limits in words; "finite" only for a number that is not."""
        lower = (("at least", self.at_least), ("more than", self.more_than))
        for word, limit in (*lower, ("at most", self.at_most)):
            if math.isfinite(limit):
                yield f"{word} {limit}{self.unit}"
        if isinstance(number, float) and not math.isfinite(number):
            yield "finite"


def option(default: Any, choices: tuple[Any, ...] = (), **declared: Any) -> Any:
    """A field of `Options` with its default and its `Declaration`."""
    return dataclasses.field(default=default, metadata={"option": Declaration(choices, **declared)})


@dataclass
class Options:
    """Base of dataclasses whose fields are all made by `option`.

    The first paragraph of the docstring below a field is its text in `--help`. The default is added
    to it, unless the docstring itself says "default: ...".

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
        hints = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.metadata["option"].refused and value != spec.default:
                text = f"{spec.name} = {value!r} is refused: {self.why_refused(spec.name)}"
                raise ConfigError(f"{text}; leave it at {spec.default!r}")
            if not _is_of_type(value, hints[spec.name]):
                raise ConfigError(f"{spec.name} must be {spec.type}, got {value!r}")
            problem = "" if value is None else spec.metadata["option"].problem(value)
            if problem:
                raise ConfigError(spec.name + problem)

    @classmethod
    def why_refused(cls, name: str) -> str:
        """Why a field is refused, and what to use: the text below it, as a part of a sentence."""
        text = docstrings_of_fields(cls)[name]
        return text[0].lower() + text[1:].removesuffix(".")

    def changed(self, only_for: str) -> list[str]:
        """Returns `name = value` of each option with this `only_for` that was changed."""
        fields = dataclasses.fields(self)
        own = [spec for spec in fields if spec.metadata["option"].only_for == only_for]
        changed = [spec.name for spec in own if getattr(self, spec.name) != spec.default]
        return [f"{name} = {getattr(self, name)!r}" for name in changed]

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
        hints = typing.get_type_hints(cls)
        texts = docstrings_of_fields(cls)
        for spec in specs:
            declared = spec.metadata["option"]
            hint, text = hints[spec.name], texts.get(spec.name, "")  # a hidden one needs none
            add_option(group, spec.name, declared, hint, spec.default, text)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Takes the fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})


def adder(*kinds: type[Options]) -> Callable[[argparse.ArgumentParser], None]:
    """The `add_arguments` of a command that has the options of these classes, and no others."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for kind in kinds:
            kind.add_cli_args(parser)

    return add_arguments


def each(value: Any) -> tuple[Any, ...]:
    """The values of a list, or a single value as a tuple of one; an empty tuple for None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def add_option(
    group: Any, name: str, declared: Declaration, hint: Any, default: Any, text: str
) -> None:
    """Adds the option of a field to a group of options: of `max_num_seqs` it is `--max-num-seqs`.

    Args:
        hint: type of the field.
        text: for `--help`.
    """
    import argparse  # programs without a command line do without it

    words = _reading(declared, hint) | {"default": default, "help": argparse.SUPPRESS}
    if not declared.is_hidden:
        words["help"] = text.replace("%", "%%").removesuffix(".") + _default_in_words(default, text)
    group.add_argument(*filter(None, ["--" + name.replace("_", "-"), declared.short]), **words)


def _reading(declared: Declaration, hint: Any) -> dict[str, Any]:
    """How argparse reads an option: the arguments of `add_argument` without default and help."""
    import argparse  # programs without a command line do without it

    kinds = _types_in(hint)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if Sequence[str] in kinds or list[str] in kinds:
        words = {"action": "extend", "nargs": "+"} if declared.takes_words else {"action": "append"}
        return words | {"metavar": declared.metavar}
    if Sequence[float] in kinds:
        return {"type": _one_or_more_numbers, "metavar": "NUM,..."}
    read: Callable[[str], Any] = _read_json if Mapping[str, Any] in kinds else kinds[0]
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


def _read_json(text: str) -> dict[str, Any]:
    """Reads an object of JSON.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    import argparse  # programs without a command line do without it

    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    form = """'{"name": value}'"""
    raise argparse.ArgumentTypeError(f"must be JSON as in {form}; got {text!r}")


def _default_in_words(default: Any, text: str) -> str:
    """The end of a line in `--help`; empty if the field's docstring names the default."""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return "" if default is None or "default: " in text else " (default: %(default)s)"


def docstrings_of_fields(cls: type) -> dict[str, str]:
    """The first paragraph of the docstring below each field of a class and of its bases, by name.
    It is read from the source, since Python does not keep it."""
    texts: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for before, after in pairwise(ast.iter_child_nodes(body)):
            match before, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts.setdefault(name, " ".join(text.partition("\n\n")[0].split()))
    return texts


def _types_in(hint: Any) -> list[Any]:
    """The types that a hint such as `float | Sequence[float] | None` joins, without None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    return [kind for kind in kinds if kind is not type(None)]


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
        import argparse

        problem = f"must be a number, or one per rank with commas between them; got {text!r}"
        raise argparse.ArgumentTypeError(problem) from None
    return numbers if len(numbers) > 1 else numbers[0]


class WrongValueError(ValueError):
    """A value that a parameter does not take; the text follows the parameter's name."""


@dataclass(frozen=True, slots=True)
class Parameter(Declaration):
    """Which values a parameter of a request takes, and who may set it.

    Attributes:
        besides: a number that is taken although it is outside the limits.
        read: brings a value into its one form, or raises `WrongValueError`; None: by the type.
        doors: protocols that have it; all of them have its name.
        max_entries: bound of its entries over a protocol: an attribute of `server.limits.Limits`.
        endless: its numbers above the length of a sequence all mean the same.
        is_option: whether commands have an option for it.
    """

    besides: float | None = None
    read: Callable[[Any], Any] | None = None
    doors: tuple[str, ...] = ("grpc", "http")
    max_entries: str = ""
    endless: bool = False
    is_option: bool = False


def parameter(default: Any, choices: tuple[Any, ...] = (), **declared: Any) -> Any:
    """A field of a dataclass of parameters with its default and its `Parameter`.

    The first paragraph of the docstring below the field is its text in `--help`.
    """
    return dataclasses.field(default=default, metadata={"option": Parameter(choices, **declared)})


def parameters(owner: type) -> dict[str, Parameter]:
    """The parameters of a dataclass by name."""
    return {spec.name: spec.metadata["option"] for spec in dataclasses.fields(owner)}


def read_parameters(owner: Any, place: str = "") -> None:
    """Checks all parameters of an object, and brings each into the one form of its type: numbers of
    NumPy become Python's, and lists and maps new ones of Python.

    Args:
        place: of the object, with a dot at the end; empty: it is the request's own.

    Raises:
        InvalidSamplingParamsError: a value has another type, or is outside its limits.
    """
    values, name = vars(owner), ""
    try:
        for name, final, read in _readers(owner.__class__):
            if values[name] is not final:
                values[name] = read(values[name])
    except WrongValueError as wrong:
        field = place.partition(".")[0] or name
        raise InvalidSamplingParamsError(f"{place}{name}{wrong}", field=field) from None


@functools.cache
def _readers(owner: type) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Name and reader of each parameter, and between them its default if that needs no reading."""
    hints = typing.get_type_hints(owner)
    readers = []
    for spec in dataclasses.fields(owner):
        read = _reader(hints[spec.name], spec.metadata["option"])
        is_final = read(spec.default) is spec.default
        readers.append((spec.name, spec.default if is_final else object(), read))
    return readers


def _reader(hint: Any, declared: Parameter) -> Callable[[Any], Any]:
    """The function that reads values of a type, or raises `WrongValueError`."""
    kinds = [kind for kind in _types_in(hint) if kind is not Any] or [hint]
    origin, args = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    read: Callable[[Any], Any]
    if declared.read is not None:
        read = declared.read
    elif origin is list:
        read = _list_reader(args[0], declared)
    elif origin is Mapping:
        read = _map_reader(args[1], declared)
    elif kinds[0] in (int, float):
        read = _number_reader(kinds[0], declared, takes_bool=bool in kinds)
    elif isinstance(kinds[0], enum.EnumType):
        members: Any = kinds[0]
        read = functools.partial(_read_choice, {member.value: member for member in members})
    elif declared.choices:
        read = functools.partial(_read_choice, {choice: choice for choice in declared.choices})
    else:
        read = functools.partial(_read_plain, kinds[0])
    if type(None) not in typing.get_args(hint):
        return read
    return lambda value: None if value is None else read(value)


def _number_reader(
    kind: type[int] | type[float], declared: Parameter, takes_bool: bool = False
) -> Callable[[Any], Any]:
    low, above, high = declared.at_least, declared.more_than, declared.at_most
    if high == math.inf:
        high = sys.float_info.max if kind is float else _MOST_INTEGER

    def read(value: Any) -> int | float:
        if type(value) is kind and low <= value <= high and above < value:  # NaN is not
            return value
        number: int | float
        try:
            if isinstance(value, bool) and not takes_bool:  # bool is a subclass of int
                raise TypeError
            if kind is float and not isinstance(value, Real):
                raise TypeError
            number = int(index(value)) if kind is int else float(value)
        except OverflowError:
            number = math.inf
        except TypeError:
            noun = "an integer" if kind is int else "a number"
            raise WrongValueError(f" must be {noun}, got {reprlib.repr(value)}") from None
        if number != declared.besides and (problem := declared.problem(number)):
            raise WrongValueError(problem)
        if isinstance(number, int) and number > high:
            got = number if number < 10**99 else "far more"
            raise WrongValueError(f" must be at most {high}, got {got}")
        return number

    return read


def read_int(name: str, value: Any, at_least: int) -> int:
    """An argument that is an integer.

    Raises:
        InvalidSamplingParamsError: it is none, or less than `at_least`.
    """
    try:
        return int(_number_reader(int, Parameter(at_least=at_least))(value))
    except WrongValueError as wrong:
        raise InvalidSamplingParamsError(f"{name}{wrong}", field=name) from None


def _list_reader(kind: Any, declared: Parameter) -> Callable[[Any], Any]:
    """Reads a list of values of one type; a text is a list of one, and None is an empty list."""
    read_item = _reader(kind, declared)

    def read(value: Any) -> list[Any]:
        if type(value) not in (list, tuple):  # these are quicker to tell than the others
            if value is None:
                return []
            if isinstance(value, str) and kind is str:
                value = [value]
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
                raise WrongValueError(f" must be a list, got {reprlib.repr(value)}")
        items: list[Any] = []
        try:
            for item in value:
                items.append(read_item(item))
        except WrongValueError as wrong:
            raise WrongValueError(f"[{len(items)}]{wrong}") from None
        if kind is str and "" in items:
            raise WrongValueError(f"[{items.index('')}] must be a text that is not empty")
        return items

    return read


def _map_reader(kind: Any, declared: Parameter) -> Callable[[Any], Any]:
    """Reads a map from token ids to values of one type."""
    read_id, read_item = _number_reader(int, Parameter(at_least=0)), _reader(kind, declared)

    def read(value: Any) -> dict[int, Any]:
        if not isinstance(value, Mapping):
            raise WrongValueError(f" must map ids to numbers, got {reprlib.repr(value)}")
        items: dict[int, Any] = {}
        key = token_id = None
        try:
            for key, item in value.items():
                token_id = None
                token_id = read_id(key)
                items[token_id] = read_item(item)
        except WrongValueError as wrong:
            place = f"[{key}]" if token_id is not None else ": an id"
            raise WrongValueError(place + str(wrong)) from None
        return items

    return read


def _read_choice(choices: dict[Any, Any], value: Any) -> Any:
    """The choice that a value names, or is."""
    for name, choice in choices.items():
        if value is choice or (type(value) is type(name) and value == name):
            return choice
    known = ", ".join(map(repr, choices))
    raise WrongValueError(f" must be one of {known}, got {reprlib.repr(value)}")


def _read_plain(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        noun = {bool: "True or False", str: "a text"}.get(kind, f"a {kind.__name__}")
        raise WrongValueError(f" must be {noun}, got {reprlib.repr(value)}")
    return value


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
            form = "'GPU=1,my_accelerator=1', with amounts above 0"
            raise ConfigError(f"ray_bundle must be of the form {form}; got {text!r}")
    return bundle
