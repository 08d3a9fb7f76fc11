"""Why a request can never run, in words its user can act on."""

from __future__ import annotations

from tpengine.config import SchedulerConfig
from tpengine.scheduling.allocation import AllocStatus
from tpengine.scheduling.block_manager import BlockManager
from tpengine.sequence import Request


def why_never(request: Request, config: SchedulerConfig, blocks: BlockManager) -> str | None:
    """Why a waiting request cannot be started however long it waits; None if it can."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens > config.max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens, but max_model_len is "
            f"{config.max_model_len}; shorten the prompt, or raise max_model_len if the model "
            "was made for more"
        )
    limit = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and num_prompt_tokens > limit:
        return (
            f"the prompt has {num_prompt_tokens} tokens, but a step holds at most "
            f"max_num_batched_tokens = {limit} and prompts are not split; shorten the prompt, "
            "raise max_num_batched_tokens, or set enable_chunked_prefill=True"
        )
    num_slots = len(request.unfinished_sequences)
    if num_slots > config.max_num_seqs:
        return (
            f"the request has {num_slots} sequences, but max_num_seqs = {config.max_num_seqs} "
            "run at once; ask for fewer, or raise max_num_seqs"
        )
    if blocks.can_allocate(request) is AllocStatus.NEVER:
        return too_long_for_cache(request, blocks)
    return None


def why_no_more(request: Request, blocks: BlockManager) -> str | None:
    """Why a running request cannot go on even if it were alone; None if it could."""
    num_needed = blocks.num_held_blocks(request) + blocks.num_lacking_blocks(request)
    if num_needed > blocks.num_total_blocks:
        return too_long_for_cache(request, blocks, num_needed)
    return None


def too_long_for_cache(
    request: Request, blocks: BlockManager, num_needed: int | None = None
) -> str:
    """Words for a request that needs more blocks than there are: so many, or what a new start
    would take."""
    if num_needed is None:
        num_needed = blocks.num_needed_blocks(request)
    num_tokens = sum(sequence.num_tokens for sequence in request.unfinished_sequences)
    return (
        f"the request's {num_tokens} tokens (prompt and output) need "
        f"{num_needed} blocks of {blocks.block_size}, but the KV cache has "
        f"{blocks.num_total_blocks}, which hold "
        f"{blocks.num_total_blocks * blocks.block_size} tokens; shorten the prompt, lower "
        "max_tokens, or give the cache more memory (gpu_memory_utilization on a GPU, "
        "cpu_kv_cache_space on a CPU)"
    )
