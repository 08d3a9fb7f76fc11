"""A machine is cut off, another loses its power: the ranks go on elsewhere, and only once.

Five machines. Four ranks in two pipeline stages lose one rank, three stages the machine of the
middle one, two ranks without stages two machines; then two machines are left.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from executor.driver_process import DriverProcess
from support.machines import Machines, wait_until

from recovery.campaign_driver import NUM_STREAMS
from tpengine.config import EMBEDDED_MODEL

TESTS = Path(__file__).parents[2]
DRIVER = TESTS / "recovery" / "campaign_driver.py"
NUM_MACHINES = 5
HEAD = "10.77.0.254"
START_S, LINE_S, FENCE_S = 120.0, 90.0, 60.0
RAY = (
    "ray start {} --num-cpus={} --object-store-memory=80000000 --disable-usage-stats "
    "> ~/ray.log 2>&1"
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """With a Ray over them, whose head is at the desk and holds no ranks."""
    pytest.importorskip("ray")
    env = {"TPENGINE_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    with Machines(NUM_MACHINES, env) as cluster:
        head = f"--head --node-ip-address={HEAD} --port=6379 --include-dashboard=false"
        start(cluster, None, RAY.format(head, 0))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: join(cluster, machine), range(NUM_MACHINES)))
        yield cluster


def join(machines: Machines, machine: int) -> None:
    options = f"--address={HEAD}:6379 --node-ip-address={machines.addresses[machine]}"
    start(machines, machine, RAY.format(options, 1))


def start(machines: Machines, machine: int | None, command: str) -> None:
    done = machines.run(machine, command, START_S)
    assert done.returncode == 0, machines.run(machine, "tail -50 ~/ray.log").stdout


def num_ranks(machines: Machines, machine: int) -> int:
    names = machines.run(machine, "cat /proc/[0-9]*/comm 2> /dev/null").stdout.splitlines()
    return sum(name.startswith("ray::RayWorker") for name in names)


@contextmanager
def campaign(machines: Machines, **options: int) -> Iterator[DriverProcess]:
    """A driver at the desk, which is told to end at last."""
    program = f"PYTHONPATH=$PYTHONPATH:{TESTS} python {DRIVER} {EMBEDDED_MODEL} ray auto"
    command = f"{program} '{json.dumps(options)}' 2> ~/log"
    command = machines.command(None, command, 5 * LINE_S)
    driver = DriverProcess(command, stdin=subprocess.PIPE)
    try:
        yield driver
        driver.say("end", 0.0)
        assert driver.hear(LINE_S) == "closed"
        driver.say()
        assert driver.process.wait(LINE_S) == 0
    finally:
        driver.end()
        print(machines.run(None, "tail -c 6000 ~/log").stdout)


def check_loss(driver: DriverProcess, rank: int, address: str) -> None:
    """All streams are right, and the loss that is told is this one."""
    same, *_, error, loss = driver.hear(LINE_S)
    assert (same, error) == (NUM_STREAMS, "")
    assert f"rank {rank} on node {address}" in loss
    assert "its node does not answer" in loss


@pytest.mark.soak  # half a minute
@pytest.mark.timeout(400)
def test_two_stages_of_two_ranks(machines: Machines) -> None:
    with campaign(machines, tensor_parallel_size=2, pipeline_parallel_size=2) as driver:
        ranks = driver.hear(LINE_S)
        driver.say("decode", 0.01)
        assert driver.hear(LINE_S) == ranks
        address, pid = ranks[2]  # it samples
        killed = machines.run(machines.addresses.index(address), f"kill -KILL {pid}")
        assert killed.returncode == 0, killed.stdout
        same, *_, error, loss = driver.hear(LINE_S)
        assert (same, error) == (NUM_STREAMS, "")
        assert f"rank 2 on node {address}" in loss
    log = machines.run(None, "cat ~/log").stdout
    for rank, (address, _) in enumerate(ranks):
        how = f"gloo, stage {rank // 2} of 2 (sockets)"
        assert f"rank {rank} of 4 at {address} (interface eth0) by {how}" in log


@pytest.mark.soak  # half a minute
@pytest.mark.timeout(400)
def test_lost_stage(machines: Machines) -> None:
    with campaign(machines, pipeline_parallel_size=3) as driver:
        ranks = driver.hear(LINE_S)
        assert len({address for address, _ in ranks}) == 3
        driver.say("decode", 0.01)
        assert driver.hear(LINE_S) == ranks
        address = ranks[1][0]
        machines.kill(machines.addresses.index(address))
        check_loss(driver, 1, address)
        driver.say("prefill", 0.0)
        ranks = driver.hear(LINE_S)
        assert driver.hear(LINE_S)[0] == NUM_STREAMS
        assert address not in {address for address, _ in ranks}
        assert len({address for address, _ in ranks}) == 3


@pytest.mark.soak  # a minute
@pytest.mark.timeout(400)
def test_lost_machines(machines: Machines) -> None:
    with campaign(machines, tensor_parallel_size=2) as driver:
        ranks = driver.hear(LINE_S)
        for way in ("cut", "kill"):
            driver.say("decode", 0.01)
            assert driver.hear(LINE_S) == ranks
            assert len({address for address, _ in ranks}) == 2
            address = ranks[1][0]
            lost = machines.addresses.index(address)
            assert num_ranks(machines, lost) == 1
            {"cut": machines.cut, "kill": machines.kill}[way](lost)
            if way == "cut":
                wait_until(
                    lambda m=lost: not num_ranks(machines, m),
                    FENCE_S,
                    "the rank behind the cut link lives on",
                )
            check_loss(driver, 1, address)
            driver.say("prefill", 0.0)
            ranks = driver.hear(LINE_S)
            assert driver.hear(LINE_S)[0] == NUM_STREAMS
            assert address not in {address for address, _ in ranks}
