"""Matrices of tests: a diagonal for `make test`, the whole for `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def matrix(*axes: Sequence[Any]) -> list[Any]:
    """All combinations, as arguments of `parametrize`; those beside a diagonal are marked soak.

    The diagonal has each value of the longest axis once. The others count up beside it, the first
    of them the fastest, so that their values meet too, as far as its length lets them.
    """
    longest = max(range(len(axes)), key=lambda number: len(axes[number]))
    diagonal = set()
    for place in range(len(axes[longest])):
        rest, chosen = place, []
        for number, axis in enumerate(axes):
            chosen.append(place if number == longest else rest % len(axis))
            rest //= 1 if number == longest else len(axis)
        diagonal.add(tuple(chosen))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, places, strict=True)),
            marks=[] if places in diagonal else [pytest.mark.soak],
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def only(kept: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """Values, or tuples of them; those that are not kept for `make test` are marked soak."""
    every = [v if isinstance(v, tuple) else (v,) for v in values]
    own = [v if isinstance(v, tuple) else (v,) for v in kept]
    return [pytest.param(*v, marks=[] if v in own else [pytest.mark.soak]) for v in every]
