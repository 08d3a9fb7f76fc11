"""What a computed step changes: tokens are in the cache now, forks share them, sequences leave."""

from __future__ import annotations

from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.queues import RequestQueues
from tpengine.scheduling.step import SchedulerOutput
from tpengine.sequence import Sequence, SequenceStatus


def book_step(output: SchedulerOutput, queues: RequestQueues, blocks: BlockManager) -> None:
    """Books a step that has been computed, after its tokens have been processed.

    Sequences that have meanwhile been moved to a finished status give blocks and slots back;
    requests without an unfinished sequence leave.
    """
    running = SequenceStatus.RUNNING
    block_size = blocks.block_size
    finished: list[Sequence] = []
    # Their tokens are their parents' already, their blocks are not yet.
    replaced = {child.seq_id for _, child in output.decisions.forks}
    sizes = output.step_input.num_scheduled_tokens
    for sequence, size in zip(output.rows, sizes, strict=True):
        if sequence.slot is None:  # aborted while the step was computed
            continue
        num_computed = sequence.num_computed_tokens + size
        sequence.num_computed_tokens = num_computed
        filled_block = size > 1 or num_computed % block_size == 0
        if filled_block and sequence.seq_id not in replaced:
            blocks.mark_computed(sequence)
        if sequence.status is not running:
            finished.append(sequence)
    for parent, child in output.forks:
        if child.slot is not None:
            queues.fork(parent, child, parent.num_computed_tokens)
            if child.status is not running:
                finished.append(child)
    queues.in_flight.clear()
    for parent, child in output.decisions.forks:
        queues.fork(parent, child, parent.num_computed_tokens)
        queues.slots.fork(parent, child)
    for sequence in output.decisions.overridden:
        queues.slots.override(sequence)
    for sequence in finished:
        queues.retire(sequence)
    if queues.common:
        queues.fork_waiting()
