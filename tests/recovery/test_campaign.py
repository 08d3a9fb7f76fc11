"""Faults of ranks, and below them, one after another while eight streams run on two ranks: every
stream goes on with the right tokens, and nothing is left over.

`pytest -s tests/recovery/test_campaign.py` prints the whole table; `make test` has a few of its
rows. All faults come from outside the driver, which runs in a mount namespace of its own with small
disks.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from executor.driver_process import DriverProcess
from support.models import ModelShop
from support.namespaces import process_table
from support.programs import PYTHONPATH
from support.waiting import wait_until
from support.zoo import PLAIN

from recovery.campaign_driver import NUM_STREAMS, NUM_TOKENS
from recovery.on_ray.processes import actors

HERE = Path(__file__).parent
SMALL = """
mount -t tmpfs -o size=300m,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=100m tmpfs "$TMPDIR"
exec "$@"
"""
START_S, ROW_S, SETTLE_S = 300.0, 300.0, 30.0
FROZEN_STORE_S = 12.0
FULL_S = 9.0
OUTLIVE_S = 70.0
"""Longer than Ray waits for its control store before it ends a process."""
SILENT_DRIVER_S = 7.0
"""Longer than a rank waits for a heartbeat of its driver."""
OUTLAST = 1.15
"""How long the streams last, in multiples of the fault; and a second more."""
MIB = 1 << 20
LEFT_MIB = 6
"""Address space that is left: too little for a thread's stack, enough for Ray's own code, which
aborts the driver where it cannot allocate."""
SECRETS = {"TPENGINE_TOKENS": "s3cret-of-a-client", "TPENGINE_ADMIN_TOKEN": "s3cret-of-admin"}
"""Of the driver's environment, which no process that it starts may have."""
WITHOUT_RAY = ("from now on the ranks run as processes",)
RANKS = {"ray": "ray::RayWorker", "processes": "tpengine-rank"}
"""Beginning of the name of a rank's process, by what has started it."""


@dataclass(frozen=True)
class Row:
    """One fault, or two at once.

    Attributes:
        lose: ranks that get the signal.
        below: the fault below the ranks, see `Campaign.fault`.
        hold_s: how long that fault lasts at least; it also lasts until one of `traces` is there.
        moment: what the streams do then; `rebuild`: a rank of the next group is lost as well.
        traces: of which the driver's log has one, so that the fault was not too weak.
    """

    name: str
    lose: tuple[int, ...] = ()
    signal: signal.Signals = signal.SIGKILL
    below: str = ""
    hold_s: float = 0.0
    moment: str = "decode"
    traces: tuple[str, ...] = ()

    def has_trace(self, log: str) -> bool:
        return not self.traces or any(trace in log for trace in self.traces)


def of_ranks() -> Iterator[Row]:
    signals = {"killed": "SIGKILL", "frozen": "SIGSTOP", "SEGV": "SIGSEGV", "TERM": "SIGTERM"}
    for what, number in signals.items():
        for lose, name in (((0,), "rank 0"), ((1,), "rank 1"), ((0, 1), "both ranks")):
            yield Row(f"{name} {what}", lose, signal.Signals[number])
    yield Row("rank 1 killed in prefill", (1,), moment="prefill")
    yield Row("rank 0 killed in prefill", (0,), moment="prefill")
    yield Row("a rank killed again in recovery", (1,), moment="rebuild")


def below_ranks(executor: str) -> Iterator[Row]:
    faults = {"driver frozen": SILENT_DRIVER_S}
    if executor == "ray":
        faults |= {"GCS frozen": FROZEN_STORE_S, "raylet frozen": FROZEN_STORE_S}
    for name, hold_s in faults.items():
        yield Row(name, (), below=name, hold_s=hold_s)
        traces = WITHOUT_RAY if name == "GCS frozen" else ()
        yield Row(f"{name}, rank 1 killed", (1,), below=name, hold_s=hold_s, traces=traces)
    lacks = {
        "shm nearly full": (),
        "shm full": (),
        "disk full": WITHOUT_RAY if executor == "ray" else (),
        "no descriptors": ("errno 24", "Too many open files"),
        # A rank that is replaced alone on this machine takes no memory of the driver.
        "no memory": ("attempt 1 at",) if executor == "ray" else (),
    }
    for name, traces in lacks.items():
        yield Row(f"{name}, rank 1 killed", (1,), below=name, hold_s=FULL_S, traces=traces)
    if executor == "ray":  # after these it needs another Ray
        yield Row("GCS and rank 1 killed", (1,), below="GCS killed", hold_s=1.0, traces=WITHOUT_RAY)
        for name in ("GCS killed", "raylet killed"):
            yield Row(name, (), below=name, hold_s=OUTLIVE_S)
            yield Row(f"{name}, rank 1 killed", (1,), below=name, hold_s=OUTLIVE_S)


def rows() -> Iterator[Any]:
    """One of each executor is for `make test`, one is for `make check`, the others are for `make
    soak`."""
    few = {"processes": "a rank killed again in recovery", "ray": "GCS and rank 1 killed"}
    for executor, name in few.items():
        for row in (*of_ranks(), *below_ranks(executor)):
            marks = [] if row.name == name else [pytest.mark.soak]
            if row.below == "disk full" and executor == "ray":
                marks = [pytest.mark.check]
            yield pytest.param(executor, row, id=f"{executor}-{row.name}", marks=marks)


def keep_full(folder: Path, left_mib: float, is_over: Callable[[], bool]) -> None:
    """Leaves so much room on a disk for a time, whatever others give free meanwhile."""
    path = folder / "ballast"
    size = 0

    def fill() -> bool:
        nonlocal size
        facts = os.statvfs(folder)
        more = facts.f_bavail * facts.f_frsize - int(left_mib * MIB)
        if more > 0:
            with suppress(OSError):  # others were faster
                os.posix_fallocate(file.fileno(), size, more)
                size += more
        return is_over()

    try:
        with path.open("wb") as file:
            wait_until(fill, ROW_S, "the fault left no trace", poll_s=0.005)
    finally:
        path.unlink()


class Campaign:
    """One driver, and the machine as it sees it.

    Attributes:
        is_hurt: it cannot serve another row.
    """

    def __init__(self, model: Path, executor: str, log: Path) -> None:
        self.log = log
        self.is_hurt = False
        self.executor = executor
        # Ray's sockets lie in this folder, and their paths must be short.
        self.folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
        self._mark = uuid.uuid4().hex
        environment = {**os.environ, **SECRETS, "PYTHONPATH": PYTHONPATH, "MARK": self._mark}
        environment |= {"TMPDIR": self.folder, "RAY_TMPDIR": self.folder}
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        program = [sys.executable, HERE / "campaign_driver.py", model, executor, "local"]
        command = ["unshare", "--mount", "--propagation=private", *as_root, "sh", "-ec", SMALL]
        with log.open("ab") as file:
            self.driver = DriverProcess(
                [*command, "sh", *program], env=environment, stderr=file, stdin=subprocess.PIPE
            )
        self.pid = self.driver.process.pid
        self.root = Path(f"/proc/{self.pid}/root")
        self.driver.hear(START_S)
        self._before = self._holdings()
        for pid in set(self.marked()) - {self.pid}:
            with suppress(OSError):  # it has ended
                assert b"s3cret" not in Path(f"/proc/{pid}/environ").read_bytes(), name_of(pid)

    def play(self, row: Row) -> tuple[int, float, int, str, str]:
        """Returns how many streams were right, the longest gap, the number of groups that
        were begun, the error that ended the engine, and what the driver logged."""
        begin = self.log.stat().st_size

        def log() -> str:
            return self.log.read_bytes()[begin:].decode(errors="replace")

        pace_s = (row.hold_s * OUTLAST + 1.0) / NUM_TOKENS
        self.driver.say("prefill" if row.moment == "prefill" else "decode", pace_s)
        ranks = self.driver.hear(ROW_S)
        known = self.ranks()
        assert known, f"no rank was started by {self.executor}"
        with ExitStack() as stack:
            fault = self.fault(row.below, stack)
            for rank in row.lose:
                os.kill(ranks[rank][1], row.signal)
            if row.moment == "rebuild":
                self._kill_again(known)
            end_at = time.monotonic() + row.hold_s
            fault(lambda: time.monotonic() >= end_at and row.has_trace(log()))
        try:
            same, gap_s, num_groups, error, *_ = self.driver.hear(ROW_S)
        except AssertionError:
            same, gap_s, num_groups, error = 0, 0.0, 0, "the driver ended"
        except queue.Empty:
            same, gap_s, num_groups, error = 0, 0.0, 0, f"not finished within {ROW_S:g} s"
        self.is_hurt = bool(error)
        return same, gap_s, num_groups, error, log()

    def fault(self, name: str, stack: ExitStack) -> Callable[[Callable[[], bool]], None]:
        """Begins a fault, which the stack ends; returns what waits until it is over."""
        who, _, what = name.partition(" ")
        if what in ("frozen", "killed"):
            pid = {"driver": self.pid}.get(who) or self._of_ray(who)
            os.kill(pid, signal.SIGSTOP if what == "frozen" else signal.SIGKILL)
            if what == "frozen":
                stack.callback(os.kill, pid, signal.SIGCONT)
        elif who == "no":
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
            kind, at_most = {
                "descriptors": (resource.RLIMIT_NOFILE, 8),  # most of these are open
                "memory": (resource.RLIMIT_AS, pages * resource.getpagesize() + LEFT_MIB * MIB),
            }[what]
            before = resource.prlimit(self.pid, kind)
            resource.prlimit(self.pid, kind, (at_most, before[1]))
            stack.callback(resource.prlimit, self.pid, kind, before)
        elif name:
            folder = self.root / ("dev/shm" if who == "shm" else self.folder[1:])
            left_mib = 1.0 if "nearly" in name else 0.0
            return lambda is_over: keep_full(folder, left_mib, is_over)
        return lambda is_over: wait_until(is_over, ROW_S, "the fault left no trace")

    def _of_ray(self, who: str) -> int:
        name = {"GCS": "gcs_server"}.get(who, who)
        [pid] = [pid for pid in self.marked() if name_of(pid) == name]
        return pid

    def _kill_again(self, known: set[int]) -> None:
        """Kills one rank of the next group, at some moment of its start."""
        wait_until(lambda: bool(self.ranks() - known), ROW_S, "there is no new rank", poll_s=0.005)
        rng = random.Random(len(known))
        new = sorted(self.ranks() - known)
        time.sleep(rng.uniform(0.0, 1.0))
        with suppress(ProcessLookupError):
            os.kill(rng.choice(new), signal.SIGKILL)

    def ranks(self) -> set[int]:
        """Ranks that the campaign's executor has started; others take their place without Ray."""
        return set(filter(self.is_rank, actors(self.pid)))

    def is_rank(self, pid: int) -> bool:
        return name_of(pid).startswith(RANKS[self.executor])

    def marked(self) -> list[int]:
        """Processes that the driver has started, and those that they have."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"MARK={self._mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return pids

    def _holdings(self) -> Counter[str]:
        """What of ours a row may leave over."""
        counts = Counter("rank" if self.is_rank(pid) else name_of(pid) for pid in actors(self.pid))
        for file in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                counts[os.readlink(file).partition(":")[0].partition(".")[0]] += 1
        own = [state for _, state, parent in process_table().values() if parent == self.pid]
        counts["zombies"] = own.count("Z")
        files = {path.name for path in (self.root / self.folder[1:]).iterdir()}
        counts["files"] = len(files - {"ray"})
        return counts

    def left_over(self, row: Row) -> str:
        """What there is more of than after the start, once it has settled. A driver that has lost
        its Ray, or no longer has it start ranks, serves no other row."""
        if row.below.endswith("killed") or not self.ranks():
            self.is_hurt = True
            return self.end()
        deadline = time.monotonic() + SETTLE_S
        while (left := self._holdings() - self._before) and time.monotonic() < deadline:
            time.sleep(0.1)
        return ", ".join(f"{count} {name}" for name, count in sorted(left.items())) or "nothing"

    def end(self) -> str:
        """Ends the driver; returns what it leaves over."""
        self.driver.say("end", 0.0)
        assert self.driver.hear(START_S) == "closed"
        left = [f"process {name_of(pid)}" for pid in actors(self.pid)]
        own_ray = {"gcs_server", "raylet"}
        wait_until(lambda: own_ray.isdisjoint(map(name_of, self.marked())), SETTLE_S)
        self.driver.say()
        assert self.driver.process.wait(START_S) == 0
        deadline = time.monotonic() + SETTLE_S
        while self.marked() and time.monotonic() < deadline:
            time.sleep(0.1)
        left += [f"process {name_of(pid)}" for pid in self.marked()]
        left += [f"folder {path.name}" for path in Path(self.folder).iterdir()]
        return ", ".join(left) or "nothing"

    def close(self) -> None:
        self.driver.end()
        for pid in self.marked():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Campaigns:
    """The driver of the present executor; another one when that one is hurt."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._running: Campaign | None = None

    def of(self, executor: str) -> Campaign:
        running = self._running
        if running is not None and (running.is_hurt or executor != running.executor):
            self.close()
        if self._running is None:
            self._running = Campaign(self._model, executor, self._folder / f"{executor}.log")
        return self._running

    def close(self) -> None:
        campaign, self._running = self._running, None
        if campaign is None:
            return
        try:
            if not campaign.is_hurt:
                left = campaign.end()
                print(f"| {campaign.executor} | after the end of the driver | | | | {left} |")
                assert left == "nothing"
        finally:
            campaign.close()


@pytest.fixture(scope="module")
def campaigns(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaigns]:
    campaigns = Campaigns(models.folder(PLAIN), tmp_path_factory.mktemp("campaign"))
    print("\n| executor | fault | streams equal | longest gap, s | groups | left over |")
    print("|---|---|---|---|---|---|")
    yield campaigns
    campaigns.close()


@pytest.mark.timeout(START_S + 2 * ROW_S + OUTLIVE_S)
@pytest.mark.parametrize(("executor", "row"), rows())
def test_every_stream_goes_on(executor: str, row: Row, campaigns: Campaigns) -> None:
    campaign = campaigns.of(executor)
    same, gap_s, num_groups, error, log = campaign.play(row)
    left = "" if campaign.is_hurt else campaign.left_over(row)
    print(
        f"| {executor} | {row.name} | {same} of {NUM_STREAMS} | {gap_s:.1f} | {num_groups} "
        f"| {error[:300] or left} |",
        flush=True,
    )
    assert (same, error) == (NUM_STREAMS, ""), log[-4000:]
    assert num_groups >= bool(row.lose) + (row.moment == "rebuild")
    assert gap_s >= 0.9 * row.hold_s * row.below.startswith("driver"), "the driver was not frozen"
    assert row.has_trace(log), log[-4000:]
    assert left in ("", "nothing")


@pytest.mark.soak
@pytest.mark.parametrize("executor", RANKS)
def test_driver_killed_while_it_rebuilds(executor: str, models: ModelShop, tmp_path: Path) -> None:
    """No rank outlives it, not even one that has just been started."""
    campaign = Campaign(models.folder(PLAIN), executor, tmp_path / "log")
    try:
        campaign.driver.say("decode", 0.02)
        ranks, known = campaign.driver.hear(ROW_S), campaign.ranks()
        os.kill(ranks[1][1], signal.SIGKILL)
        wait_until(lambda: bool(campaign.ranks() - known), ROW_S)
        campaign.driver.end()
        wait_until(lambda: not any(map(campaign.is_rank, campaign.marked())))
    finally:
        campaign.close()
