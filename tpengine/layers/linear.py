"""Linear layers, sharded over ranks (Megatron-LM, https://arxiv.org/abs/1909.08053).

Column-parallel layers divide the outputs and need no communication; a row-parallel layer divides
the inputs and sums over ranks. A size that ranks do not divide is padded, but the number of heads
must be divisible. A weight takes its form (`layers.quantized_linear`) when its last part is read:
on a CPU it is packed, so that a row's result does not depend on the other rows. With AVX2 or
AVX-512 this is also faster than torch's own product, for every number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError
from tpengine.layers.matrix import Matrix
from tpengine.layers.quantized_linear import LinearForm, packed_form, rounded_format
from tpengine.layers.weights import Weights, WeightShard
from tpengine.ops.quantized_ops import QuantizedFormat

_PADDED_SHARE = 16


class Additions(Protocol):
    """What `layers.lora` adds to the output of a layer."""

    def add(self, out: Tensor, x: Tensor) -> None:
        """Adds to the layer's output for x, in place."""


class Linear:
    """`y = x W^T + b` with this rank's part of W, `[out_features, in_features]`.

    Args:
        in_features, out_features: sizes of this rank's part.
    """

    may_be_stored = True
    """Whether the weight may keep the numbers of a quantised file."""
    adapters: Additions | None = None
    """What adds to the output for rows with an adapter; None: the engine serves no adapters."""

    def __init__(
        self, weights: Weights, in_features: int, out_features: int, bias: bool = False
    ) -> None:
        self.weight: Tensor | None = None
        self.bias = weights.empty(out_features) if bias else None
        self.out_features = out_features
        self._form: LinearForm | None = None
        importance = weights.importance.get(len(weights.linears))
        weights.linears.append(self)
        take = partial(self._take, weights)
        how = self._rounded_format(weights, in_features), self.may_be_stored, importance
        self.matrix = Matrix(weights, out_features, in_features, take, *how)

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, in_features]` to `[num_tokens, out_features]`."""
        if self._form is None:
            out = F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        else:
            out = x.new_empty(x.shape[0], self.out_features)
            self._form.multiply(out, x, self.bias)
        if self.adapters is not None:
            self.adapters.add(out, x)
        return out

    def _take(self, weights: Weights, loaded: Tensor | LinearForm) -> None:
        """Takes the weight when it is read, in the form that is fastest on this device."""
        del self.matrix  # it refers to this layer
        if isinstance(loaded, Tensor):
            self._form = packed_form(loaded, weights)
            if self._form is None:
                self.weight = loaded
            else:
                weights.give_spare(loaded)
        else:
            self._form = loaded
        weights.num_bytes += loaded.nbytes if self._form is None else self._form.nbytes

    def _rounded_format(self, weights: Weights, in_features: int) -> QuantizedFormat | None:
        return rounded_format(weights, in_features)


class MergedColumnParallelLinear(Linear):
    """Matrices with the same input, one or more, whose outputs are divided over ranks; computed as
    one product.

    Args:
        names: checkpoint prefixes, e.g. `...mlp.gate_proj`, `...mlp.up_proj`; the same one for each
            matrix if the checkpoint has them in one tensor, one after another.
        total_out_features: outputs of each matrix over all ranks.
    """

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        total_out_features: Sequence[int],
        bias: bool = False,
    ) -> None:
        parallel = weights.parallel
        shares = [_padded_share(parallel, total) for total in total_out_features]
        super().__init__(weights, in_features, sum(shares), bias)
        starts = [parallel.tp_rank * share for share in shares]
        _declare_rows(self, weights, names, zip(shares, starts, total_out_features, strict=True))


class QKVParallelLinear(Linear):
    """Query, key and value projections as one product; heads are divided over ranks.

    If there are fewer KV heads than ranks, each KV head is on more than one rank.

    Args:
        names: checkpoint prefixes of q, k and v; three times the same if the checkpoint has them in
            one tensor, one after another.
        kv_heads: of all ranks.

    Attributes:
        num_heads, num_kv_heads: of this rank.
        parts: of q, k and v each this rank's number of outputs, the first of them, and the number
            of all ranks.
    """

    def __init__(
        self, weights: Weights, names: Sequence[str], config: ModelConfig, kv_heads: int, bias: bool
    ) -> None:
        parallel, head_dim = weights.parallel, config.head_dim
        total_num_heads = config.total_num_heads
        self.head_dim = head_dim
        self.num_heads = parallel.divide(total_num_heads, "attention heads")
        if kv_heads >= parallel.tp_size:
            self.num_kv_heads = parallel.divide(kv_heads, "KV heads")
            first_kv_head = parallel.tp_rank * self.num_kv_heads
        else:
            if parallel.tp_size % kv_heads:
                raise ConfigError(
                    f"{kv_heads} KV heads cannot be replicated evenly over "
                    f"tensor_parallel_size = {parallel.tp_size}; choose a multiple or a divisor"
                )
            self.num_kv_heads = 1
            first_kv_head = parallel.tp_rank * kv_heads // parallel.tp_size
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        super().__init__(weights, config.hidden_size, q_size + 2 * kv_size, bias)
        kv_part = kv_size, first_kv_head * head_dim, kv_heads * head_dim
        q_part = q_size, parallel.tp_rank * q_size, total_num_heads * head_dim
        self.parts = q_part, kv_part, kv_part
        _declare_rows(self, weights, names, self.parts)


class InterleavedQKVParallelLinear(Linear):
    """A fused q, k and v projection whose checkpoint orders its rows by head: q, k and v of the
    first head, then of the second. There are as many KV heads as query heads.

    Heads are divided over ranks. On a rank the rows of all queries come first, then all keys, then
    all values, as `Attention` requires.

    Attributes:
        num_heads: of this rank.
    """

    def __init__(self, weights: Weights, name: str, config: ModelConfig, bias: bool) -> None:
        parallel, head_dim = weights.parallel, config.head_dim
        total_num_heads = config.total_num_heads
        self.num_heads = num_heads = parallel.divide(total_num_heads, "attention heads")
        rows, total_rows = 3 * num_heads * head_dim, 3 * total_num_heads * head_dim
        super().__init__(weights, config.hidden_size, rows, bias)
        start = parallel.tp_rank * rows
        split = (num_heads, 3, head_dim)
        matrix = self.matrix
        targets = [("weight", matrix.outline, matrix), ("bias", self.bias, None)]
        for suffix, target, reader in targets:
            if target is not None:
                # a view of [3, num_heads, head_dim, ...] in the checkpoint's order
                by_head = target.unflatten(0, (3, num_heads, head_dim)).transpose(0, 1)
                shard = WeightShard(by_head, 0, start, total_rows, split, reader)
                weights.declare(f"{name}.{suffix}", shard)


class ReplicatedLinear(Linear):
    """A small matrix, which every rank holds whole."""

    def __init__(
        self, weights: Weights, name: str, in_features: int, out_features: int, bias: bool = False
    ) -> None:
        super().__init__(weights, in_features, out_features, bias)
        _declare_rows(self, weights, [name], [(out_features, 0, out_features)])


class RowParallelLinear(Linear):
    """A matrix whose inputs are divided over ranks; the results of all ranks are summed."""

    def __init__(
        self, weights: Weights, name: str, total_inputs: int, out_features: int, bias: bool = False
    ) -> None:
        self._parallel = parallel = weights.parallel
        part = _padded_share(parallel, total_inputs)
        super().__init__(weights, part, out_features, bias)
        start, matrix = parallel.tp_rank * part, self.matrix
        shard = WeightShard(matrix.outline, 1, start, total_inputs, matrix=matrix)
        weights.declare(f"{name}.weight", shard)
        if self.bias is not None:
            weights.declare(f"{name}.bias", WeightShard(self.bias))
            weights.after_loading(self._keep_bias_on_first_rank)

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, in_features]` (this rank's) to `[num_tokens, out_features]` (all)."""
        return self._parallel.all_reduce(self.partial_forward(x))

    def partial_forward(self, x: Tensor) -> Tensor:
        """This rank's part of `forward`, for sums that the caller completes over ranks."""
        return super().forward(x)

    def _keep_bias_on_first_rank(self) -> None:
        if self._parallel.tp_rank != 0:  # the sum over ranks must contain it once
            self.bias = None


def _padded_share(parallel: ParallelState, total: int) -> int:
    """Returns this rank's share of a dimension, padded if ranks do not divide it.

    The outputs of a layer and the inputs of the next get the same padding; its weights and biases
    are zero and add nothing to the sum. A padded share is a multiple of 16, so that the packed
    kernels accept it.
    """
    if total % parallel.tp_size == 0:
        return total // parallel.tp_size
    share = -(-total // parallel.tp_size)
    return -(-share // _PADDED_SHARE) * _PADDED_SHARE


def _declare_rows(
    linear: Linear, weights: Weights, names: Sequence[str], parts: Iterable[tuple[int, int, int]]
) -> None:
    """Declares the rows of a layer, part after part; for `parts` see `QKVParallelLinear`."""
    offset, matrix = 0, linear.matrix
    for name, (rows, start, total) in zip(names, parts, strict=True):
        own = slice(offset, offset + rows)
        shard = WeightShard(matrix.outline[own], 0, start, total, matrix=matrix)
        weights.declare(f"{name}.weight", shard)
        if linear.bias is not None:
            weights.declare(f"{name}.bias", WeightShard(linear.bias[own], 0, start, total))
        offset += rows
