"""Checks of requests with several sequences, and of priorities, against the engine's limits."""

from __future__ import annotations

from tpengine.config import MAX_PRIORITY, SchedulerConfig
from tpengine.engine.beam_search import num_candidates
from tpengine.errors import InvalidPriorityError, InvalidSamplingParamsError
from tpengine.sampling_params import SamplingParams


def check_several(
    params: SamplingParams, num_end_ids: int, config: SchedulerConfig, vocab_size: int
) -> int:
    """Makes sure that all sequences of a request can run at once.

    Returns:
        Continuations of each beam to look at after every token; 0 without beam search.

    Raises:
        InvalidSamplingParamsError: more sequences than slots, or than the vocabulary or a step has
            room for.
    """
    count = params.num_sequences
    if count > config.max_num_seqs:
        raise InvalidSamplingParamsError(
            f"n or best_of = {count} sequences, but max_num_seqs = {config.max_num_seqs} run at "
            "once; ask for fewer, or raise max_num_seqs"
        )
    if not params.use_beam_search:
        return 0
    if count > config.max_num_batched_tokens:
        raise InvalidSamplingParamsError(
            f"best_of = {count} beams advance together, but a step holds max_num_batched_tokens = "
            f"{config.max_num_batched_tokens} tokens; ask for fewer, or raise it"
        )
    candidates = num_candidates(count, num_end_ids)
    if candidates > vocab_size:
        raise InvalidSamplingParamsError(
            f"beam search with best_of = {count} and {num_end_ids} end tokens looks at "
            f"{candidates} candidates, but the vocabulary has {vocab_size}; ask for fewer"
        )
    return candidates


def check_priority(priority: int, config: SchedulerConfig) -> None:
    """Makes sure that a priority means something.

    Raises:
        InvalidPriorityError: it is out of range, or the policy does not know priorities.
    """
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidPriorityError(
            f"priority must be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority!r}"
        )
    if priority and config.policy == "fcfs":
        raise InvalidPriorityError(
            f"priority = {priority}, but requests are served as they arrive; set "
            "scheduling_policy='priority', or leave the priority at 0"
        )
