"""CUDA graphs of decode steps: hundreds of launches become one.

A graph is recorded for each of a few batch sizes. A replay reads its inputs from the memory that it
was recorded with, so a step's inputs are written there first. Smaller batches are padded with rows
of length 0 whose K and V go nowhere (slot -1). The output head and sampling are not recorded: the
device is busy with the graph while they are launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import GraphCaptureError, is_device_fault
from tpengine.layers.attention import AttentionMetadata
from tpengine.layers.gpu_attention import GpuBatch
from tpengine.logger import init_logger
from tpengine.ops.library import has_cuda_kernels
from tpengine.worker.decode_recording import MAX_RECORDED_ROWS, Forward
from tpengine.worker.input_batch import StepArrays
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)

_NUM_COLUMNS = 4  # token ids, positions, slots, lengths
DRIVER_BYTES = 64 << 20
"""More than a graph of thousands of kernels takes outside torch's allocator."""

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run.

    Attributes:
        replay: runs it again; returns the same tensor with new contents.
        destroy: destroys the graph, even if other objects still refer to it. Called once, and last.
    """

    replay: Run
    destroy: Callable[[], None]


Capture = Callable[[Run], Recorded]
"""Records a run."""


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes that get a graph, ascending. Small sizes are dense: padding costs most there."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_RECORDED_ROWS, 16)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaCapture:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._device = device

    def __call__(self, run: Run) -> Recorded:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # libraries set themselves up in the first call, which no graph may hold
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of the process may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = run()
        except BaseException:
            graph.reset()  # the error's traceback keeps the object alive
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return Recorded(replay, graph.reset)


class DecodeGraphs:
    """Graphs of the model over one KV cache.

    NCCL waits, without a bound, until every graph that holds calls of a communicator is destroyed
    before it releases the communicator. `close` destroys the graphs at a known time; their Python
    objects may live longer, in the traceback of an error for example.

    Args:
        forward: the model over its cache: token ids and metadata to hidden states.
        make_batch: makes what attention needs besides the metadata, once for each recording.
        max_rows: of a decode step.
        max_blocks: of a sequence.
        capture: records a run.

    Attributes:
        sizes: batch sizes, ascending.
        max_rows: the largest of them.
    """

    def __init__(
        self,
        forward: Forward,
        make_batch: Callable[[], GpuBatch | None],
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.max_rows = max_rows
        self.sizes = graph_sizes(max_rows)
        self._forward = forward
        self._make_batch = make_batch
        self._device = device
        self._capture = capture
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        # A size uses the beginning, column after column, so that one copy fills all columns.
        self._columns = torch.zeros(_NUM_COLUMNS * max_rows, **options)
        self._block_table = torch.zeros(max_rows, max_blocks, **options)
        self._no_chunks = torch.zeros(1, **options)
        self._recorded: dict[int, Recorded] = {}
        self._size_of = np.array(self.sizes)[np.searchsorted(self.sizes, np.arange(max_rows + 1))]

    def record(self) -> None:
        """Records a graph of each size, the largest first: the others then find memory in the pool.

        Raises:
            GraphCaptureError: there is not enough memory, or something cannot be recorded.
            RuntimeError: a kernel has failed (`errors.is_device_fault`).
        """
        start = time.perf_counter()
        for size in tqdm(self.sizes[::-1], desc="CUDA graphs", unit="graph", leave=False):
            self._record(size)
        text = "CUDA graphs of %d batch sizes up to %d recorded in %.1f s"
        logger.info(text, len(self.sizes), self.max_rows, time.perf_counter() - start)

    def estimate_bytes(self) -> int:
        """Records the largest two graphs and returns the memory that all will take: each of the
        others takes at most what the second took, which reused memory of the first.

        Raises:
            GraphCaptureError: see `record`.
        """
        taken = []
        for size in self.sizes[-2:][::-1]:
            growth = CudaGrowth(self._device)
            self._record(size)
            taken.append(growth.num_bytes())
        return taken[0] + taken[-1] * (len(self.sizes) - 1)

    def close(self) -> None:
        """Destroys the graphs; a second call does nothing."""
        while self._recorded:
            self._recorded.popitem()[1].destroy()

    def write(
        self, arrays: StepArrays, uploads: Uploads, token_ids: torch.Tensor | None = None
    ) -> None:
        """Writes the inputs of a step of decodes to where its graph reads them.

        Args:
            token_ids: `[num_rows]`, on the device, in place of those of `arrays`.
        """
        num_rows = len(arrays.seq_lens)
        columns = np.zeros((_NUM_COLUMNS, int(self._size_of[num_rows])), np.int32)
        columns[2] = -1
        inputs = (arrays.token_ids, arrays.positions, arrays.slot_mapping, arrays.seq_lens)
        columns[:, :num_rows] = inputs
        sent, table = uploads.send([columns.reshape(-1), arrays.block_table])
        self._columns[: sent.shape[0]].copy_(sent)
        if token_ids is not None:
            self._columns[:num_rows].copy_(token_ids)
        self._block_table[:num_rows, : table.shape[1]].copy_(table)

    def run(self, num_rows: int) -> torch.Tensor:
        """Replays the graph over what was written; hidden states `[num_rows, hidden_size]`, valid
        until the next run."""
        return self._recorded[int(self._size_of[num_rows])].replay()[:num_rows]

    def _record(self, size: int) -> None:
        self._columns.zero_()
        self._columns[2 * size : 3 * size].fill_(-1)
        try:
            self._recorded[size] = self._capture(partial(self._run, size))
        except torch.OutOfMemoryError as error:
            raise GraphCaptureError(
                f"the CUDA graph of decode steps of {size} sequences does not fit into the "
                f"device's memory ({error}); lower gpu_memory_utilization or max_num_seqs, or "
                "set enforce_eager=True (--enforce-eager), which is slower"
            ) from error
        except RuntimeError as error:
            if is_device_fault(error):
                raise
            raise GraphCaptureError(
                f"decode steps of {size} sequences cannot be recorded as a CUDA graph "
                f"({error}); set enforce_eager=True (--enforce-eager), which is slower"
            ) from error

    def _run(self, size: int) -> torch.Tensor:
        columns = self._columns[: _NUM_COLUMNS * size].view(_NUM_COLUMNS, size)
        token_ids, positions, slots, seq_lens = columns
        table = self._block_table[:size]
        metadata = AttentionMetadata(positions, slots, table, seq_lens, self._no_chunks, size)
        metadata.gpu = self._make_batch()
        return self._forward(token_ids, metadata)


class CudaGrowth:
    """Measures the device memory that this process takes from now on and keeps.

    torch's allocator reports its own part. What drivers take besides is read from the device's free
    memory; other processes change that too, so it counts for at most `DRIVER_BYTES`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved, self._free = self._measure()

    def num_bytes(self) -> int:
        """Bytes since the start; at least 0."""
        reserved, free = self._measure()
        own = max(0, reserved - self._reserved)
        return own + min(max(0, self._free - free - own), DRIVER_BYTES)

    def _measure(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]


def agree_on_graphs(parallel: ParallelState, device: torch.device) -> bool:
    """Asks all ranks whether graphs can be recorded at every one of them: a graph holds its rank's
    part of what the ranks exchange. Logs a warning if they cannot."""
    reasons = []
    if not has_cuda_kernels():  # the plain ops read lengths on the host
        reasons.append("the CUDA library is not loaded")
    if not parallel.can_be_recorded:
        reasons.append("a graph cannot hold how its ranks exchange tensors")
    if parallel.all_can(not reasons, device):
        return True
    why = " and ".join(reasons) or "another rank cannot record them"
    logger.warning("rank %d runs without CUDA graphs, which is slower: %s", parallel.rank, why)
    return False
