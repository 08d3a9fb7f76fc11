"""Refusals of attributes and of parameters that classes of vLLM 0.5.4 have, and ours do not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from tpengine.errors import InvalidPromptError, RefusedNameError

Method = TypeVar("Method", bound=Callable[..., Any])

PARAMETERS = {
    "trace_headers": "leave it out; AsyncLLMEngine logs the times of each request",
    "prompt_adapter_request": "put the instruction into the prompt",
}
"""Parameter of a request: what to do without it."""
EARLIER = {
    "prompt": "inputs=...",
    "sampling_params": "params=...",
    "prompt_token_ids": 'inputs={"prompt_token_ids": [...]}',
}
"""Parameter of a request in vLLM before 0.4.3: how it is written now."""
_IDS_PLACE = 4
"""Of `prompt_token_ids` at that time, behind `self`, in each method that adds a request."""


def refuse_parameters(values: Mapping[str, object]) -> None:
    """Refuses those of `PARAMETERS` that are not None.

    Raises:
        InvalidPromptError: there is such a value.
    """
    for name, value in values.items():
        if value is not None:
            raise InvalidPromptError(f"{name} = {value!r:.80} is not served; {PARAMETERS[name]}")


def _refuse_earlier(
    method: Method, known: Container[str], values: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Refuses what a method does not take as vLLM before 0.4.3 did.

    Args:
        known: names of the method's parameters.

    Raises:
        InvalidPromptError: there is such a value; the message says how it is written now.
    """
    earlier = {name: value for name, value in named.items() if name in EARLIER}
    if isinstance(ids := dict(enumerate(values)).get(_IDS_PLACE), list):
        earlier, known = {"prompt_token_ids": ids}, ()
    for name, value in earlier.items():
        if name not in known:
            text = f"{method.__qualname__}: {name} = {value!r:.80} is written as before vLLM 0.4.3"
            raise InvalidPromptError(f"{text}; write {EARLIER[name]}")


def with_refused_parameters(method: Method, names: Sequence[str] = tuple(PARAMETERS)) -> Method:
    """The method with those of `PARAMETERS` after its positional parameters."""
    signature = inspect.signature(method)
    own = list(signature.parameters.values())
    place = sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in own)
    own[place:place] = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names
    ]

    @functools.wraps(method)
    def checked(*values: Any, **named: Any) -> Any:
        _refuse_earlier(method, signature.parameters, values, named)
        by_place = dict(zip(names, values[place:], strict=False))
        by_name = {name: named.pop(name) for name in names if name in named}
        refuse_parameters(by_place | by_name)
        return method(*values[:place], *values[place + len(names) :], **named)

    vars(checked)["__signature__"] = signature.replace(parameters=own)
    return cast(Method, checked)


class RefusesNames:
    """Base of a class that refuses some attributes which the class of its name in vLLM has.

    Attributes:
        REFUSED: by names, with spaces between them: what to use instead.
    """

    REFUSED: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            own = type(self).__name__
            for names, advice in self.REFUSED.items():
                if name in names.split():
                    raise RefusedNameError(f"{own}.{name} is not offered: {advice}")
            raise AttributeError(f"{own!r} object has no attribute {name!r}")
