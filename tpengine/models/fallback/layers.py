"""Our linear layers, embedding and head, as modules in the places of a transformers model's own.

Until `allocate` they have no weights and answer with a fixed function of each token, which is what
the probe needs: it takes no memory, and every input matters.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tpengine.config import ModelConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError
from tpengine.layers import linear
from tpengine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpengine.layers.weights import Weights, transposed

_STYLES = {
    "colwise": "colwise", "colwise_gather_output": "gather", "colwise_rep": "gather",
    "rowwise": "rowwise", "rowwise_split_input": "split", "rowwise_rep": "split",
}  # fmt: skip
"""Styles of a `base_model_tp_plan` that our linear layers have, by the names of transformers 4 and
5. gather: each rank gets the outputs of all; split: each rank gets the whole input."""
_REPLICATED_STYLES = {"replicated", "replicated_with_grad_allreduce", "replicate"}
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


class LayerInPlace(Protocol):
    """A layer that stands in a model before it has weights."""

    def allocate(self, weights: Weights, name: str) -> None:
        """Allocates this rank's part and declares it under the checkpoint's name."""


class LinearInPlace(nn.Module):
    """Stands for an `nn.Linear` or a `Conv1D` (a linear layer whose weight is transposed).

    Args:
        style: see `TensorParallelPlan.style`.
    """

    def __init__(self, original: Any, style: str, parallel: ParallelState) -> None:
        super().__init__()
        self._is_transposed = isinstance(original, Conv1D)
        shape = tuple(original.weight.shape)
        self.out_features, self.in_features = shape[::-1] if self._is_transposed else shape
        self._has_bias = original.bias is not None
        self.weight = torch.empty(0, dtype=original.weight.dtype)  # some classes read its dtype
        self._parallel = parallel
        self.style = style
        self._linear: linear.Linear | None = None
        self._rank_in, self._rank_out = self.in_features, self.out_features
        if style in ("colwise", "gather"):
            self._rank_out = parallel.divide(self.out_features, "outputs of a linear layer")
        elif style in ("rowwise", "split"):
            self._rank_in = parallel.divide(self.in_features, "inputs of a linear layer")

    def allocate(self, weights: Weights, name: str) -> None:
        inputs, outputs, bias = sizes = self.in_features, self.out_features, self._has_bias
        if self.style in ("colwise", "gather"):
            self._linear = linear.MergedColumnParallelLinear(
                weights, [name], inputs, [outputs], bias
            )
        elif self.style in ("rowwise", "split"):
            self._linear = linear.RowParallelLinear(weights, name, *sizes)
        else:
            self._linear = linear.ReplicatedLinear(weights, name, *sizes)
        if self._is_transposed:
            shards = weights.shards[f"{name}.weight"]
            shards[:] = map(transposed, shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., in_features]` to `[..., out_features]`; one of them is this rank's share if the
        style is colwise or rowwise."""
        gathers = self.style == "gather"
        if self.style == "split":
            x = x.narrow(-1, self._parallel.tp_rank * self._rank_in, self._rank_in)
        if self._linear is None:
            out = _outline(x, self._rank_in, self._rank_out)
            return out.repeat_interleave(self._parallel.tp_size, -1) if gathers else out
        flat = x.reshape(-1, self._rank_in).contiguous()
        out = self._linear.forward(flat).view(*x.shape[:-1], self._rank_out)
        return self._parallel.all_gather(out) if gathers else out


class EmbeddingInPlace(nn.Module):
    """Stands for the token embedding, with the factor that some classes have (`embed_scale`)."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._scale = getattr(original, "embed_scale", None)
        self._shape = tuple(original.weight.shape)
        self._dtype = original.weight.dtype
        self.embedding: VocabParallelEmbedding | None = None

    def allocate(self, weights: Weights, name: str) -> None:
        self.embedding = VocabParallelEmbedding(weights, name, *self._shape)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids `[1, num_tokens]` to `[1, num_tokens, hidden_size]`."""
        if self.embedding is None:
            angles = torch.arange(1, self._shape[1] + 1, device=token_ids.device) * 0.37
            out = torch.sin(token_ids.unsqueeze(-1) * angles).to(self._dtype)
        else:
            out = self.embedding.forward(token_ids.view(-1).int()).unsqueeze(0)
        return out if self._scale is None else out * self._scale


class HeadInPlace(nn.Module):
    """Stands for the output head.

    Args:
        tied: the embedding whose table is also the head's; None: the head has its own.
    """

    def __init__(self, original: nn.Linear, tied: EmbeddingInPlace | None) -> None:
        super().__init__()
        self.bias = original.bias
        self._sizes = original.out_features, original.in_features
        self._tied = [tied]  # in a list, so that it is no submodule
        self._head: ParallelLMHead | None = None

    def allocate(self, weights: Weights, name: str) -> None:
        tied = None if self._tied[0] is None else self._tied[0].embedding
        self._head = ParallelLMHead(weights, name, *self._sizes, tied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[1, num_rows, hidden_size]` to `[1, num_rows, vocab_size]`; see `ParallelLMHead`."""
        if self._head is None:
            out = _outline(x, self._sizes[1], self._sizes[0])
        else:
            out = self._head.forward(x.reshape(-1, x.shape[-1]).contiguous()).unsqueeze(0)
        return out if self.bias is None else out + self.bias


def _outline(x: torch.Tensor, in_features: int, out_features: int) -> torch.Tensor:
    """Answers for a linear layer that has no weights yet."""
    if x.shape[-1] != in_features:
        raise RuntimeError(f"a linear layer of {in_features} inputs got {x.shape[-1]}")
    index = torch.arange(out_features, device=x.device) * 7 % in_features
    return x[..., index] * 0.5


class TensorParallelPlan:
    """Which linear layers of a class are divided over ranks, by its `base_model_tp_plan`.

    Raises:
        ConfigError: there is more than one rank, and the class has no plan, or a plan of which our
            layers lack a style.
    """

    def __init__(self, root: Any, config: ModelConfig, parallel: ParallelState) -> None:
        self.parallel = parallel
        self._styles: dict[str, str] = {}
        if parallel.tp_size == 1:
            return
        if any(config.hf_config.get("activation_sparsity_pattern") or ()):
            reason = "activation_sparsity_pattern needs all values of an MLP on one rank"
            raise self._refusal(config, reason)
        plan = getattr(root, "_tp_plan", None) or {}
        linears = {_wildcard(n) for n, m in root.named_modules() if type(m) in (nn.Linear, Conv1D)}
        embedded = {id(root.get_input_embeddings()), id(root.get_output_embeddings())}
        own = {_wildcard(n) for n, m in root.named_modules() if id(m) in embedded}
        names = {_wildcard(n) for n, _ in root.named_parameters()} - own
        names |= {_wildcard(n) for n, _ in root.named_modules()}
        for name, style in plan.items():
            if name in own or name not in names or style in _REPLICATED_STYLES:
                continue
            if name not in linears or style not in _STYLES:
                reason = f"its plan divides {name!r} by {style!r}, which no layer of tpengine does"
                raise self._refusal(config, reason)
            self._styles[name] = _STYLES[style]
        if not self._styles:
            raise self._refusal(config, "it has no base_model_tp_plan")

    def style(self, name: str) -> str:
        """Returns colwise, rowwise, gather, split, or replicated for a linear layer."""
        return self._styles.get(_wildcard(name), "replicated")

    def divide_heads(self, root: Any, replaced: dict[str, Any]) -> None:
        """Divides the numbers of heads that attention modules with divided layers keep."""
        divided = {n.rpartition(".")[0] for n, m in replaced.items() if self.style(n) == "colwise"}
        for name in divided:
            module = root.get_submodule(name)
            for count in _HEAD_COUNTS:
                if isinstance(number := getattr(module, count, None), int):
                    setattr(module, count, number // self.parallel.tp_size)

    def _refusal(self, config: ModelConfig, reason: str) -> ConfigError:
        return ConfigError(
            f"{config.architecture} of {config.model} on transformers' code cannot be divided over "
            f"tensor_parallel_size = {self.parallel.tp_size}: {reason}; set it to 1"
        )


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
