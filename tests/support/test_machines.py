"""The machines that other tests stand on: apart from each other and from us, gone afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.machines import SSH_OPTIONS, Machines, wait_until
from support.namespaces import processes_in

pytestmark = pytest.mark.check
TESTS = Path(__file__).parent.parent
PATIENCE_S = 30.0
OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support.machines import Machines
with Machines(2) as machines:
    print(machines.home.parent, *machines.namespaces, flush=True)
    time.sleep(60.0)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines(3) as found:
        yield found


def ssh(machines: Machines, start: int, end: int, command: str) -> str:
    """What a command prints on another machine."""
    done = machines.run(start, f"ssh {SSH_OPTIONS} {machines.addresses[end]} {command}", PATIENCE_S)
    assert done.returncode == 0, done.stdout
    return done.stdout


def is_silent(machines: Machines, start: int, end: int) -> bool:
    """Whether another machine cannot be reached; that none is at that address counts, too."""
    options = f"-o ConnectTimeout=1 {SSH_OPTIONS}"
    done = machines.run(start, f"ssh {options} {machines.addresses[end]} true", PATIENCE_S)
    return done.returncode != 0 and ("timed out" in done.stdout or "No route" in done.stdout)


def test_each_is_a_world_of_its_own(machines: Machines) -> None:
    for machine in range(3):
        machines.run(machine, f"touch ~/mine{machine} /tmp/mine{machine} /dev/shm/mine{machine}")
    for machine in range(3):
        found = machines.run(machine, "cd ~ && ls; ls /tmp/mine*; ls /dev/shm; hostname").stdout
        mine = f"mine{machine}"
        assert found.split() == [mine, f"/tmp/{mine}", mine, f"machine{machine}"]
        processes = machines.run(machine, "ls -d /proc/[0-9]*").stdout.split()
        assert len(processes) < 10, "it sees the processes of others"
        assert machines.run(machine, "ip -brief address").stdout.count("10.77.0.") == 1
    assert not list(Path("/dev/shm").glob("mine[0-9]"))
    assert not {name for _, name in socket.if_nameindex()} & {"switch", "machine0"}


def test_cut_and_killed_ones_are_silent() -> None:
    with Machines(3) as machines:
        machines.cut(1)
        assert is_silent(machines, 0, 1)
        assert machines.run(1, "hostname").stdout == "machine1\n", "it lives, behind its cable"
        assert ssh(machines, 0, 2, "hostname") == "machine2\n"
        machines.kill(2)
        assert is_silent(machines, 0, 2)
        with pytest.raises(RuntimeError, match="machine2 does not run"):
            machines.run(2, "true")


def test_nothing_is_left_after_an_error() -> None:
    machines = Machines(2)
    with pytest.raises(ZeroDivisionError):
        fail_among(machines)
    assert len(machines.namespaces) == 15
    assert not processes_in(machines.namespaces)
    assert not machines.home.parent.exists()


def fail_among(machines: Machines) -> None:
    with machines:
        machines.run(0, "setsid sleep 60 > /dev/null 2>&1 &")
        assert len(processes_in(machines.namespaces)) >= 5
        raise ZeroDivisionError


def test_nothing_runs_on_when_their_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, TESTS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert owner.stdout is not None
    folder, *inside = owner.stdout.readline().split()
    try:
        assert processes_in(inside)
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE_S)
        wait_until(lambda: not processes_in(inside), PATIENCE_S, "processes are left")
    finally:
        owner.kill()
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True, timeout=10.0)
