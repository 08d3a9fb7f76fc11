"""How the layers of a model are divided into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.weights import Weights
from tpengine.models.registry import build_model


def layers_of_stages(
    config: ModelConfig, num_stages: int, sizes: Sequence[int] | None = None
) -> list[range]:
    """Returns the numbers of each stage's layers.

    Args:
        num_stages: at most the number of layers.
        sizes: number of layers of each stage; None: they are divided so that the dearest stage is
            as cheap as possible. A layer costs as much as the checkpoint has numbers for it. The
            output head, which the last stage has too, costs half of what its matrix has: it
            computes all rows of decodes, and one of a prompt. The embedding costs nothing: a token
            looks up one row of it.
    """
    if sizes is None:
        if num_stages == 1:
            return [range(config.num_layers)]
        whole = Weights(torch.float32, torch.device("meta"), ParallelState())
        build_model(config, whole)
        costs = whole.layer_sizes
        costs[-1] += config.vocab_size * config.hidden_size // 2
        return divide(costs, num_stages)
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def divide(costs: Sequence[int], num_parts: int) -> list[range]:
    """Divides a sequence into parts of at least one element, of which the dearest is as cheap as
    possible; among such divisions it prefers even ones."""
    sums = [0, *accumulate(costs)]
    # By the number of elements: the cost of their dearest part, the sum of squares, the parts.
    best: list[tuple[int, int, list[range]]] = [(0, 0, [])]
    best += [(sum(costs) + 1, 0, [])] * len(costs)
    for _ in range(num_parts):
        divided = [(sum(costs) + 1, 0, list[range]())] * len(best)
        for end in range(1, len(best)):
            ways = []
            for start, (most, squares, parts) in enumerate(best[:end]):
                cost = sums[end] - sums[start]
                ways.append((max(most, cost), squares + cost**2, [*parts, range(start, end)]))
            divided[end] = min(ways, key=lambda way: way[:2])
        best = divided
    return best[-1][2]
