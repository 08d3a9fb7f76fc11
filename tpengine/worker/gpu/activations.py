"""Memory for the activations of the worst step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpengine.config import EngineConfig
from tpengine.errors import CacheSizeError


def claim_activations(
    run_worst_case: Callable[[], object], config: EngineConfig, device: torch.device
) -> None:
    """Runs the worst step once more, when the KV cache is there: torch keeps the memory that it
    takes, so that no other process can take it before a request needs it.

    Raises:
        CacheSizeError: it does not fit next to the cache.
    """
    try:
        run_worst_case()
    except torch.OutOfMemoryError as error:
        raise CacheSizeError(
            f"the activations of a step of {config.scheduler.max_num_batched_tokens} tokens do not "
            f"fit next to the KV cache on {device} ({error}); lower gpu_memory_utilization or "
            "max_num_batched_tokens"
        ) from error
