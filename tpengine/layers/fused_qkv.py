"""Query, key and value projections that a checkpoint already holds as one tensor."""

from __future__ import annotations

from tpengine.layers.linear import Linear
from tpengine.layers.weights import Weights


class InterleavedQKVParallelLinear(Linear):
    """A fused projection whose checkpoint rows are ordered head by head, q, k and v of a head
    together; as many KV heads as query heads. Heads are divided over ranks, and on a rank all
    queries come first, then all keys, then all values, as `Attention` wants them.

    Attributes:
        num_heads: of this rank.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden_size: int,
        total_num_heads: int,
        head_dim: int,
        bias: bool = False,
    ) -> None:
        parallel = weights.parallel
        self.num_heads = num_heads = parallel.divide(total_num_heads, "attention heads")
        rows, total_rows = 3 * num_heads * head_dim, 3 * total_num_heads * head_dim
        super().__init__(weights, hidden_size, rows, bias)
        start = parallel.tp_rank * rows
        split = (num_heads, 3, head_dim)
        parameters = {"weight": self.weight, "bias": self.bias}
        for suffix, parameter in parameters.items():
            if parameter is not None:
                # [3, num_heads, head_dim, ...] seen in the checkpoint's order
                by_head = parameter.unflatten(0, (3, num_heads, head_dim)).transpose(0, 1)
                weights.declare(f"{name}.{suffix}", by_head, 0, start, total_rows, split)
