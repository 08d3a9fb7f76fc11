"""Token embedding and output head, with the vocabulary divided over ranks."""

from __future__ import annotations

from functools import partial

import torch

from tpengine.layers.linear import Linear
from tpengine.layers.matrix import Matrix
from tpengine.layers.quantized_linear import (
    LinearForm,
    QuantizedForm,
    packed_form,
    vocabulary_format,
)
from tpengine.layers.weights import Weights, WeightShard
from tpengine.ops import fused_ops as fused
from tpengine.ops.quantized_ops import QuantizedFormat


class VocabParallelEmbedding:
    """This rank's rows of the embedding table `[vocab_size, hidden_size]`.

    The table is padded with zeros, so that every rank has the same number of rows. On a CPU it has
    8 bits with a quantization, and 4 or 8 if a quantised file has it so and runs as stored.

    Args:
        scale: factor on the rows; rounded to the model's dtype, as transformers does.

    Attributes:
        shape: vocabulary and hidden size.
    """

    def __init__(
        self, weights: Weights, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> None:
        self.scale = torch.tensor(scale, dtype=weights.dtype).item()
        self._parallel = parallel = weights.parallel
        self.shape = vocab_size, hidden_size
        self.rows = -(-vocab_size // parallel.tp_size)
        self.start = parallel.tp_rank * self.rows
        self.weight: torch.Tensor | None = None
        self.form: QuantizedForm | None = None
        self._dtype = weights.dtype
        self.weight_name = f"{name}.weight"
        take, rounded = partial(self._take, weights), vocabulary_format(weights, hidden_size)
        matrix = Matrix(weights, self.rows, hidden_size, take, rounded)
        shard = WeightShard(matrix.outline, 0, self.start, vocab_size, matrix=matrix)
        weights.declare(self.weight_name, shard)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        first = None if self._parallel.tp_size == 1 else self.start
        if self.form is not None:
            embedded = self.form.look_up(token_ids, self._dtype, self.scale, first)
        else:
            assert self.weight is not None
            embedded = _rows(self.weight, token_ids, self.scale, first)
        return self._parallel.all_reduce(embedded)

    def _take(self, weights: Weights, loaded: torch.Tensor | LinearForm) -> None:
        if isinstance(loaded, torch.Tensor):
            self.weight = loaded
        else:
            assert isinstance(loaded, QuantizedForm)  # a table is one part
            self.form = loaded
        weights.num_bytes += loaded.nbytes
        weights.looked_up_bytes += loaded.nbytes


class PositionEmbedding:
    """Learned absolute position embedding; every rank holds the whole table.

    Args:
        offset: row of position 0 in the checkpoint's table.
    """

    def __init__(
        self, weights: Weights, name: str, num_positions: int, hidden_size: int, offset: int = 0
    ) -> None:
        table = weights.replicated(f"{name}.weight", num_positions + offset, hidden_size)
        self._rows = weights.note_looked_up(table)[offset:]

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions int32 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        return _rows(self._rows, positions)


def _rows(
    table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0, first: int | None = None
) -> torch.Tensor:
    out = table.new_empty(ids.shape[0], table.shape[1])
    fused.embedding(out, table, ids, scale, first)
    return out


class ParallelLMHead(Linear):
    """Logits over the whole vocabulary; each rank computes the logits of its rows.

    It has the forms of `VocabParallelEmbedding`.

    Args:
        tied: the embedding whose table is also the head's weight; None: the head has its own. If
            another pipeline stage has the embedding, the head reads the table once more.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        self._parallel = parallel = weights.parallel
        self._vocab_size = vocab_size
        weight_name = f"{name}.weight"
        if tied is not None:
            weights.declare_repeat(weight_name, tied.weight_name)
            weight_name = tied.weight_name
            reads_table_again = parallel.stage.is_last and not parallel.stage.is_first
            if not reads_table_again:
                self.out_features = tied.rows
                self.bias = None
                self._form = None
                weights.after_loading(lambda: self._share(tied, weights))
                return
        rows = -(-vocab_size // parallel.tp_size)
        super().__init__(weights, hidden_size, rows)
        weights.linears.remove(self)  # it takes no adapter
        start, matrix = parallel.tp_rank * rows, self.matrix
        shard = WeightShard(matrix.outline, 0, start, vocab_size, matrix=matrix)
        weights.declare(weight_name, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]` at rank 0, which samples;
        the other ranks get `[0, vocab_size]`."""
        logits = self._parallel.gather(super().forward(x))
        if logits is None:
            return x.new_empty(0, self._vocab_size)
        return logits[:, : self._vocab_size]

    def _rounded_format(self, weights: Weights, in_features: int) -> QuantizedFormat | None:
        return vocabulary_format(weights, in_features)

    def _share(self, tied: VocabParallelEmbedding, weights: Weights) -> None:
        """Takes the table of the embedding, or a packed copy: rows are not looked up in a packed
        one of 16 or 32 bits."""
        self.weight = tied.weight
        if tied.form is not None:
            self._form = tied.form
            weights.looked_up_bytes -= tied.form.nbytes
            return
        assert tied.weight is not None
        self._form = packed_form(tied.weight, weights)
        if self._form is None:
            weights.looked_up_bytes -= tied.weight.nbytes
        else:
            weights.num_bytes += self._form.nbytes
            self.weight = None
