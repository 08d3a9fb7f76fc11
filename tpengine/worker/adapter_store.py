"""The adapters of one rank: in slots on the device, and the last used ones in host memory."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tpengine.checkpoint.adapter_files import read_adapter
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import InvalidAdapterError
from tpengine.layers.device_values import Int32
from tpengine.layers.lora import AdapterLayers, HostAdapter
from tpengine.logger import init_logger
from tpengine.messages import AdapterLoad

logger = init_logger(__name__)


@dataclass(eq=False)
class AdapterStore:
    """Loads adapters into the slots of a model's layers.

    Args:
        max_in_host: most adapters in host memory; the least recently loaded one is dropped.
        parallel: ranks load together: an adapter that one of them cannot load is loaded by none.
    """

    layers: AdapterLayers
    _max_in_host: int
    _parallel: ParallelState
    _device: torch.device
    _in_host: OrderedDict[bytes, HostAdapter] = field(default_factory=OrderedDict)

    def load(self, loads: Sequence[AdapterLoad]) -> dict[bytes, str]:
        """Puts adapters into their slots; returns by key why one could not be loaded. Its slot then
        adds nothing, and the driver ends its requests."""
        if not loads:
            return {}
        problems: dict[bytes, str] = {}
        # An adapter has hundreds of matrices, which are so small that torch would wait longer for
        # its other threads than it computes.
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            for adapter in loads:
                try:
                    self.layers.fill(adapter.slot, self._find(adapter))
                except (InvalidAdapterError, SafetensorError, OSError) as error:
                    problems[adapter.key] = f"rank {self._parallel.rank}: {error}"
                    logger.warning("an adapter is not loaded: %s", error)
        here = [float(adapter.key in problems) for adapter in loads]
        failed = self._parallel.all_reduce(torch.tensor(here, device=self._device))
        self._parallel.wait_for_queued(self._device)
        for adapter, count in zip(loads, failed.tolist(), strict=True):
            if count:
                problems.setdefault(adapter.key, "another rank cannot load it, see its log")
                self.layers.fill(adapter.slot, {})
        return problems

    def _find(self, adapter: AdapterLoad) -> HostAdapter:
        if adapter.key in self._in_host:
            self._in_host.move_to_end(adapter.key)
            return self._in_host[adapter.key]
        layers = self.layers
        folder = read_adapter(adapter.path, layers.targets, layers.max_rank)
        if folder.key != adapter.key:
            raise InvalidAdapterError(
                f"the adapter in {adapter.path} is not the one that the driver has checked: its "
                "files have changed, or are not the same on all machines"
            )
        self._in_host[adapter.key] = part = layers.own_part(load(folder.data), folder.parts)
        if len(self._in_host) > self._max_in_host:
            self._in_host.popitem(last=False)
        return part


def group_rows(slots: Int32, num_tokens: Int32) -> tuple[Int32, Int32] | None:
    """Returns the arrays of `LoRARows` for a step; None: no row has an adapter.

    Args:
        slots: the adapter's slot of each row; -1: none.
        num_tokens: of each row.
    """
    if (slots < 0).all():
        return None
    slot_of_token = np.repeat(slots, num_tokens)
    order = np.argsort(slot_of_token, kind="stable").astype(np.int32)
    used, counts = np.unique(slot_of_token[slot_of_token >= 0], return_counts=True)
    ends = np.cumsum(counts)
    groups = np.stack([used, ends - counts, ends], axis=1).astype(np.int32)
    return order[len(order) - ends[-1] :], groups
