"""CUDA graphs of decode steps: a step's hundreds of launches become one.

A graph is recorded for each of a few batch sizes and replayed over the same memory, into which a
step's inputs are written before; smaller batches are padded with rows of length 0 whose K and V go
nowhere (slot -1). The output head and sampling stay outside: their launches hide behind the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tpengine.worker.input_batch import StepArrays
from tpengine.worker.memory import CudaGrowth
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)

LARGEST_SIZE = 256
"""Rows; above, a step takes long enough to hide its launches."""
_NUM_COLUMNS = 4  # token ids, positions, slots, lengths

Forward = Callable[[torch.Tensor, AttentionMetadata], torch.Tensor]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run did.

    Attributes:
        replay: does it again.
        destroy: forgets it, whoever still refers to this; called once, and last.
    """

    replay: Run
    destroy: Callable[[], None]


Capture = Callable[[Run], Recorded]
"""Records what a run does."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending: dense where padding would cost most."""
    limit = min(max_num_seqs, LARGEST_SIZE)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, LARGEST_SIZE, 16)]
    return [size for size in sizes if size < limit] + [limit]


class CudaCapture:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
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
        # Other threads of the process may go on with what they do on the device.
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = run()
        except BaseException:
            graph.reset()  # the frames of the error hold it
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return Recorded(replay, graph.reset)


class DecodeGraphs:
    """Graphs of the model over one KV cache.

    NCCL does not let go of a communicator before each graph that holds its calls is destroyed, nor
    gives up waiting. So they are destroyed by `close`, and not when the last that refers to them,
    the frame of an error perhaps, is gone.

    Args:
        forward: the model, over its cache: token ids and metadata to hidden states.
        make_batch: what attention needs beside the metadata, anew for each recording.
        sizes: batch sizes, ascending.
        max_blocks: of a sequence.
        capture: how a run is recorded.
    """

    def __init__(
        self,
        forward: Forward,
        make_batch: Callable[[], GpuBatch | None],
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._make_batch = make_batch
        self.sizes = list(sizes)
        self._capture = capture
        largest = self.sizes[-1]
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        # A size uses the beginning, column after column, so that one copy fills them all.
        self._columns = torch.zeros(_NUM_COLUMNS * largest, **options)
        self._block_table = torch.zeros(largest, max_blocks, **options)
        self._no_chunks = torch.zeros(1, **options)
        self._recorded: dict[int, Recorded] = {}
        self._size_of = np.array(self.sizes)[np.searchsorted(self.sizes, np.arange(largest + 1))]

    def record(self, sizes: Sequence[int] | None = None) -> None:
        """Records a graph of each size (by default of all), the largest first, whose memory the
        others find in the pool.

        Raises:
            GraphCaptureError: there is not enough memory, or something cannot be recorded.
            RuntimeError: a kernel has failed (`errors.is_device_fault`).
        """
        wanted = sorted(self.sizes if sizes is None else sizes, reverse=True)
        for size in tqdm(wanted, desc="CUDA graphs", unit="graph", leave=False):
            self._columns.zero_()
            self._slots(size).fill_(-1)
            try:
                self._recorded[size] = self._capture(lambda size=size: self._run(size))
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

    def close(self) -> None:
        """Destroys the graphs; a second call does nothing."""
        while self._recorded:
            self._recorded.popitem()[1].destroy()

    def fits(self, arrays: StepArrays) -> bool:
        """Whether a step has a graph: each row decodes, and there are not too many."""
        num_seqs = len(arrays.seq_lens)
        return arrays.num_decodes == num_seqs <= self.sizes[-1]

    def prepare(
        self, arrays: StepArrays, uploads: Uploads, token_ids: torch.Tensor | None = None
    ) -> Run:
        """Writes a step's inputs to where its graph reads them.

        Args:
            token_ids: `[num_seqs]`, on the device, in place of those of `arrays`.

        Returns:
            What runs the graph and gives hidden states `[num_seqs, hidden_size]`, valid until the
            next step.
        """
        num_seqs = len(arrays.seq_lens)
        size = int(self._size_of[num_seqs])
        columns = np.zeros((_NUM_COLUMNS, size), np.int32)
        columns[2] = -1
        columns[:, :num_seqs] = (
            arrays.token_ids,
            arrays.positions,
            arrays.slot_mapping,
            arrays.seq_lens,
        )
        sent, table = uploads.send([columns.reshape(-1), arrays.block_table])
        self._columns[: sent.shape[0]].copy_(sent)
        if token_ids is not None:
            self._columns[:num_seqs].copy_(token_ids)
        self._block_table[:num_seqs, : table.shape[1]].copy_(table)
        replay = self._recorded[size].replay
        return lambda: replay()[:num_seqs]

    def _slots(self, size: int) -> torch.Tensor:
        return self._columns[2 * size : 3 * size]

    def _run(self, size: int) -> torch.Tensor:
        token_ids, positions, slots, seq_lens = self._columns[: _NUM_COLUMNS * size].split(size)
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=slots,
            block_table=self._block_table[:size],
            seq_lens=seq_lens,
            query_start_loc=self._no_chunks,
            num_decodes=size,
            gpu=self._make_batch(),
        )
        return self._forward(token_ids, metadata)


def estimate_bytes(graphs: DecodeGraphs, device: torch.device) -> int:
    """What all graphs will take, from the largest two, which are recorded here: the others take no
    more than the second, which found the memory of the first in their pool.

    Raises:
        GraphCaptureError: see `DecodeGraphs.record`.
    """
    taken = []
    for size in reversed(graphs.sizes[-2:]):
        growth = CudaGrowth(device)
        graphs.record([size])
        taken.append(growth.num_bytes())
    return taken[0] + taken[-1] * (len(graphs.sizes) - 1)


def agree_on_graphs(parallel: ParallelState, device: torch.device) -> bool:
    """Whether graphs can be recorded at all ranks, each of which records its part of what they
    exchange. Says so, once, where they cannot."""
    reasons = []
    if not has_cuda_kernels():  # the plain ones read lengths on the host
        reasons.append("the CUDA library is not loaded")
    if not parallel.can_be_recorded:
        reasons.append("a graph cannot hold how its ranks exchange tensors")
    if parallel.all_can(not reasons, device):
        return True
    logger.warning(
        "rank %d runs without CUDA graphs, which is slower: %s",
        parallel.tp_rank,
        " and ".join(reasons) or "another rank cannot record them",
    )
    return False
