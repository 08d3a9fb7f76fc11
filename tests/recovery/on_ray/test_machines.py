"""A machine is cut off, another loses its power: the ranks go on elsewhere, and only once.

Four machines and two ranks; after the first loss three are left, with one to spare.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.machines import Machines, wait_until

DRIVER = Path(__file__).with_name("machine_driver.py")
NUM_MACHINES = 4
HEAD = "10.77.0.254"
START_S, LINE_S, FENCE_S = 120.0, 90.0, 15.0
RAY = (
    "ray start {} --num-cpus={} --object-store-memory=80000000 --disable-usage-stats "
    "> ~/ray.log 2>&1"
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """With a Ray over them, whose head is at the desk and holds no ranks."""
    pytest.importorskip("ray")
    environment = {
        "TPENGINE_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
    }
    with Machines(NUM_MACHINES, environment) as found:
        head = f"--head --node-ip-address={HEAD} --port=6379 --include-dashboard=false"
        start(found, None, RAY.format(head, 0))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: join(found, machine), range(NUM_MACHINES)))
        yield found


def join(machines: Machines, machine: int) -> None:
    options = f"--address={HEAD}:6379 --node-ip-address={machines.addresses[machine]}"
    start(machines, machine, RAY.format(options, 1))


def start(machines: Machines, machine: int | None, command: str) -> None:
    done = machines.run(machine, command, START_S)
    assert done.returncode == 0, machines.run(machine, "tail -50 ~/ray.log").stdout


class Driver:
    """`machine_driver.py` at the desk, and what it says."""

    def __init__(self, machines: Machines, num_losses: int) -> None:
        command = machines.command(None, f"python {DRIVER} {num_losses} 2> ~/log", 5 * LINE_S)
        self._machines = machines
        self._lines: list[str] = []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # Ray prints there, too
                self._lines.append(line)

    def log(self) -> str:
        return self._machines.run(None, "tail -c 6000 ~/log").stdout

    def heard(self) -> Any:
        """The next line."""
        wait_until(
            lambda: bool(self._lines) or self._process.poll() is not None,
            LINE_S,
            "the driver says nothing",
            self.log,
        )
        assert self._lines, self.log()
        return json.loads(self._lines.pop(0))

    def end(self) -> int:
        return self._process.wait(LINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(LINE_S)


def num_ranks(machines: Machines, machine: int) -> int:
    names = machines.run(machine, "cat /proc/[0-9]*/comm 2> /dev/null").stdout.splitlines()
    return sum(name.startswith("ray::RayWorker") for name in names)


@pytest.mark.soak  # a minute
@pytest.mark.timeout(400)
def test_lost_machines(machines: Machines) -> None:
    driver = Driver(machines, 2)
    try:
        ranks = driver.heard()["ranks"]
        for way in ("cut", "kill"):
            assert len({address for address, _ in ranks}) == 2
            lost = machines.addresses.index(ranks[1][0])
            assert num_ranks(machines, lost) == 1
            {"cut": machines.cut, "kill": machines.kill}[way](lost)
            if way == "cut":
                wait_until(
                    lambda m=lost: not num_ranks(machines, m),
                    FENCE_S,
                    "the rank behind the cut link lives on",
                )
            told = driver.heard()
            print(way, told)
            assert f"rank 1 on node {ranks[1][0]}" in told["loss"]
            assert "its node does not answer" in told["loss"]
            ranks = driver.heard()["ranks"]
            assert machines.addresses[lost] not in {address for address, _ in ranks}
        assert driver.end() == 0, driver.log()
    finally:
        driver.close()
