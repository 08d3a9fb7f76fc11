"""The driver's side of a template, from which ranks are forked.

Its program is `template_process`; the head there says what a template is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpengine import envs
from tpengine.executor.launch import children, template_process

_PROGRAM = template_process.__name__
_ANSWER_S = 5.0
"""How long an order may take. A fork takes some 20 ms; a stopped template never answers."""
_Answer = Mapping[str, Any]


class Template(children.Child):
    """A process that imports what a rank needs, and from which ranks are forked; see also
    `spares.Spare`.

    Args:
        model_code: see `EngineConfig`.
        on_end: called with it, in a thread, once, when the process has ended, for any reason.

    Raises:
        OSError, RuntimeError: the system starts no process or thread.
    """

    def __init__(
        self,
        starter: children.Starter,
        model_code: Sequence[str | None],
        on_end: Callable[[Template], None],
    ) -> None:
        self._on_end = on_end
        self._prepared: _Answer | None = None  # None: it still imports
        self._lock = threading.Lock()  # one order at a time
        self._orders, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = starter.start_process(_PROGRAM, [end], envs.SINGLE_THREAD)
            super().__init__("template", process)
            self._send({"model_code": model_code})
        except BaseException:
            self._orders.close()
            raise

    def _copy(self) -> None:
        """See `Child`."""
        super()._copy()
        self._on_end(self)

    def is_prepared(self) -> bool:
        """Whether it has imported everything, or has ended; does not wait."""
        with self._lock:
            if self._prepared is None:
                try:
                    self._prepared = self._receive(0.0)
                except BlockingIOError:
                    return False
                except OSError as error:
                    self._prepared = {"error": str(error)}
        return True

    @property
    def has_imported(self) -> bool:
        """Whether it imported everything, whatever came later."""
        return self.is_prepared() and "error" not in (self._prepared or {})

    @property
    def refusal(self) -> str | None:
        """Why no template of this engine can fork; None: it can, or it still imports."""
        return None if self._prepared is None else self._prepared.get("refusal")

    def fork(self, program: str, ends: Sequence[children.End]) -> children.ForkedProcess:
        """Forks a process; see `Starter.start_process`. The ends are closed if it succeeds.

        Raises:
            OSError: the system forks no process; or the template has not answered, and is killed.
        """
        order = {"program": program, "environment": envs.for_children()}
        source, sink = os.pipe2(os.O_CLOEXEC)
        try:
            answer = self._ask(order, [sink, *(end.fileno() for end in ends)])
            process = children.ForkedProcess(answer["pid"], source)
        except BaseException:
            os.close(source)
            raise
        finally:
            os.close(sink)
        for end in ends:
            end.close()
        return process

    def _ask(self, order: _Answer, files: Sequence[int]) -> _Answer:
        """Sends an order with descriptors, and returns its answer."""
        with self._lock:
            try:
                self._send(order, files)
                answer = self._receive(_ANSWER_S)
            except BaseException:  # the next order would get this one's answer
                self._end_all()
                raise
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"])
        return answer

    def _send(self, order: _Answer, files: Sequence[int] = ()) -> None:
        self._orders.settimeout(_ANSWER_S)
        socket.send_fds(self._orders, [json.dumps(order).encode()], files)

    def _receive(self, timeout_s: float) -> _Answer:
        self._orders.settimeout(timeout_s)
        message = self._orders.recv(template_process.MOST_BYTES)
        if not message:
            raise ConnectionResetError("the template process has ended")
        answer: _Answer = json.loads(message)
        return answer

    def end(self) -> None:
        """Kills it, and a process that it has forked without its driver's knowledge."""
        super().end()  # at once, so that an order ends its wait
        with self._lock:
            self._end_all()

    def _end_all(self) -> None:
        super().end()
        with self._orders, contextlib.suppress(OSError, subprocess.TimeoutExpired):
            while True:  # until it has ended
                answer = self._receive(children.REAP_S)
                if "pid" in answer:
                    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                    children.end_process(children.ForkedProcess(answer["pid"], nothing))
