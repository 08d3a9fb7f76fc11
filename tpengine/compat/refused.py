"""Refusals of attributes and of parameters that classes of vLLM 0.5.4 have, and ours do not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from tpengine.errors import InvalidPromptError, RefusedNameError

Method = TypeVar("Method", bound=Callable[..., Any])

PARAMETERS = {
    "trace_headers": "leave it out; AsyncLLMEngine logs the times of each request",
    "prompt_adapter_request": "put the instruction into the prompt",
}
"""Parameter of a request: what to do without it."""


def refuse_parameters(values: Mapping[str, object]) -> None:
    """Refuses those of `PARAMETERS` that are not None.

    Raises:
        InvalidPromptError: there is such a value.
    """
    for name, value in values.items():
        if value is not None:
            raise InvalidPromptError(f"{name} = {value!r:.80} is not served; {PARAMETERS[name]}")


def with_refused_parameters(method: Method) -> Method:
    """The method with `PARAMETERS` after its positional parameters."""
    signature = inspect.signature(method)
    own = list(signature.parameters.values())
    place = sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in own)
    own[place:place] = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in PARAMETERS
    ]

    @functools.wraps(method)
    def checked(*values: Any, **named: Any) -> Any:
        by_place = dict(zip(PARAMETERS, values[place:], strict=False))
        by_name = {name: named.pop(name) for name in PARAMETERS if name in named}
        refuse_parameters(by_place | by_name)
        return method(*values[:place], *values[place + len(PARAMETERS) :], **named)

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
