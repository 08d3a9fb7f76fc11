"""What the measurements share: Ray, and models with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from tpengine import EngineArgs, envs
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights, tensor_shape
from tpengine.models.registry import build_model

_WEIGHTS_STD = 0.02


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
