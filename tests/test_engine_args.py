"""Engine arguments out of range, too small to serve, contradictory, or without effect."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from support.engines import complete, greedy, make_engine
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import LLM, EngineArgs, LLMEngine, SamplingParams
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
    "float16 on CPU": ({"dtype": "float16"}, ("float16", "CPU", "bfloat16 or float32")),
    "pipeline": (
        {"pipeline_parallel_size": 2},
        ("pipeline_parallel_size = 2", "layer", "leave it at 1"),
    ),
    "ranks": (
        {"tensor_parallel_size": 2, "executor": "local"},
        ("executor = 'local'", "tensor_parallel_size = 2"),
    ),
    "negative swap": ({"swap_space": -1.0}, ("swap_space", "at least 0", "-1")),
    "block size": ({"block_size": 12}, ("block_size", "8, 16, 32", "12")),
    "dtype": ({"dtype": "int4"}, ("dtype", "bfloat16", "'int4'")),
    "device": ({"device": "tpu"}, ("device", "cpu", "'tpu'")),
    "load format": ({"load_format": "pickle"}, ("load_format", "safetensors", "'pickle'")),
    "tokenizer mode": ({"tokenizer_mode": "quick"}, ("tokenizer_mode", "slow", "'quick'")),
    "no sequences": ({"max_num_seqs": 0}, ("max_num_seqs", "at least 1", "0")),
    "no tokens": ({"max_num_batched_tokens": 0}, ("max_num_batched_tokens", "at least 1")),
    "no blocks": (
        {"num_device_blocks_override": 0},
        ("num_device_blocks_override", "at least 1", "0"),
    ),
    "negative length": ({"max_model_len": 0}, ("max_model_len", "at least 1", "0")),
    "length beyond the model": ({"max_model_len": 641}, ("641", "640", "smaller")),
    "whole prompts do not fit a step": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        ("max_num_batched_tokens = 512", "max_model_len = 640", "enable chunked prefill"),
    ),
    "memory share": (
        {"gpu_memory_utilization": 1.5},
        ("gpu_memory_utilization", "more than 0 and at most 1", "1.5"),
    ),
    "memory share is nan": (
        {"gpu_memory_utilization": math.nan},
        ("gpu_memory_utilization", "more than 0", "nan"),
    ),
    "cache space": ({"cpu_kv_cache_space": 0}, ("cpu_kv_cache_space", "more than 0", "0")),
    "cache space is nan": ({"cpu_kv_cache_space": math.nan}, ("cpu_kv_cache_space", "nan")),
    "cache space is infinite": ({"cpu_kv_cache_space": math.inf}, ("cpu_kv_cache_space", "inf")),
    "sequences are no number": ({"max_num_seqs": "64"}, ("max_num_seqs", "'64'")),
    "a flag that is text": ({"enforce_eager": "yes"}, ("enforce_eager", "'yes'")),
    "unknown": ({"max_seqs": 3}, ("max_seqs", "did you mean", "max_num_seqs")),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refused(models: ModelShop, name: str) -> None:
    args, words = BAD[name]
    with pytest.raises(ConfigError) as raised:
        LLM(str(models.folder(PLAIN)), **args)
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
    models: ModelShop, caplog: pytest.LogCaptureFixture, args: dict[str, Any], named: str | None
) -> None:
    logger = logging.getLogger("tpengine")
    logger.addHandler(caplog.handler)
    try:
        engine_args = EngineArgs(str(models.folder(PLAIN)), **args)
        engine_args.create_engine_config("cuda")
        assert caplog.messages == []
        engine_args.create_engine_config("cpu")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == ([] if named is None else [f"no effect on CPU: {named}"])


def test_no_block_fits_and_the_named_value_does(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    args = {"num_device_blocks_override": None, "max_model_len": 16}
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, cpu_kv_cache_space=1e-6, **args)
    message = str(raised.value)
    assert "no block" in message
    value = float(message.split("cpu_kv_cache_space to at least ")[1].split()[0])
    with make_engine(folder, cpu_kv_cache_space=value, **args) as engine:
        assert engine.num_total_blocks == 1
        engine.add_request("one", None, greedy(4), prompt_token_ids=[5, 6, 7])
        while engine.has_unfinished_requests():
            engine.step()


def test_max_model_len_does_not_fit_and_the_named_values_do(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, num_device_blocks_override=20)
    message = str(raised.value)
    assert "max_model_len = 640" in message
    shorter = int(message.split("set max_model_len to at most ")[1].split(",")[0])
    assert shorter == 320
    more_blocks = int(message.split("num_device_blocks_override to ")[1])
    for args in (
        {"num_device_blocks_override": 20, "max_model_len": shorter},
        {"num_device_blocks_override": more_blocks},
    ):
        make_engine(folder, **args).shutdown()
    with pytest.raises(CacheSizeError):
        make_engine(folder, num_device_blocks_override=more_blocks - 1)


def test_cache_space_that_is_named_is_enough(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    args = {"num_device_blocks_override": None}
    with pytest.raises(CacheSizeError) as raised:
        make_engine(folder, cpu_kv_cache_space=0.0005, **args)
    words = str(raised.value).split("cpu_kv_cache_space")[1].split()
    value = next(float(word) for word in words if word[0].isdigit())
    make_engine(folder, cpu_kv_cache_space=value, **args).shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(models: ModelShop) -> None:
    with pytest.raises(ConfigError, match=r"cuda.*device='cpu'"):
        LLMEngine.from_engine_args(EngineArgs(str(models.folder(PLAIN)), device="cuda"))
