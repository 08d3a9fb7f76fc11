"""Mixtures of experts: each token goes through a few of many MLPs, and their answers are summed.

Every rank has a part of every expert, divided as any MLP: columns first, then rows. All ranks
choose alike, because each holds the router whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpengine.errors import ConfigError, counted
from tpengine.layers.linear import ReplicatedLinear
from tpengine.layers.weights import Weights, WeightShard
from tpengine.ops.expert_ops import expert_mlp, pack_experts, top_experts
from tpengine.ops.library import has_cpu_kernels
from tpengine.ops.quantized_ops import QuantizedFormat

_PADDED_SHARE = 16
"""A rank's part of an expert is padded to a multiple of this, as the packed kernels need it."""

_MAX_TOP_K = 64
"""Most experts of a token; see `ops.expert_ops.expert_mlp`."""


class Router(ReplicatedLinear):
    """Decides between experts or weighs one; never quantised."""

    may_be_stored = False

    def _rounded_format(self, weights: Weights, in_features: int) -> QuantizedFormat | None:
        return None


@dataclass(frozen=True)
class ExpertTraits:
    """The experts of a layer.

    Attributes:
        top_k: number of experts that a token goes to.
        intermediate_size: of one expert, over all ranks.
        normalize: whether a token's weights are divided by their sum.
        names: what the checkpoint calls gate, up and down.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    normalize: bool
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class Experts:
    """The router and the experts, `down(silu(gate(x)) * up(x))` each.

    Args:
        prefix: of the names in the checkpoint, e.g. `model.layers.0.mlp`.

    Raises:
        ConfigError: a token cannot go to that many experts.
    """

    def __init__(self, weights: Weights, prefix: str, traits: ExpertTraits) -> None:
        self._traits = traits
        count, hidden_size = traits.num_experts, traits.hidden_size
        if not 1 <= traits.top_k <= min(count, _MAX_TOP_K):
            raise ConfigError(
                f"num_experts_per_tok = {traits.top_k} of {counted(count, 'expert')} is not "
                f"supported: from 1 to all experts, at most {_MAX_TOP_K}; correct config.json"
            )
        self.router = Router(weights, f"{prefix}.gate", hidden_size, count)
        parallel, total = weights.parallel, traits.intermediate_size
        part = -(-total // (_PADDED_SHARE * parallel.tp_size)) * _PADDED_SHARE
        self.gate_up = weights.empty(count, 2 * part, hidden_size)
        self.down = weights.empty(count, hidden_size, part)
        start = parallel.tp_rank * part
        for i in range(count):
            targets = (self.gate_up[i, :part], self.gate_up[i, part:], self.down[i])
            for name, target, dim in zip(traits.names, targets, (0, 0, 1), strict=True):
                shard = WeightShard(target, dim, start, total)
                weights.declare(f"{prefix}.experts.{i}.{name}.weight", shard)
        if weights.device.type == "cpu" and has_cpu_kernels():
            weights.after_loading(lambda: self._pack(weights))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]` to this rank's part of the answers, of the same shape; the
        caller sums over ranks."""
        traits = self._traits
        logits = self.router.forward(x)
        expert_ids = x.new_empty(x.shape[0], traits.top_k, dtype=torch.int32)
        expert_weights = x.new_empty(x.shape[0], traits.top_k, dtype=torch.float32)
        top_experts(expert_ids, expert_weights, logits, traits.normalize)
        out = torch.empty_like(x)
        expert_mlp(out, x, expert_ids, expert_weights, self.gate_up, self.down)
        return out

    def _pack(self, weights: Weights) -> None:
        plain_bytes = self.gate_up.nbytes + self.down.nbytes
        self.gate_up = pack_experts(self.gate_up, weights.arena)
        self.down = pack_experts(self.down, weights.arena)
        weights.num_bytes += self.gate_up.nbytes + self.down.nbytes - plain_bytes
