"""Calls of the package's own code: what a test does before them, and what they were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def on_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., object] | None = None
) -> list[tuple[Any, ...]]:
    """Returns the positional arguments of each call of a function from now on.

    Args:
        act: called before it with the same arguments; an error that it raises takes its place.
    """
    function, calls = getattr(owner, name), list[tuple[Any, ...]]()

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if act is not None:
            act(*args, **kwargs)
        return function(*args, **kwargs)

    patch.setattr(owner, name, run)
    return calls


def fail_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException
) -> None:
    """Has the call of this number raise, counted from 1."""

    def fail(*_: Any, **__: Any) -> None:
        if len(calls) == number:
            raise error

    calls = on_call(patch, owner, name, fail)
