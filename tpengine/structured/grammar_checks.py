"""Checks of constraints in processes that can be ended: the driver's side.

Constraints come from clients. Some of a few hundred bytes are read or compiled for hours, and take
ever more memory, and a thread cannot be ended. So each is read and compiled first in a process with
bounds on both. What stays within them, rank 0 compiles too.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence

from tpengine import envs
from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import StructuredOutputsParams
from tpengine.structured import check_program
from tpengine.structured.constraints import Thinking
from tpengine.structured.grammars import Vocabulary, refusal

CPU_S, MEMORY_BYTES = 5, 1 << 29
"""Of one check: processor time, in whole seconds, and memory beside the stack. Most checks take
some milliseconds and MB."""
_MAX_KNOWN, _MAX_IDLE = 64, 2
_WAIT_S = 120.0
"""Longest wait for an answer, where a check gets little of a processor."""
_END_S = 5.0
_BEYOND = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
"""How a process ends that exceeds a bound: of its time, its memory, its stack."""
_Answer = tuple[str, str]
"""The text of an error, or empty, and the grammar."""


class GrammarChecks:
    """Makes grammars of constraints, and checks that they compile. Any thread may use it.

    A process is started for the first check, and kept for later ones. The answers about
    the latest 64 constraints are remembered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Vocabulary, str], _Answer] = OrderedDict()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._is_closed = False

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
        """
        name = "structured_outputs"
        try:
            order = json.dumps([vars(constraint), thinking.name, list(special_tokens)])
        except (RecursionError, TypeError, ValueError) as error:
            text = f"{name}.{constraint.kinds[0]} cannot be read: {error!s:.300}"
            raise InvalidSamplingParamsError(text, field=name) from error
        key = vocabulary, order
        with self._lock:
            answer = self._known.pop(key, None)
        try:
            answer = answer or self._ask(vocabulary, order)
        except OSError as error:
            raise refusal(f"no process checks it: {error}; try again later") from error
        with self._lock:
            self._known[key] = answer
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        error_text, grammar = answer
        if error_text:
            raise InvalidSamplingParamsError(error_text, field=name)
        return grammar

    def close(self) -> None:
        """Ends the processes, also those that are busy."""
        with self._lock:
            self._is_closed = True
            for process in self._busy:  # the threads that use them end them
                process.kill()
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, vocabulary: Vocabulary, order: str) -> _Answer:
        process = self._take(vocabulary)
        line = process.ask(f"[{CPU_S}, {MEMORY_BYTES}, {order}]")
        if line:
            self._put(process, process)
            error_text, grammar = json.loads(line)
            return error_text, grammar
        code = process.end()
        self._put(process, _Process(vocabulary))  # so that the next check need not wait for it
        if code not in _BEYOND:
            raise refusal(f"the process that checks it has ended ({code}); try again later")
        bounds = f"{CPU_S} s of a processor or {MEMORY_BYTES >> 20} MiB of memory"
        return str(refusal(f"its check takes more than {bounds}; give a simpler one")), ""

    def _take(self, vocabulary: Vocabulary) -> _Process:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.vocabulary is not vocabulary or not process.is_alive:
            if process is not None:
                process.end()
            process = _Process(vocabulary)
        with self._lock:
            self._busy.add(process)
        return process

    def _put(self, former: _Process, process: _Process) -> None:
        """Keeps a process, in place of one that was busy, for the next check."""
        with self._lock:
            self._busy.discard(former)
            if not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(process)
                return
        process.end()


class _Process:
    """A process that checks constraints, one after another; see `check_program.py`.

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
                [sys.executable, "-P", "-m", check_program.__name__],  # -P: as for ranks
                stdin=theirs,
                stdout=theirs,
                env=envs.for_children(),
                start_new_session=True,  # a Ctrl-C at the terminal is the driver's alone
            )
        self._send(json.dumps(vocabulary.__reduce__()[1]))

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, order: str) -> str:
        """The answer to an order, as JSON; empty: it has ended, or takes too long."""
        try:
            self._send(order)
            return self._answers.readline()
        except OSError:
            return ""

    def kill(self) -> None:
        """Ends it; a thread that waits for its answer gets an empty one."""
        self._process.kill()

    def end(self) -> int:
        """Ends it and frees what it holds; returns how it has ended, as `subprocess` says it."""
        self.kill()
        self._answers.close()
        self._socket.close()
        return self._process.wait(_END_S)

    def _send(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())
