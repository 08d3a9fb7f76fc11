"""The parameters of a model under construction, and what of a checkpoint fills each.

A layer allocates its tensors here and declares, under the checkpoint's names, which rows or columns
of which tensor belong to this rank. A fused layer declares several names with views of one tensor.
The loader then only walks the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.ops.huge_pages import HugePageArena


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of one tensor of the checkpoint.

    Attributes:
        target: where it goes, a view of a parameter.
        dim: the dimension that ranks divide; None: every rank takes the whole.
        start: first index along `dim` of this rank's part.
        total: length of the whole tensor along `dim`. A part that reaches beyond it (padding) is
            filled with zeros there.
        split: the part's first dimension is read as these sizes (their product), for a target that
            is a view with more dimensions: so a fused tensor's rows change their order.
    """

    target: torch.Tensor
    dim: int | None = None
    start: int = 0
    total: int = 0
    split: tuple[int, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape that the checkpoint's tensor must have."""
        shape = list(self.target.shape)
        if self.split:
            shape = [self.total, *shape[len(self.split) :]]
        elif self.dim is not None:
            shape[self.dim] = self.total
        return tuple(shape)

    @property
    def length(self) -> int:
        """How many indices along `dim` the checkpoint has for this rank."""
        assert self.dim is not None
        if self.split:
            return math.prod(self.split)
        return max(0, min(self.target.shape[self.dim], self.total - self.start))


class Weights:
    """Collects the parameters that layers allocate while a model is built.

    Args:
        quantization: None, or int8 for linear layers in 8 bits (the output head excepted).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
        quantization: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.quantization = quantization
        self.arena = HugePageArena()
        """Where layers put what a CPU reads in every step."""
        self.shards: dict[str, WeightShard] = {}
        self.repeats: dict[str, str] = {}
        """Names that a checkpoint may have beside another, with the same values: tied weights."""
        self.num_bytes = 0
        """Bytes of all parameters, in the form that they have after loading, and of the tables
        that layers compute."""
        self._after_loading: list[Callable[[], None]] = []

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter."""
        parameter = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.num_bytes += parameter.nbytes
        return parameter

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """Counts what layers compute once and keep, e.g. rotary angles; returns it."""
        self.num_bytes += values.nbytes
        return values

    def declare(
        self,
        name: str,
        target: torch.Tensor,
        dim: int | None = None,
        start: int = 0,
        total: int = 0,
        split: tuple[int, ...] = (),
    ) -> None:
        """Says that the checkpoint's tensor `name` fills `target`, see `WeightShard`."""
        self.shards[name] = WeightShard(target, dim, start, total, split)

    def declare_repeat(self, name: str, original: str) -> None:
        """Says that the checkpoint's tensor `name`, if there is one, must equal `original`."""
        self.repeats[name] = original

    def replicated(self, name: str, *shape: int) -> torch.Tensor:
        """A parameter that every rank holds whole."""
        parameter = self.empty(*shape)
        self.declare(name, parameter)
        return parameter

    def after_loading(self, action: Callable[[], None]) -> None:
        """Registers what a layer does once its parameters are filled, e.g. packing them."""
        self._after_loading.append(action)

    def finish(self) -> None:
        """Runs the registered actions, each once, and forgets the declarations."""
        self.shards.clear()
        actions, self._after_loading = self._after_loading, []
        for action in actions:
            action()
