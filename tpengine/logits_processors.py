"""Functions of the user that edit logits, named by where they are found: "module:function".

A name reaches every rank, whatever process or machine it runs in; the function itself could not be
pickled in general.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpengine.errors import InvalidSamplingParamsError


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A function that edits one row of logits.

    Attributes:
        path: where it was found, for messages.
        wants_prompt: whether it takes (prompt ids, output ids, logits) rather than (output ids,
            logits).
    """

    path: str
    function: Callable[..., Any]
    wants_prompt: bool


def check_import_path(path: object) -> None:
    """Checks the form of a name; nothing is imported.

    Raises:
        InvalidSamplingParamsError: it is not "module:function".
    """
    if isinstance(path, str):
        module, _, name = path.partition(":")
        if module and name and all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            return
    raise InvalidSamplingParamsError(
        f'logits_processors must hold names of the form "module:function", got {path!r}; a '
        "function itself does not reach the workers: put it into a module that they can import"
    )


def load_logits_processor(path: str) -> LogitsProcessor:
    """Imports a function by its name.

    Raises:
        InvalidSamplingParamsError: there is no such function here, its module fails to import, or
            it cannot take two or three positional arguments.
    """
    check_import_path(path)
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # a module may raise anything while it is imported
        raise InvalidSamplingParamsError(
            f"the logits processor {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise InvalidSamplingParamsError(
            f"the logits processor {path!r} is a {type(target).__name__}, not a function"
        )
    return LogitsProcessor(path, target, _wants_prompt(path, target))


def _wants_prompt(path: str, function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: the common form is assumed
        return False
    # Two first: with an optional third parameter the shorter form is the one that was meant.
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise InvalidSamplingParamsError(
        f"the logits processor {path!r} must take (output_ids, logits) or (prompt_ids, "
        f"output_ids, logits), but its parameters are {signature}"
    )
