"""Functions of the user on their way to ranks in other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Returns a function as bytes for `pickle.loads` in a rank: as its name if a module has it,
    else, where Ray is installed, with its code and data.

    Raises:
        Exception: it has no name, or its data cannot be pickled.
    """
    try:
        from ray import cloudpickle
    except ImportError:
        return pickle.dumps(function)
    return bytes(cloudpickle.dumps(function))
