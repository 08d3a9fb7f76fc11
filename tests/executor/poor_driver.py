"""A driver of two ranks in its own Ray, whose machine lacks one thing after another.

Its arguments: a model's folder and the names of the scenarios. It prints the process numbers below
it, then for each scenario whether the tokens were those of an undisturbed run, and the failed
attempts that it took. Its /dev/shm is small.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from support.namespaces import process_table

from executor.ray_engines import executor_of, is_alive, ray_engine
from tpengine import LLMEngine, SamplingParams
from tpengine.executor.launch import ray_calls

NUM_TOKENS, NUM_STREAMS = 100, 8
BEFORE = 5
"""Steps before the loss."""
RAY_CALL_S, ANSWER_S = 12.0, 4.0
MIB = 1 << 20
LIMIT_S, END_S = 120.0, 10.0


class Attempts(logging.Handler):
    """Notes the reports of attempts at a group that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("attempt "):
            self.reports.append(text)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A disk with 1 MiB left."""
    path = folder / "ballast"
    facts = os.statvfs(folder)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - MIB)
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def limited(kind: int, at_most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (at_most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def frozen(name: str) -> Iterator[None]:
    """Stops a process of Ray's, for good."""
    [pid] = [pid for pid, found in below(os.getpid()).items() if found == name]
    os.kill(pid, signal.SIGSTOP)
    yield


def below(root: int) -> dict[int, str]:
    """Names of the processes below one that have not ended, by number."""
    found, parents = {}, {root}
    table = process_table()
    while parents:
        parents = {pid for pid, (_, _, parent) in table.items() if parent in parents}
        found |= {pid: table[pid][0] for pid in parents if table[pid][1] not in "ZX"}
    return found


def generate(
    engine: LLMEngine, begin: Callable[[], None] = lambda: None, look: Callable[[], None] = print
) -> list[list[int]]:
    """The tokens of greedy requests.

    Args:
        begin: called after some steps.
        look: called after each step from then on.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for first in range(NUM_STREAMS):
        engine.add_request(str(first), None, params, prompt_token_ids=[5 + first, 6, 7])
    found: dict[str, list[int]] = {}
    number, deadline = 0, time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        outputs = engine.step()
        number += 1
        if number == BEFORE:
            begin()
        elif number > BEFORE:
            look()
        ended = [output for output in outputs if output.finished]
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in ended}
        if len(found) == NUM_STREAMS:
            return [found[str(first)] for first in range(NUM_STREAMS)]
    raise AssertionError(f"not finished within {LIMIT_S:g} s")


class Lack:
    """Kills a rank, and lets the machine lack something until an attempt at a new group has failed
    or succeeded.

    Args:
        waits: until the old ranks have ended, as they give free what the new ones are to lack.
    """

    def __init__(
        self,
        engine: LLMEngine,
        lack: AbstractContextManager[None],
        attempts: Attempts,
        waits: bool,
    ) -> None:
        self._engine, self._attempts = engine, attempts
        self._stack, self._lack, self._waits = ExitStack(), lack, waits
        self._places = executor_of(engine).places
        self._before = engine.health().num_recoveries

    def begin(self) -> None:
        if not self._waits:
            self._stack.enter_context(self._lack)
        os.kill(self._places[1].pid, signal.SIGKILL)

    def look(self) -> None:
        if self._waits and not any(is_alive(self._places)):
            self._waits = False
            self._stack.enter_context(self._lack)
        if self._attempts.reports or self._engine.health().num_recoveries > self._before:
            self._stack.close()


def main(folder: str, *names: str) -> None:
    attempts = Attempts()
    logging.getLogger("tpengine.engine.recovery").addHandler(attempts)
    ray_calls.RAY_CALL_S, ray_calls._ANSWER_S = RAY_CALL_S, ANSWER_S
    lacks = {
        "shared memory nearly full": lambda: full(Path("/dev/shm")),
        "no descriptors": lambda: limited(resource.RLIMIT_NOFILE, 16),  # all of these are open
        "store frozen": lambda: frozen("gcs_server"),
        "nothing": nullcontext,
    }
    with ray_engine(folder, 2, ray_address="local") as engine:
        tell([below(os.getpid()), [str(line) for line in executor_of(engine).nodes]])
        expected = generate(engine, look=lambda: None)
        for name in names:
            attempts.reports.clear()
            lack = Lack(engine, lacks[name](), attempts, waits="shared memory" in name)
            start = time.monotonic()
            token_ids = generate(engine, lack.begin, lack.look)
            took_s = round(time.monotonic() - start, 1)
            tell([name, token_ids == expected, attempts.reports, took_s])
        tell(generate(engine, look=lambda: None) == expected)
    deadline = time.monotonic() + END_S  # Ray kills its processes and does not wait for their end
    while (left := list(below(os.getpid()).values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    tell(left)


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
