"""The program of a template, from which ranks are forked: `python -m` with this module's name.

Arguments: the driver's process, and the descriptor of a socket of packets in JSON, each of which
has one answer. The first says what to import. Each other one is an order to fork a rank, with
descriptors beside it. The driver's end is `template.Template`.

The template imports what a rank needs, so that a rank starts in some 20 ms, and shares the memory
of the imports with it. It must have a single thread, as only one is forked, and never computes. A
rank is its sibling: a child of the driver, with which it ends, and not with the template.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tpengine import envs, host
from tpengine.executor.rank import import_all

MOST_BYTES = 1 << 18
"""Of an order. The kernel refuses longer ones by default (net.core.wmem_max)."""
_MOST_FILES = 64


def main() -> None:
    """Obeys the driver until it closes its socket."""
    driver, file = map(int, sys.argv[1:])
    host.end_with_parent(driver, "tpengine-template")
    connection = socket.socket(fileno=file)
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, _MOST_FILES)
        if not message:
            return
        order = json.loads(message)
        answer = _fork(connection, order, files) if files else _prepare(order["model_code"])
        if answer is not None:
            connection.send(json.dumps(answer).encode())


def _prepare(model_code: Sequence[str | None]) -> dict[str, Any]:
    """Imports everything; the answer may say why no rank can be forked."""
    gc.disable()  # what is imported stays
    import_all(model_code)
    gc.freeze()  # a collection in a rank would copy all pages
    gc.enable()
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return {"refusal": f"the imports have started {num_threads - 1} threads"}
    return {}


def _fork(
    connection: socket.socket, order: Mapping[str, Any], files: Sequence[int]
) -> dict[str, Any] | None:
    """Forks a rank.

    Args:
        order: has its `program` and its `environment`.
        files: its output, and the ends of its channels.

    Returns:
        Why that cannot be; None: the new process has answered. So the driver learns of each process
        that exists, even if the template is killed in this moment.
    """
    answer: dict[str, Any] | None = None
    try:
        pid = host.fork_sibling()
    except OSError as error:
        answer = {"errno": error.errno, "error": error.strerror}
    else:
        if pid == 0:
            connection.send(json.dumps({"pid": os.getpid()}).encode())
            connection.close()
            _become(order["program"], order["environment"], files)
    for file in files:
        os.close(file)
    return answer


def _become(program: str, environment: dict[str, str], files: Sequence[int]) -> NoReturn:
    """Becomes what a new interpreter with this program is, with its imports."""
    os.setsid()  # a signal to the template's group is the template's alone
    output, *channels = files
    for place in (1, 2):
        os.dup2(output, place)
    os.close(output)
    envs.replace(environment)
    np.random.seed()  # its siblings have the same state; Python's own is made anew by the fork
    sys.argv = [program, sys.argv[1], *map(str, channels)]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
