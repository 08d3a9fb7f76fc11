"""Checks of constraints in processes that can be ended: the driver's side.

Constraints come from clients. Some of a few hundred bytes are read or compiled for hours, and take
ever more memory, and a thread cannot be ended. So each is read and compiled first in a process with
bounds on both. What stays within them, rank 0 compiles too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
from collections.abc import Sequence

from tpengine import envs, host
from tpengine.errors import InvalidSamplingParamsError, RequestFailedError
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.structured import check_program
from tpengine.structured.constraints import Thinking
from tpengine.structured.grammars import STACK_BYTES, Vocabulary, refusal

CPU_S, MEMORY_BYTES = 5, 2 * STACK_BYTES + (1 << 28)
"""Of one check: processor time, in whole seconds, and address space. Most checks take some
milliseconds and MB. A thread that ends may still have its stack when the next one starts."""
_MAX_KNOWN = 64
_WAIT_S = 120.0
"""Longest wait for an answer, where a check gets little of a processor."""
_BEYOND = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
"""How a process ends that exceeds a bound: of its time, its memory, its stack."""
_Answer = tuple[str, str]
"""The text of an error, or empty, and the grammar."""


class GrammarChecks:
    """Makes grammars of constraints, and checks that they compile.

    Its processes are started when no idle one is left, and kept for later checks. The answers about
    the latest 64 constraints are remembered.
    """

    def __init__(self) -> None:
        self._answer = functools.lru_cache(_MAX_KNOWN)(self._ask)
        self._idle: list[_Checker] = []
        self._busy: set[_Checker] = set()

    def check(
        self,
        vocabulary: Vocabulary,
        constraint: StructuredOutputsParams,
        thinking: Thinking,
        special_tokens: Sequence[str],
    ) -> str:
        """Returns a constraint as `constraints.to_grammar` does, from the same arguments, after it
        was compiled once.

        Raises:
            InvalidSamplingParamsError: it is wrong, or beyond a limit of the library or of checks.
            RequestFailedError: no process has checked it.
        """
        try:
            order = json.dumps([vars(constraint), thinking.name, list(special_tokens)])
        except (RecursionError, TypeError, ValueError) as error:
            raise refusal(f"{constraint.kinds[0]} cannot be read: {error!s:.300}") from error
        error_text, grammar = self._answer(vocabulary, order)
        if error_text:
            raise InvalidSamplingParamsError(error_text, field="structured_outputs")
        return grammar

    def close(self) -> None:
        """Ends the processes; a check that goes on fails."""
        for process in (*self._idle, *self._busy):
            process.end()

    def _ask(self, vocabulary: Vocabulary, order: str) -> _Answer:
        try:
            process = self._take(vocabulary)
        except (OSError, RuntimeError) as error:
            raise _failure(f"no process checks it: {error}") from error
        self._busy.add(process)
        try:
            answer = process.ask(f"[{CPU_S}, {MEMORY_BYTES}, {order}]".encode(), _WAIT_S)
        except OSError as error:
            code = process.end()
            if code not in _BEYOND:
                raise _failure(f"the process that checks it has ended ({code})") from error
            bounds = f"{CPU_S} s of a processor or {MEMORY_BYTES >> 20} MiB of memory"
            return str(refusal(f"its check takes more than {bounds}; give a simpler one")), ""
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        error_text, grammar = json.loads(answer)
        return error_text, grammar

    def _take(self, vocabulary: Vocabulary) -> _Checker:
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.vocabulary is vocabulary and process.is_idle:
                    return process
                process.end()
        return _Checker(vocabulary)


class _Checker(host.Helper):
    """A process that checks constraints; see `check_program.py`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(check_program.__name__, vocabulary.__reduce__()[1], envs.for_children())
        self.vocabulary = vocabulary


def _failure(text: str) -> RequestFailedError:
    return RequestFailedError(f"structured_outputs: {text}; try again later")
