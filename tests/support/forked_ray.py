"""Workers of Ray in the tests, forked from a template as `forked` does it for programs.

`worker_python` makes the interpreter that Ray starts its workers with: a program that asks a
template for the worker, and ends. The first one of a node starts the template, as a child of the
node's raylet. The workers are the raylet's children, too.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

try:
    from support import forked
except ImportError:  # in the program that asks, which has only its own folder on its path
    import forked  # type: ignore[no-redef]

_SCRIPT = """#!/bin/sh
case "$1" in
*/setup_worker.py | */default_worker.py) exec {python} -S -E {file} {folder} "$@" ;;
esac
exec {python} "$@"
"""


def worker_python(folder: Path) -> Path:
    """A program in this folder that is Python, but forks workers of Ray."""
    path = folder / "python"
    path.write_text(_SCRIPT.format(python=sys.executable, file=__file__, folder=folder))
    path.chmod(0o700)
    return path


def _ask(folder: Path, words: Sequence[str]) -> None:
    """Has the template fork a worker."""
    order = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}
    order |= {"places": [0, 1, 2], "is_session": False}
    address = str(folder / "template")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(address)
            except OSError:  # there is none yet, or it has ended
                Path(address).unlink(missing_ok=True)
                _start(address)
                connection.connect(address)
        forked.ask(connection, order, [0, 1, 2])


def _start(address: str) -> None:
    """Starts the template of this node, which listens at this address from now on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        raylet = os.getppid()
        if forked.fork_sibling() == 0:
            os.setpgid(0, 0)  # Ray ends the group of each worker that has ended
            listener.set_inheritable(True)
            words = ["-m", "support.forked_ray", str(listener.fileno()), str(raylet)]
            os.execve(sys.executable, [sys.executable, *words], forked.template_environment())


def _serve(listener: socket.socket, raylet: int) -> NoReturn:
    """Forks a worker for each connection, until the raylet ends."""
    from tpengine import host

    host.end_with_parent(raylet, "tests-template")
    forked.preload()  # not ray, which keeps the number of a worker's job when it is imported
    while True:
        connection, _ = listener.accept()
        with connection:
            forked.fork_for(connection, partial(_become_worker, listener))


def _become_worker(
    listener: socket.socket, order: Mapping[str, Any], files: Sequence[int]
) -> NoReturn:
    """As Ray's `setup_worker`, if that comes first, but without starting another interpreter."""
    listener.close()
    forked.become(order, files)
    os.setpgid(0, 0)
    from ray._private.runtime_env.context import RuntimeEnvContext

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    is_set_up = Path(order["words"][0]).stem == "setup_worker"
    options, words = parser.parse_known_args(order["words"][is_set_up:])
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context)
    assert not context.command_prefix, context.serialize()
    os.environ.update(context.env_vars)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    else:
        _ask(Path(sys.argv[1]), sys.argv[2:])
