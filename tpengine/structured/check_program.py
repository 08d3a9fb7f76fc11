"""The program that checks constraints: `python -m` with this module's name.

Its setup are the arguments of a `Vocabulary`. An order is a constraint with its bounds, as JSON;
the answer is [error, grammar]. Beyond a bound the kernel ends it, and also when the driver ends, in
the middle of a check too; see `host.Helper`.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable
from typing import Any

from tpengine import host
from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.structured.constraints import Thinking, to_grammar
from tpengine.structured.grammars import Vocabulary


def begin(*arguments: Any) -> Callable[[bytes], bytes]:
    """Makes the vocabulary, of its own arguments; returns what answers an order."""
    vocabulary = Vocabulary(*arguments)
    with contextlib.suppress(InvalidSamplingParamsError):  # else each check finds it anew
        vocabulary.load()
    first_bytes, _ = host.own_memory_bytes()

    def answer(order: bytes) -> bytes:
        cpu_s, num_bytes, (fields, thinking, special_tokens) = json.loads(order)
        # With the stacks of threads that have just ended, which may not be free yet.
        own_bytes = min(host.own_memory_bytes()[0], first_bytes + num_bytes)
        host.bound_resource(resource.RLIMIT_AS, own_bytes + num_bytes)
        host.bound_resource(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)
        error_text = grammar = ""
        try:
            constraint = StructuredOutputsParams(**fields)
            # Without a thought first: it would hide that no answer begins.
            for part in dict.fromkeys((Thinking.NONE, Thinking[thinking])):
                grammar = to_grammar(constraint, part, special_tokens)
                vocabulary.matcher(grammar)
                vocabulary.compile((), [grammar])
        except InvalidSamplingParamsError as error:
            error_text = str(error)
        return json.dumps([error_text, grammar]).encode()

    return answer


if __name__ == "__main__":
    host.answer_orders("tpengine-check", begin)
