"""Decode steps on CPU without Python between their ops: the CPU's counterpart of `gpu.graphs`.

A step of few rows is a hundred ops of about ten microseconds each. Python between two ops takes
long enough for the kernels' threads to fall asleep, and to wake a thread takes even longer. So the
model's forward pass over rows of one token is recorded once, with the largest number of rows, and
run with the rows that a step has, without padding.

Only tpengine's own ops can be recorded, and the exchanges of ranks over shared memory, which then
wait within the run and end it if they fail. A model that needs another op, and ranks that exchange
by gloo, run op by op.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpengine.layers.attention import AttentionMetadata, CrossRows
from tpengine.layers.device_values import Int32
from tpengine.layers.lora import AdapterLayers
from tpengine.logger import init_logger
from tpengine.ops.lora_ops import LoRARows
from tpengine.ops.recording import Recording
from tpengine.worker.input_batch import StepArrays
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)

MAX_RECORDED_ROWS = 256
"""Of a decode step, here and in CUDA graphs. In a larger step the time between ops is hidden."""

Forward = Callable[[torch.Tensor, AttentionMetadata], torch.Tensor]


class NotRecordableError(Exception):
    """The model calls an op that no recording can hold."""


class Workspace:
    """Allocates the tensors that a recording's ops write, `[num_rows, ...]` each. Memory to which
    no Python object refers any more is used again, so that it stays in the CPU's caches.

    Attributes:
        num_bytes: of all memory that was allocated.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._free: list[torch.Tensor] = []
        self._buffers: dict[int, torch.Tensor] = {}  # by address
        self._num_users: dict[int, int] = {}  # tensors over each
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor.

        Raises:
            NotRecordableError: its first dimension is not the number of rows.
        """
        if not shape or shape[0] != self._recording.num_rows:
            raise NotRecordableError(f"a tensor of shape {list(shape)} is made, without the rows")
        count = torch.Size(shape).numel()
        num_bytes = count * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.nbytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=lambda tensor: tensor.nbytes)
            self._free = [tensor for tensor in self._free if tensor is not buffer]
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            self._buffers[buffer.data_ptr()] = buffer
            self._recording.declare_rows(buffer)
            self.num_bytes += num_bytes
        return self.watch(buffer[:num_bytes].view(dtype).view(shape))

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor among the users of its memory, if that belongs to the workspace."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._buffers:
            self._num_users[address] = self._num_users.get(address, 0) + 1
            weakref.finalize(tensor, self._release, address).atexit = False
        return tensor

    def _release(self, address: int) -> None:
        self._num_users[address] -= 1
        if not self._num_users[address]:
            self._free.append(self._buffers[address])


class _Tape(TorchDispatchMode):
    """Lets tpengine's ops and views pass, makes new tensors in the workspace, and refuses every
    other op, since a recording would leave it out. It does not see numbers that are read out of a
    tensor (`tolist`, `numpy`): a model's forward pass must not read them."""

    def __init__(self, recording: Recording, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._workspace = workspace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks its compiler to leave a mode's methods alone, unless the mode says no. That
        imports the compiler, which takes a second, and nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "tpengine":
            before = self._recording.num_calls
            # The recording keeps its arguments, so it gets aliases: the end of the model's own
            # tensors is what frees their memory.
            func(*map(_alias, args), **{name: _alias(kwargs[name]) for name in kwargs})
            if self._recording.num_calls == before:
                raise NotRecordableError(f"{func} has no compiled kernel")
            return None
        if func is torch.ops.aten.new_empty.default:
            return self._workspace.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.empty_like.default:
            return self._workspace.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if not _may_make_views(func):
            raise NotRecordableError(f"{func} is no op of tpengine's")
        views = func(*args, **kwargs)
        memory = args[0].untyped_storage().data_ptr()
        for view in views if isinstance(views, (list, tuple)) else [views]:
            if view.untyped_storage().data_ptr() != memory:  # as `reshape` may
                raise NotRecordableError(f"{func} copies")
            self._workspace.watch(view)
        return views


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _may_make_views(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


class DecodeRecording:
    """The model's forward pass over one KV cache, for up to `max_rows` rows of one token.

    Args:
        forward: the model over its cache: token ids and metadata to hidden states.
        max_blocks: of a sequence.
        lora: what adds to rows with an adapter; None: no row has one.
        entering: `[most_tokens, hidden_size]`, from which `forward` takes the rows' hidden states;
            None: it takes token ids.
        max_cross_blocks: of an encoder prompt; 0: the model has one half.

    Attributes:
        num_bytes: memory of inputs and intermediate tensors.
        num_calls: ops in a step.

    Raises:
        NotRecordableError: the model needs an op of torch.
    """

    def __init__(
        self,
        forward: Forward,
        max_rows: int,
        max_blocks: int,
        lora: AdapterLayers | None = None,
        entering: torch.Tensor | None = None,
        max_cross_blocks: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self._recording = recording = Recording(max_rows)
        workspace = Workspace(recording)
        columns = torch.zeros(4, max_rows, dtype=torch.int32)
        table = torch.zeros(max_rows, max_blocks, dtype=torch.int32)
        lora_rows, cross_lengths = torch.zeros(2, max_rows, dtype=torch.int32)
        cross_table = torch.zeros(max_rows, max_cross_blocks, dtype=torch.int32)
        num_groups = 0 if lora is None else min(max_rows, lora.num_slots)
        groups = torch.zeros(num_groups, 3, dtype=torch.int32)  # empty ones
        for inputs in (columns, table, lora_rows, entering, cross_lengths, cross_table):
            if inputs is not None:
                recording.declare_rows(inputs)
        token_ids, positions, slots, seq_lens = columns
        no_chunks = torch.zeros(1, dtype=torch.int32)
        metadata = AttentionMetadata(positions, slots, table, seq_lens, no_chunks, max_rows)
        if max_cross_blocks:
            metadata.cross = CrossRows(cross_table, cross_lengths)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(recording.noting())
                stack.enter_context(_Tape(recording, workspace))
                if lora is not None:
                    stack.enter_context(lora.applied(LoRARows(lora_rows, groups)))
                self._hidden = forward(token_ids, metadata)
        except RuntimeError as error:  # the native side refuses a call
            raise NotRecordableError(str(error)) from error
        self._columns, self._table = columns.numpy(), table.numpy()
        self._lora_rows, self._groups = lora_rows.numpy(), groups.numpy()
        self._cross = cross_table.numpy(), cross_lengths.numpy()
        self.num_bytes = workspace.num_bytes + columns.nbytes + table.nbytes
        self.num_bytes += cross_table.nbytes
        self.num_calls = recording.num_calls

    def write(
        self, arrays: StepArrays, uploads: Uploads, token_ids: torch.Tensor | None = None
    ) -> None:
        """Writes a step's inputs to where the recording reads them; see `DecodeGraphs.write`."""
        num_rows = len(arrays.seq_lens)
        ids = arrays.token_ids if token_ids is None else token_ids.numpy()
        columns = (ids, arrays.positions, arrays.slot_mapping, arrays.seq_lens)
        for row, column in zip(self._columns, columns, strict=True):
            row[:num_rows] = column
        self._table[:num_rows, : arrays.block_table.shape[1]] = arrays.block_table
        if arrays.cross is not None:
            for inputs, rows in zip(self._cross, arrays.cross, strict=True):
                inputs[:num_rows] = rows

    def write_adapters(self, lora_rows: Int32, groups: Int32) -> None:
        """Writes the rows that have an adapter; see `group_rows`."""
        self._lora_rows[: len(lora_rows)] = lora_rows
        self._groups[:] = 0
        self._groups[: len(groups)] = groups

    def run(self, num_rows: int) -> torch.Tensor:
        """Runs the model over what was written; hidden states `[num_rows, hidden_size]`, valid
        until the next run."""
        self._recording.run(num_rows)
        return self._hidden[:num_rows]


def try_to_record(
    forward: Forward,
    max_rows: int,
    max_blocks: int,
    adapters: AdapterLayers | None = None,
    entering: torch.Tensor | None = None,
    max_cross_blocks: int = 0,
) -> DecodeRecording | None:
    """See `DecodeRecording`; None: the model needs an op that cannot be recorded."""
    try:
        return DecodeRecording(forward, max_rows, max_blocks, adapters, entering, max_cross_blocks)
    except NotRecordableError as error:
        logger.debug("decode steps run op by op: %s", error)
        return None
