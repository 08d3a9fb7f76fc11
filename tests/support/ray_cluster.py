"""One Ray cluster for a process of pytest (`make test` has four), and what is left of it."""

from __future__ import annotations

import os

# Before ray is imported: no token file is made, ranks do not yield to every other process, and no
# process is started before it is asked for.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import forked
from support.forked_ray import worker_python

NUM_CPUS = 8
"""What Ray believes; ranks of small models share the real ones."""
OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a running cluster of one node, to which this process is connected."""
    ray = pytest.importorskip("ray")
    # Ray's sockets lie in its folder, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
    patch = pytest.MonkeyPatch()
    if forked.is_started():
        patch.setattr(sys, "executable", str(worker_python(Path(folder))))
    try:
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        patch.undo()
        yield ray.get_runtime_context().gcs_address
    finally:
        patch.undo()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
