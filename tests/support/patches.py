"""Calls of the package's own code, what a test does before them and what they were given; and
limits of this process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def limited(kind: int, at_most: int) -> Iterator[None]:
    """Lowers a limit of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (at_most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def fail_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException
) -> None:
    """Has the call of this number raise, counted from 1."""

    def fail(*_: Any, **__: Any) -> None:
        if len(calls) == number:
            raise error

    calls = on_call(patch, owner, name, fail)
