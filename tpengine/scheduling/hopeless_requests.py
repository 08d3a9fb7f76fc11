"""Requests that can never run, or never continue, and why, in words for their users."""

from __future__ import annotations

from tpengine.config import SchedulerConfig
from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.sequence import Request


def why_too_long(
    num_prompt_tokens: int, config: SchedulerConfig, blocks: BlockManager
) -> str | None:
    """Why a prompt of this length can never be computed; None if it can."""
    if num_prompt_tokens > config.max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens, more than max_model_len = "
            f"{config.max_model_len}; shorten it, as truncate_prompt_tokens does, or raise "
            "max_model_len if the model was made for more"
        )
    limit = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and num_prompt_tokens > limit:
        return (
            f"the prompt has {num_prompt_tokens} tokens, but a step holds at most "
            f"max_num_batched_tokens = {limit} and prompts are not split; shorten the prompt, "
            "raise max_num_batched_tokens, or set enable_chunked_prefill=True"
        )
    num_needed = blocks.most_blocks_for(num_prompt_tokens)
    if num_needed > blocks.num_total_blocks:
        return _too_long_for_cache(num_prompt_tokens, num_needed, blocks)
    return None


def why_never(request: Request, config: SchedulerConfig, blocks: BlockManager) -> str | None:
    """Why a waiting request can never be started; None if it can."""
    fits = blocks.can_allocate(request) is not AllocStatus.NEVER
    reason = why_too_long(len(request.prompt_token_ids), config, blocks)
    if fits or reason is not None:
        return reason
    # It was preempted, and has output tokens too.
    return outgrown(request, blocks.num_needed_blocks(request), blocks)


def why_no_more(request: Request, blocks: BlockManager) -> str | None:
    """Why a running request cannot continue even alone; None if it can."""
    num_needed = blocks.num_held_blocks(request) + blocks.num_lacking_blocks(request)
    if num_needed > blocks.num_total_blocks:
        return outgrown(request, num_needed, blocks)
    return None


def outgrown(request: Request, num_needed: int, blocks: BlockManager) -> str:
    """What its user is told about a request that needs more blocks than there are."""
    num_tokens = sum(sequence.num_tokens for sequence in request.unfinished_sequences)
    num_tokens += 0 if request.encoder is None else request.encoder.num_tokens
    return _too_long_for_cache(num_tokens, num_needed, blocks)


def _too_long_for_cache(num_tokens: int, num_needed: int, blocks: BlockManager) -> str:
    return (
        f"the request's {num_tokens} tokens (prompt and output) need "
        f"{num_needed} blocks of {blocks.block_size}, but the KV cache has "
        f"{blocks.num_total_blocks}, which hold "
        f"{blocks.num_total_blocks * blocks.block_size} tokens; shorten the prompt, lower "
        "max_tokens, or give the cache more memory (gpu_memory_utilization on a GPU, "
        "cpu_kv_cache_space on a CPU)"
    )
