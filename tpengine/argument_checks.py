"""Checks of engine arguments against what a machine can have, and against its device."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from tpengine.arguments import each
from tpengine.errors import ConfigError, counted
from tpengine.logger import init_logger

if TYPE_CHECKING:
    from tpengine.engine_args import EngineArgs

logger = init_logger(__name__)

MAX_NUM_SEQS = 1 << 16
"""Bound of max_num_seqs: tables of a row per sequence are allocated before the first step."""
MAX_NUM_BATCHED_TOKENS = 1 << 20
"""Bound of max_num_batched_tokens: a step of that many is computed before the first."""
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1
"""Bounds of a seed, those of torch's generators."""
_FOR_GPUS = ("gpu_memory_utilization", "attention_backend", "async_scheduling")
MAX_SPACE_GIB = 1 << 20
"""Bound of what is given in GiB; more than any machine has, and in bytes still 64 bits."""
_ONLY_ON_RAY = (
    "ray_address", "ray_placement_strategy", "ray_bundle", "placement_timeout_s",
    "start_timeout_s", "step_timeout_s"
)  # fmt: skip


def check_bounds(args: EngineArgs) -> None:
    """Refuses numbers that no machine can serve, before they overflow somewhere inside.

    Raises:
        ConfigError: max_num_seqs, max_num_batched_tokens, seed, cpu_kv_cache_space, swap_space or
            what concerns recovery is out of bounds.
    """
    _check_recovery(args)
    budget = args.max_num_batched_tokens
    if budget is not None and budget > MAX_NUM_BATCHED_TOKENS:
        raise ConfigError(
            f"max_num_batched_tokens must be at most {MAX_NUM_BATCHED_TOKENS}, got {budget}; a "
            "step's memory grows with it, and longer prompts are computed in several steps"
        )
    if args.max_num_seqs > MAX_NUM_SEQS:
        raise ConfigError(
            f"max_num_seqs must be at most {MAX_NUM_SEQS}, got {args.max_num_seqs}; more requests "
            "than that wait their turn"
        )
    if not MIN_SEED <= args.seed <= MAX_SEED:
        raise ConfigError(f"seed must be from -2**63 to 2**64 - 1, got {args.seed}")
    for name in ("cpu_kv_cache_space", "swap_space"):
        given = getattr(args, name)
        for space in given if isinstance(given, (list, tuple)) else [given]:
            if space is not None and space > MAX_SPACE_GIB:
                raise ConfigError(
                    f"{name} must be at most {MAX_SPACE_GIB} GiB, got {space}; its unit is GiB, "
                    "not bytes"
                )


def _check_recovery(args: EngineArgs) -> None:
    for name in ("max_recoveries", "spare_workers"):
        if getattr(args, name) < 0:
            raise ConfigError(f"{name} must be at least 0, got {getattr(args, name)}")
    if not 0.0 < args.recovery_window < math.inf:
        raise ConfigError(
            f"recovery_window must be more than 0 seconds and finite, got {args.recovery_window}"
        )
    if args.spare_workers and not args.uses_ray:
        raise ConfigError(
            f"spare_workers = {args.spare_workers} needs ranks on Ray: set executor='ray', or "
            "leave it at 0"
        )
    if not args.uses_ray:
        _refuse_options_of_ray(args)


def _refuse_options_of_ray(args: EngineArgs) -> None:
    for spec in dataclasses.fields(args):
        given = getattr(args, spec.name)
        if spec.name in _ONLY_ON_RAY and given != spec.default:
            raise ConfigError(
                f"{spec.name} = {given!r} is for ranks on Ray, and one rank runs in this process: "
                "set executor='ray', or leave it out"
            )


def check_budgets(args: EngineArgs) -> None:
    """Refuses budgets of memory that are none, or not as many as there are ranks.

    Raises:
        ConfigError: gpu_memory_utilization or cpu_kv_cache_space is out of range.
    """
    for name in ("gpu_memory_utilization", "cpu_kv_cache_space"):
        values = each(getattr(args, name))
        given_per_rank = isinstance(getattr(args, name), (list, tuple))
        if given_per_rank and len(values) != args.tensor_parallel_size:
            raise ConfigError(
                f"{name} must be one number or one per rank: tensor_parallel_size = "
                f"{args.tensor_parallel_size}, got {counted(len(values), 'number')}"
            )
    for share in each(args.gpu_memory_utilization):
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share}")
    for space in each(args.cpu_kv_cache_space):
        if not 0.0 < space < math.inf:
            raise ConfigError(f"cpu_kv_cache_space must be more than 0 GiB and finite, got {space}")


def check_device_arguments(args: EngineArgs, device: str) -> None:
    """Refuses arguments that contradict the device or each other, and names those that do nothing.

    Raises:
        ConfigError: cpu_kv_cache_space on a GPU, or beside num_device_blocks_override; an fp8
            cache on CPU.
    """
    if args.cpu_kv_cache_space is not None:
        space = f"cpu_kv_cache_space = {args.cpu_kv_cache_space}"
        if device != "cpu":
            raise ConfigError(
                f"{space} sizes the cache on CPU, the device is {device}; leave it unset and use "
                "gpu_memory_utilization, or set device='cpu'"
            )
        if args.num_device_blocks_override is not None:
            raise ConfigError(
                f"{space} and num_device_blocks_override = {args.num_device_blocks_override} both "
                "size the cache; leave one of them unset"
            )
    if device == "cpu":
        if args.kv_cache_dtype == "fp8":
            raise ConfigError(
                "kv_cache_dtype = 'fp8' has kernels for GPUs only, the device is cpu; leave it at "
                "'auto'"
            )
        defaults = {spec.name: spec.default for spec in dataclasses.fields(args)}
        idle = [
            f"{name} = {getattr(args, name)}"
            for name in _FOR_GPUS
            if getattr(args, name) != defaults[name]
        ]
        if idle:
            logger.warning("on CPU this does nothing: %s", ", ".join(idle))
