"""Token embedding and output head, with the vocabulary divided over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tpengine.layers.linear import Linear
from tpengine.layers.weights import Weights, WeightShard
from tpengine.ops import fused


class VocabParallelEmbedding:
    """This rank's rows of the embedding table `[vocab_size, hidden_size]`.

    The table is padded with zeros, so that every rank has the same number of rows.

    Args:
        scale: factor on the rows; rounded to the model's dtype, as transformers does.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
    ) -> None:
        self.scale = torch.tensor(scale, dtype=weights.dtype).item()
        self._parallel = parallel = weights.parallel
        self.rows = -(-vocab_size // parallel.tp_size)
        self.start = parallel.tp_rank * self.rows
        self.weight = weights.empty(self.rows, hidden_size)
        self.weight_name = f"{name}.weight"
        weights.declare(self.weight_name, WeightShard(self.weight, 0, self.start, vocab_size))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        if self._parallel.tp_size == 1:
            return _rows(self.weight, token_ids, self.scale)
        local = token_ids - self.start
        foreign = (local < 0) | (local >= self.rows)
        embedded = F.embedding(local.masked_fill(foreign, 0), self.weight)
        embedded = embedded.masked_fill_(foreign.unsqueeze(1), 0).mul_(self.scale)
        return self._parallel.all_reduce(embedded)


class PositionEmbedding:
    """Learned absolute position embedding; every rank holds the whole table.

    Args:
        offset: row of position 0 in the checkpoint's table.
    """

    def __init__(
        self, weights: Weights, name: str, num_positions: int, hidden_size: int, offset: int = 0
    ) -> None:
        table = weights.replicated(f"{name}.weight", num_positions + offset, hidden_size)
        self._rows = table[offset:]

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions int32 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        return _rows(self._rows, positions)


def _rows(table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    out = table.new_empty(ids.shape[0], table.shape[1])
    fused.embedding(out, table, ids, scale)
    return out


class ParallelLMHead(Linear):
    """Logits over the whole vocabulary; each rank computes the logits of its rows.

    The head is never quantised, because that would change the output more than in any other layer.

    Args:
        tied: the embedding whose table is also the head's weight; None: the head has its own.
    """

    _quantizable = False

    def __init__(
        self,
        weights: Weights,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        self._tied = tied is not None
        self._parallel = parallel = weights.parallel
        self._vocab_size = vocab_size
        if tied is not None:
            self.weight = tied.weight
            self.out_features = tied.rows
            self.bias = None
            self._multiply = None
            weights.after_loading(lambda: self._pack(weights))
            weights.declare_repeat(f"{name}.weight", tied.weight_name)
            return
        rows = -(-vocab_size // parallel.tp_size)
        super().__init__(weights, hidden_size, rows)
        assert self.weight is not None
        shard = WeightShard(self.weight, 0, parallel.tp_rank * rows, vocab_size)
        weights.declare(f"{name}.weight", shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]` at rank 0, which samples;
        the other ranks get `[0, vocab_size]`."""
        logits = self._parallel.gather(super().forward(x))
        if logits is None:
            return x.new_empty(0, self._vocab_size)
        return logits[:, : self._vocab_size]

    def _drop_weight(self, weights: Weights) -> None:
        if self._tied:  # the embedding keeps the table
            self.weight = None
        else:
            super()._drop_weight(weights)
