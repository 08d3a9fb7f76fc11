"""Faults below the ranks: no shared memory, no descriptors, or a control store of Ray's that is
frozen, while a lost group is rebuilt. No request is lost. Others: `recovery/test_campaign.py`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import ModelShop
from support.zoo import PLAIN

import tpengine
from executor.driver_process import HERE, DriverProcess

SECRETS = {"TPENGINE_TOKENS": "s3cret-of-a-client", "TPENGINE_ADMIN_TOKEN": "s3cret-of-admin"}
PATIENCE_S = 180.0
SMALL = """
mount -t tmpfs -o size=300m,mode=1777 tmpfs /dev/shm
exec "$@"
"""
NAMES = ("shared memory nearly full", "no descriptors", "store frozen", "nothing")


class PoorDriver:
    """The program `poor_driver` in a mount namespace, where its disks are small."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.ray_folder = Path(tempfile.mkdtemp(prefix="tpe", dir="/tmp"))
        paths = [str(Path(tpengine.__file__).parent.parent), str(HERE.parent)]
        environment = {**os.environ, **SECRETS, "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"RAY_TMPDIR": str(self.ray_folder), "RAY_AUTH_MODE": "token"}
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        program = [sys.executable, HERE / "poor_driver.py", folder, *NAMES]
        command = ["unshare", "--mount", "--propagation=private", *as_root, "sh", "-ec", SMALL]
        self.log = log
        with log.open("wb") as file:
            self.driver = DriverProcess([*command, "sh", *program], env=environment, stderr=file)

    def hear(self) -> Any:
        try:
            return self.driver.hear(PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log.read_text()[-4000:]}") from error

    def close(self) -> None:
        self.driver.end()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


@pytest.fixture
def poor(models: ModelShop, tmp_path: Path) -> Iterator[PoorDriver]:
    driver = PoorDriver(models.folder(PLAIN), tmp_path / "log")
    yield driver
    driver.close()


def test_requests_outlive_it(poor: PoorDriver) -> None:
    processes, _ = poor.hear()
    assert {"gcs_server", "raylet"} <= set(processes.values())
    for pid in processes:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended
            continue
        assert b"s3cret" not in environment, processes[pid]
    for name in NAMES:
        found, is_same, reports, took_s = poor.hear()
        assert (found, is_same) == (name, True), (reports, took_s)
        assert bool(reports) == (name == "no descriptors"), (name, reports)
        if name == "no descriptors":
            assert "errno 24 (Too many open files)" in reports[0]
    assert poor.hear() is True
    assert poor.hear() == [], "processes are left"
    assert poor.driver.process.wait(PATIENCE_S) == 0
    log = poor.log.read_text()
    assert "at 127.0.0.1 (interface lo) by shared memory" in log
    assert log.count("from now on the ranks run as processes") == 1
    assert "Traceback" not in log.partition("from now on the ranks run")[2]
    assert "at 127.0.0.1 (interface lo) by gloo" in log
    assert "2 ranks need 6.0 MiB of shared memory, and /dev/shm has" in log
    assert "died" not in "".join(poor.driver.others), "Ray tells it on standard output, too"
