"""What the measurements share: options, engines with dummy weights, prompts, pairs of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from tpengine import EngineArgs, envs
from tpengine.bench.harness import SHAPES
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights, tensor_shape
from tpengine.models.registry import build_model

SHAPE = "llama-124m"
_WEIGHTS_STD = 0.02
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def add_numbers(parser: argparse.ArgumentParser, **numbers: tuple[float, str]) -> None:
    """Adds an option for each number; a number is its default and its help."""
    for name, (default, text) in numbers.items():
        option = f"--{name.replace('_', '-')}"
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=type(default), default=default, help=help_text)


def add_shape_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--shape`."""
    help_text = "run a model of this shape with random weights (default: %(default)s)"
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE, help=help_text)


def alternate(
    kinds: Sequence[K], rounds: int, measure: Callable[[K, int], T], warm_ups: int = 0
) -> dict[K, list[T]]:
    """What is measured of each kind, in rounds that begin with the first and the last in turn.

    Args:
        measure: gets the kind and the number of the round; the warm-ups' numbers are below 0.
        warm_ups: rounds whose results are dropped.
    """
    measured: dict[K, list[T]] = {kind: [] for kind in kinds}
    for number in tqdm(range(-warm_ups, rounds), desc="rounds", unit="round"):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            measured[kind].append(measure(kind, number))
    return {kind: results[warm_ups:] for kind, results in measured.items()}


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Ray on this machine, with this many actors at most."""
    import ray

    envs.prepare_local_ray()
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def write_weights(args: EngineArgs, folder: Path) -> None:
    """Writes a random checkpoint of the shape, in bfloat16 as most are."""
    config = args.create_engine_config("cpu").model
    weights = Weights(torch.bfloat16, torch.device("cpu"), ParallelState())
    build_model(config, weights)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shards in weights.shards.items():
        tensor = torch.ones(tensor_shape(shards), dtype=torch.bfloat16)
        if tensor.dim() > 1:
            tensor.normal_(0, _WEIGHTS_STD, generator=generator)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
