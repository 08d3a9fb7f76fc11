"""Fields of `EngineArgs`: how they are declared, checked, and read from a command line."""

from __future__ import annotations

import argparse
import math
import typing
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from tpengine.errors import ConfigError


def arg(default: Any, help_text: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A field with its default, its help text and what it may be."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


def one_or_more(text: str) -> float | list[float]:
    """`0.5` as itself, `0.5,1` as a list: an option of several words would take a prompt that
    stands behind it for one of them.

    Raises:
        argparse.ArgumentTypeError: it is not of that form.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, or one per rank with commas between them; got {text!r}"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def is_of_kind(value: object, kind: Any) -> bool:
    """Whether a value is what its field's type hint says; a whole number is a float, too."""
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(value, (list, tuple)):
        return Sequence[float] in kinds and all(is_of_kind(item, float) for item in value)
    kinds = tuple(one for one in kinds if typing.get_origin(one) is None)
    if isinstance(value, bool):  # in Python also an int, and never meant as one
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def each(value: float | Sequence[float] | None) -> tuple[float, ...]:
    """One value or several as several; None as none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)


def read_bundle(text: str) -> dict[str, float]:
    """`GPU=1,my_accelerator=1` as a dict.

    Raises:
        ConfigError: it is not of that form.
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
