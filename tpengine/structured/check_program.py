"""The program that checks constraints: `python -m` with this module's name.

It reads lines of JSON: first the arguments of a `Vocabulary`, then one order after another, each
with its bounds. It answers each with a line, [error, grammar]; beyond a bound the kernel ends it,
and also when the driver ends, in the middle of a check too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time

from tpengine import host
from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.structured.constraints import Thinking, to_grammar
from tpengine.structured.grammars import Vocabulary


def main() -> None:
    """Serves orders until the input ends. The argument is the number of the driver's process."""
    host.end_with_parent(int(sys.argv[1]), "tpengine-check")
    vocabulary = Vocabulary(*json.loads(sys.stdin.readline()))
    with contextlib.suppress(InvalidSamplingParamsError):  # else each check finds it anew
        vocabulary.load()
    host.bound_resource(resource.RLIMIT_CORE, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # clients must not fill the log of the driver
    first_bytes, _ = host.own_memory_bytes()
    for line in sys.stdin:
        cpu_s, num_bytes, (fields, thinking, special_tokens) = json.loads(line)
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
        print(json.dumps([error_text, grammar]), flush=True)


if __name__ == "__main__":
    main()
