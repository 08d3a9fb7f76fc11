"""Numbers out of range; arguments that contradict each other or the device, or have no effect."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from support.engines import complete, make_engine
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs, SamplingParams
from tpengine.errors import CacheSizeError, ConfigError
from tpengine.worker import model_runner
from tpengine.worker.worker import Worker

BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sequences": ({"max_num_seqs": 65537}, ("max_num_seqs", "65536", "65537")),
    "seed": ({"seed": 1 << 64}, ("seed", str((1 << 64) - 1), str(1 << 64))),
    "seed beyond floats": ({"seed": 1 << 2000}, ("seed", str((1 << 64) - 1))),
    "seed below": ({"seed": -(1 << 63) - 1}, ("seed", "at least -9223372036854775808")),
    "cache": ({"cpu_kv_cache_space": 1e12}, ("cpu_kv_cache_space", "1048576 GiB", "1000000000000")),
    "swap": ({"swap_space": 1048577}, ("swap_space", "1048576 GiB", "1048577")),
    "two sizes": (
        {"cpu_kv_cache_space": 0.1, "num_device_blocks_override": 64},
        ("cpu_kv_cache_space = 0.1", "num_device_blocks_override = 64", "unset"),
    ),
    "tokens": ({"max_num_batched_tokens": 10**12}, ("max_num_batched_tokens", "1048576", "10000")),
    "address without Ray": ({"ray_address": "10.9.9.9:1"}, ("'10.9.9.9:1'", "executor='ray'")),
    "deadline without Ray": ({"step_timeout_s": 1.0}, ("step_timeout_s = 1.0", "executor='ray'")),
    "endless deadline": (
        {"executor": "ray", "step_timeout_s": math.inf},
        ("step_timeout_s", "more than 0 seconds and finite", "inf"),
    ),
    "recoveries": ({"max_recoveries": -1}, ("max_recoveries", "at least 0", "-1")),
    "window": ({"recovery_window": 0.0}, ("recovery_window", "more than 0", "0.0")),
    "spares": ({"executor": "ray", "spare_workers": -2}, ("spare_workers", "at least 0", "-2")),
    "spares without Ray": ({"spare_workers": 1}, ("spare_workers = 1", "executor='ray'")),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refused(models: ModelShop, name: str) -> None:
    args, words = BAD[name]
    with pytest.raises(ConfigError) as raised:
        EngineArgs(str(models.folder(PLAIN)), **args).create_engine_config("cpu")
    for word in words:
        assert word in str(raised.value)


def test_cache_space_is_for_cpus(models: ModelShop) -> None:
    args = EngineArgs(str(models.folder(PLAIN)), cpu_kv_cache_space=0.1)
    assert args.create_engine_config("cpu").cache.cpu_kv_cache_bytes == int(0.1 * (1 << 30))
    with pytest.raises(ConfigError, match=r"cpu_kv_cache_space = 0.1.*gpu_memory_utilization"):
        args.create_engine_config("cuda")


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1])
def test_outermost_seeds_work(models: ModelShop, seed: int) -> None:
    """Dummy weights come from the seed, too."""
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    with make_engine(models.folder(PLAIN), load_format="dummy", seed=seed) as engine:
        assert len(complete(engine, [5, 6, 7], params).token_ids) == 4


def test_most_sequences_and_spaces_are_accepted(models: ModelShop) -> None:
    args = EngineArgs(
        str(models.folder(PLAIN)),
        max_num_seqs=65536,
        swap_space=1 << 20,
        cpu_kv_cache_space=1 << 20,
    )
    config = args.create_engine_config("cpu")
    assert config.scheduler.max_num_seqs == 65536
    assert config.cache.swap_space_bytes == config.cache.cpu_kv_cache_bytes == 1 << 50


def test_tables_that_do_not_fit(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 9.00 TiB")

    config = EngineArgs(
        str(models.folder(PLAIN)), num_device_blocks_override=64, max_num_seqs=65536
    ).create_engine_config("cpu")
    worker = Worker(config)
    worker.init_device()
    worker.load_model()
    monkeypatch.setattr(model_runner, "InputBatch", fail)
    with pytest.raises(CacheSizeError, match=r"max_num_seqs = 65536.*640.*9\.00 TiB.*lower"):
        worker.init_cache_engine(64)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, None),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization = 0.5"),
        ({"enforce_eager": True}, None),
        (
            {"gpu_memory_utilization": 0.5, "attention_backend": "sdpa"},
            "gpu_memory_utilization = 0.5, attention_backend = 'sdpa'",
        ),
    ],
)
def test_what_does_nothing_on_cpu_is_named_once(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], named: str | None
) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger = logging.getLogger("tpengine")
    logger.addHandler(handler)
    try:
        engine_args = EngineArgs(str(models.folder(PLAIN)), **args)
        engine_args.create_engine_config("cuda")
        assert lines == []
        engine_args.create_engine_config("cpu")
    finally:
        logger.removeHandler(handler)
    assert lines == ([] if named is None else [f"no effect on CPU: {named}"])
