"""Checks of constraints in processes that can be ended: the driver's side.

Constraints come from clients. Some of a few hundred bytes are read or compiled for hours, and take
ever more memory, and a thread cannot be ended. So each is read and compiled first in a process with
bounds on both. What stays within them, rank 0 compiles too.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from tpengine import envs
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
_END_S = 5.0
_BEYOND = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
"""How a process ends that exceeds a bound: of its time, its memory, its stack."""
_Answer = tuple[str, str]
"""The text of an error, or empty, and the grammar."""


class GrammarChecks:
    """Makes grammars of constraints, and checks that they compile.

    Each thread that uses it has a process, which is started for its first check and kept for later
    ones. The answers about the latest 64 constraints are remembered.
    """

    def __init__(self) -> None:
        self._answer = functools.lru_cache(_MAX_KNOWN)(self._ask)
        self._processes: dict[int, _Process] = {}  # by thread

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
        for process in tuple(self._processes.values()):
            process.end()

    def _ask(self, vocabulary: Vocabulary, order: str) -> _Answer:
        process = self._processes.get(threading.get_ident())
        try:
            if process is None or process.vocabulary is not vocabulary or process.has_ended:
                process = self._start(vocabulary)
            line = process.ask(f"[{CPU_S}, {MEMORY_BYTES}, {order}]")
            if line:
                error_text, grammar = json.loads(line)
                return error_text, grammar
            code = process.end()
            if code in _BEYOND:
                self._start(vocabulary)  # so that the next check need not wait for it
                bounds = f"{CPU_S} s of a processor or {MEMORY_BYTES >> 20} MiB of memory"
                return str(refusal(f"its check takes more than {bounds}; give a simpler one")), ""
            failure = f"the process that checks it has ended ({code})"
        except OSError as error:
            failure = f"no process checks it: {error}"
        raise RequestFailedError(f"structured_outputs: {failure}; try again later")

    def _start(self, vocabulary: Vocabulary) -> _Process:
        # Those of threads that have ended have ended as well; forgotten, they are no zombies.
        for thread, process in tuple(self._processes.items()):
            if process.has_ended:
                self._processes.pop(thread, None)
        process = self._processes[threading.get_ident()] = _Process(vocabulary)
        return process


class _Process:
    """A process that checks constraints, one after another; see `check_program.py`. It ends when
    this object is dropped, or with the thread that started it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_WAIT_S)
        self._answers = self._socket.makefile()
        with theirs:
            self._process = subprocess.Popen(
                # -P: as for ranks
                [sys.executable, "-P", "-m", check_program.__name__, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=envs.for_children(),
                start_new_session=True,  # a Ctrl-C at the terminal is the driver's alone
            )
        self._send(json.dumps(vocabulary.__reduce__()[1]))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, order: str) -> str:
        """The answer to an order, as JSON; empty: it has ended, or takes too long."""
        try:
            self._send(order)
            return self._answers.readline()
        except OSError:
            return ""

    def end(self) -> int:
        """Ends it; returns how it has ended, as `subprocess` says it."""
        self._process.kill()
        return self._process.wait(_END_S)

    def _send(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())
