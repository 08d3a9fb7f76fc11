"""Sampling rules, and functions of the user in them, on their way to ranks in other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tpengine.errors import InvalidSamplingParamsError
from tpengine.executor import codec
from tpengine.messages import SamplingRules
from tpengine.sampling_params import LogitsProcessor

_MAX_PICKLED_BYTES = 1 << 20
"""Of a request's logits processors. So a step can hold those of 256 new sequences."""


def sendable_rules(rules: SamplingRules) -> SamplingRules:
    """Returns rules that can be sent: functions as bytes, from which ranks make copies of them.

    Raises:
        InvalidSamplingParamsError: a function cannot be pickled, or the rules cannot be sent.
    """
    if rules.logits_processors:
        rules = replace(rules, logits_processors=_pickled(rules.logits_processors))
    try:
        codec.encode((rules,))
    except Exception as error:  # a step with them could not be sent, for no request in it
        text = f"the parameters cannot be sent to the ranks: {error!r}; give plain numbers"
        raise InvalidSamplingParamsError(text) from error
    return rules


def _pickled(
    processors: Sequence[LogitsProcessor | str | bytes],
) -> list[LogitsProcessor | str | bytes]:
    pickled: list[LogitsProcessor | str | bytes] = []
    for processor in processors:
        if isinstance(processor, str | bytes):
            pickled.append(processor)
            continue
        try:
            pickled.append(pickle_function(processor))
        except Exception as error:  # objects raise anything while they are pickled
            text = f"the logits processor {processor!r} cannot be sent to the ranks"
            text = f"{text}: {type(error).__name__}: {error}"
            raise InvalidSamplingParamsError(text, field="logits_processors") from error
    size = sum(len(part) for part in pickled if isinstance(part, str | bytes))
    if size > _MAX_PICKLED_BYTES:
        text = f"are {size} bytes with the data that they hold, more than {_MAX_PICKLED_BYTES}"
        hint = "put the data into a module that the ranks import"
        raise InvalidSamplingParamsError.of_field("logits_processors", f"{text}; {hint}")
    return pickled


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
