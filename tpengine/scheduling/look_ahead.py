"""What the step after the one being scheduled will probably hold, for workers that can begin it
before the driver has seen the tokens of this one."""

from __future__ import annotations

from tpengine.errors import EngineError
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.queues import RequestQueues
from tpengine.scheduling.step import StepBuilder
from tpengine.sequence import Request, Sequence


def find_next(
    step: StepBuilder, queues: RequestQueues, blocks: BlockManager, max_model_len: int
) -> list[Sequence]:
    """Sequences that the next step goes on with unless they end, each with a place for the token
    that it samples now; where a block is missing it is given here, a step early.

    Empty where something is likely to come beside them: a prompt computed on its own would read
    all weights a second time, which costs more than the wait for the driver. Empty also for beams,
    whose next token the driver chooses. A sequence that is sure to end is left out.
    """
    rows = step.sized_rows()
    if queues.waiting or queues.swapped or step.forks or len(rows) < len(queues.owners):
        return []
    found = []
    for sequence, size in rows:
        request = queues.owners[sequence.seq_id]
        is_sampled = sequence.num_computed_tokens + size == len(sequence.token_ids)
        if request.num_candidates or not is_sampled:
            return []
        if not _is_sure_to_end(sequence, request, max_model_len):
            found.append(sequence)
    if blocks.num_free_blocks < len(found):  # nobody is to give way for what is only probable
        return []
    for sequence in found:
        growth = blocks.append(sequence, 1)
        if growth.copy is not None:  # its row of this step has its last block to itself already
            raise EngineError(f"{sequence} would be written a step early to a block of others")
        if growth.block_ids:
            step.add_blocks(sequence, growth.block_ids)
    return found


def _is_sure_to_end(sequence: Sequence, request: Request, max_model_len: int) -> bool:
    max_tokens = request.sampling_params.max_tokens
    is_last = max_tokens is not None and sequence.num_output_tokens + 1 >= max_tokens
    return is_last or len(sequence.token_ids) + 1 >= max_model_len
