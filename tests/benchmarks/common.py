"""What the measurements share: options, engines with dummy weights, prompts, pairs of runs."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
EVENT_LOOP = "event loop"
ENGINE = "engine"
_ENGINE_THREADS = "tpengine-engine"
"""Name of the engine's thread, which the threads of its kernels inherit."""
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


def thread_times(pid: int) -> dict[str, float]:
    """CPU seconds of a process since its start, by thread name; threads of one name are added up.

    The first thread of a Python process, which runs a server's event loop, is `EVENT_LOOP`. A
    thread without a name, such as gRPC's poller, has the program's name.
    """
    times: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            ran_ns = int((task / "schedstat").read_text().split()[0])
            name = (task / "comm").read_text().strip()
            if task.name == str(pid):
                name = EVENT_LOOP
            times[ENGINE if name == _ENGINE_THREADS else name] += ran_ns / 1e9
    return times
