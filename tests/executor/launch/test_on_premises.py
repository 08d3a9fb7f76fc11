"""The `ray up` file, as far as it can be checked without machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    pytest.importorskip("ray")
    import yaml

    return yaml.safe_load((ROOT / "cluster" / "on_premises.yaml").read_text())


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


def test_every_machine_is_used_and_guarded(config: dict[str, Any]) -> None:
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert "docker" not in config
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = config[name][-1]
        assert "RAY_AUTH_MODE=token" in start
        assert start.index("RAY_AUTH_MODE=token") < start.index("ray start")
    assert "RAY_enable_autoscaler_v2=0" in config["head_start_ray_commands"][-1]
