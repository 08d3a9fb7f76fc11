"""Starts an engine's workers, and decides the number of KV cache blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tpengine.config import EngineConfig, own_code
from tpengine.errors import CacheSizeError, GraphCaptureError, counted
from tpengine.executor.executor import Executor
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger
from tpengine.scheduling.block_manager import BlockManager, most_held_blocks

logger = init_logger(__name__)

_GIB = 1 << 30
_ALLOCATION_TRIES = 3


def start_workers(config: EngineConfig, executor: Executor) -> list[MemoryLedger]:
    """Loads the model, measures the memory and allocates the cache, of `count_blocks` blocks.

    Returns:
        Each rank's account of its memory.

    Raises:
        EngineError: a worker could not start.
    """
    model, num_ranks = config.model, counted(config.parallel.world_size, "rank")
    facts = model.model, model.tokenizer or "none", model.dtype, model.seed, num_ranks
    logger.info("model %s, tokenizer %s, dtype %s, seed %d, %s on %s", *facts, config.device)
    if code := own_code(model.hf_config):
        logger.warning("each rank runs Python code of the model's folder: %s", code)
    start = time.monotonic()
    devices = executor.load()
    loaded = time.monotonic()
    ledgers = _open_cache(config, executor)
    num_blocks, num_host_blocks = count_blocks(ledgers)
    ready = time.monotonic()
    form = weights_form(ledgers)
    fewest = min(ledgers, key=lambda ledger: ledger.num_device_blocks)
    logger.info(
        "%s (%s) on %s: KV cache of %d blocks of %d tokens (%.3f GiB), swap space %.3f GiB, "
        "weights %.3f GiB%s; loaded in %.1f s, ready in %.1f s",
        config.model.architecture,
        config.model.implementation,
        devices[0] if len(devices) == 1 else f"{len(devices)} ranks",
        num_blocks,
        config.cache.block_size,
        num_blocks * fewest.block_bytes / _GIB,
        num_host_blocks * (fewest.block_bytes - fewest.draft_block_bytes) / _GIB,
        sum(ledger.weights_bytes for ledger in ledgers) / _GIB,
        f" ({form})" if form else "",
        loaded - start,
        ready - loaded,
    )
    if (lookahead := config.scheduler.lookahead) is not None:
        most, source = lookahead.num_speculative_tokens, lookahead.speculative_model
        logger.info("lookahead: %s guesses up to %d tokens of a sequence for a step", source, most)
    if len(ledgers) > 1 or config.device != "cpu":
        logger.info("memory of the ranks in GiB:\n%s", "\n".join(memory_table(ledgers, devices)))
    return ledgers


def _open_cache(config: EngineConfig, executor: Executor) -> list[MemoryLedger]:
    """Counts blocks and allocates them. On a GPU another process may take memory in between: then
    the memory is measured again, and fewer blocks are tried. Several ranks do not try again,
    because a rank that failed has left the collectives of the others."""
    may_retry = config.device != "cpu" and config.parallel.world_size == 1
    tries_left = _ALLOCATION_TRIES if may_retry else 1
    while True:
        ledgers = executor.profile_num_available_blocks()
        num_blocks, num_host_blocks = count_blocks(ledgers)
        check_cache_holds_one_sequence(config, num_blocks, ledgers)
        try:
            executor.init_cache_engine(num_blocks, num_host_blocks)
            executor.populate_cache()
            return ledgers
        except (CacheSizeError, GraphCaptureError) as error:
            tries_left -= 1
            if not tries_left or config.cache.num_device_blocks_override is not None:
                raise
            logger.warning("the cache could not be allocated, measuring memory again: %s", error)


def count_blocks(ledgers: Sequence[MemoryLedger]) -> tuple[int, int]:
    """Returns the numbers of blocks, on device and host, that every rank has room for."""
    num_host_blocks = min(ledger.num_host_blocks for ledger in ledgers)
    return min(ledger.num_device_blocks for ledger in ledgers), num_host_blocks


def weights_form(ledgers: Sequence[MemoryLedger]) -> str:
    """What became of a quantised file: the different texts of the ranks; empty for other files."""
    return "; ".join(dict.fromkeys(entry.weights_form for entry in ledgers if entry.weights_form))


def make_block_manager(config: EngineConfig, num_blocks: int, num_host_blocks: int) -> BlockManager:
    """Returns an empty block manager of that many blocks on the device and on the host."""
    return BlockManager(
        num_blocks,
        config.cache.block_size,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_kept_tokens=config.num_kept_tokens,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
    )


def memory_table(ledgers: Sequence[MemoryLedger], devices: Sequence[str]) -> list[str]:
    """Returns lines of text: each rank's memory by use, in GiB, and the rank that limits the
    others.

    Args:
        devices: a line about the device of each rank.
    """
    num_blocks = min(ledger.num_device_blocks for ledger in ledgers)
    on_gpu = any(ledger.logits_bytes for ledger in ledgers)
    lines = [
        "rank     total    others   weights  activations  communicator"
        f"{'     logits     graphs' if on_gpu else ''}  KV budget   blocks  device"
    ]
    for ledger in ledgers:
        activations = ledger.activation_peak_bytes - ledger.logits_bytes
        gpu_only = f" {ledger.logits_bytes / _GIB:10.3f} {ledger.graphs_bytes / _GIB:10.3f}"
        lines.append(
            f"{ledger.rank:4d} {ledger.total_bytes / _GIB:9.3f}"
            f" {ledger.held_by_others_bytes / _GIB:9.3f} {ledger.weights_bytes / _GIB:9.3f}"
            f" {activations / _GIB:12.3f} {ledger.communicator_bytes / _GIB:13.3f}"
            f"{gpu_only if on_gpu else ''}"
            f" {ledger.kv_budget_bytes / _GIB:10.3f} {ledger.num_device_blocks:8d}"
            f"  {f'{ledger.stage}, ' if ledger.stage else ''}{devices[ledger.rank]}"
        )
    limiting = [ledger for ledger in ledgers if ledger.num_device_blocks == num_blocks]
    others = [ledger for ledger in ledgers if ledger.num_device_blocks > num_blocks]
    if others:
        next_blocks = min(ledger.num_device_blocks for ledger in others)
        needed = (next_blocks - num_blocks) * limiting[0].block_bytes / _GIB
        ranks = ", ".join(str(ledger.rank) for ledger in limiting)
        lines.append(
            f"rank {ranks} limits every rank to {num_blocks} blocks ({devices[limiting[0].rank]}); "
            f"{needed:.3f} GiB more there would give all {next_blocks}"
        )
    return lines


def check_cache_holds_one_sequence(
    config: EngineConfig, num_blocks: int, ledgers: Sequence[MemoryLedger]
) -> None:
    """Checks that one sequence of the greatest length fits into the cache.

    Raises:
        CacheSizeError: it does not; the message gives the length and the cache size that would do.
    """
    block_size, longest = config.cache.block_size, config.model.max_model_len
    capacity, step_tokens = num_blocks * block_size, config.scheduler.max_num_batched_tokens
    most_blocks = most_held_blocks(config.num_kept_tokens, step_tokens, block_size)
    needed_blocks = min(-(-longest // block_size), most_blocks)
    what = f"max_model_len = {longest} tokens"
    if (encoder := config.model.encoder) is not None:
        what += f" and the longest prompt of the encoder, {encoder.max_len},"
        num_encoder_blocks = -(-encoder.max_len // block_size)
        needed_blocks += num_encoder_blocks
        capacity -= num_encoder_blocks * block_size
    if needed_blocks <= num_blocks:
        return
    limiting = min(ledgers, key=lambda ledger: ledger.num_device_blocks)
    if config.cache.num_device_blocks_override is not None:
        remedy = f"raise num_device_blocks_override to {needed_blocks}"
    else:
        # Rounded up, so that the value in the message suffices.
        needed = math.ceil(1e6 * needed_blocks * limiting.block_bytes / _GIB) / 1e6
        knob = "cpu_kv_cache_space" if config.device == "cpu" else "gpu_memory_utilization"
        remedy = f"raise {knob} so that the cache gets {needed:.6f} GiB"
    if capacity > 1:
        remedy = f"set max_model_len to at most {capacity}, or {remedy}"
    raise CacheSizeError(
        f"{what} do not fit into the KV cache of rank {limiting.rank}, "
        f"which has {num_blocks} blocks of {block_size} = {num_blocks * block_size} tokens; "
        f"{remedy}"
    )
