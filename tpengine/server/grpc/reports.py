"""What the server says about itself, as messages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import tpengine
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.engine.stats import EngineStats
from tpengine.messages import MemoryLedger
from tpengine.sampling_params import MAX_LOGPROBS
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.limits import Limits
from tpengine.server.state import ServerState, State

_STATES = {
    "running": pb.SERVER_STATE_RUNNING,
    "recovering": pb.SERVER_STATE_RECOVERING,
    "draining": pb.SERVER_STATE_DRAINING,
    "dead": pb.SERVER_STATE_DEAD,
}
_LEDGER_FIELDS = [field.name for field in pb.MemoryLedger.DESCRIPTOR.fields]


def model_info(engine: AsyncLLMEngine, name: str) -> pb.GetModelInfoResponse:
    """The model, and what it can."""
    model = engine.get_model_config()
    tokenizer = engine.llm_engine.get_tokenizer()
    return pb.GetModelInfoResponse(
        model=name,
        architecture=model.architecture,
        dtype=model.dtype,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        end_token_ids=sorted(model.end_token_ids),
        has_tokenizer=tokenizer is not None,
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )


def server_info(state: ServerState, limits: Limits) -> pb.GetServerInfoResponse:
    """The engine, its ranks and the limits; the first two are missing while it is loaded."""
    message = pb.GetServerInfoResponse(
        version=tpengine.__version__,
        state=pb.SERVER_STATE_LOADING,
        uptime_s=state.uptime_s,
        limits=pb.ServerLimits(
            max_message_bytes=limits.max_message_bytes,
            max_metadata_bytes=limits.max_metadata_bytes,
            max_n=limits.max_n,
            max_logprobs=MAX_LOGPROBS,
            max_stops=limits.max_stops,
            max_stop_bytes=limits.max_stop_bytes,
            max_token_rules=limits.max_token_rules,
            max_queued_requests=limits.queue.max_requests,
            max_queued_tokens=limits.queue.max_tokens,
        ),
    )
    if state.state is State.DRAINING:
        message.state = pb.SERVER_STATE_DRAINING
    if state.engine is None:
        return message
    stats = state.engine.stats()
    if state.state is State.RUNNING:
        message.state = _STATES[stats.state]
    message.epoch = stats.epoch
    message.recoveries = stats.recoveries
    message.block_size = stats.cache.block_size
    message.num_device_blocks = stats.cache.num_total_blocks
    message.num_host_blocks = min((one.num_host_blocks for one in stats.ledgers), default=0)
    # Not strict: this is read while another thread replaces the group of ranks.
    for rank, (device, node) in enumerate(zip(stats.devices, stats.nodes, strict=False)):
        message.ranks.add(rank=rank, device=device, node=node)
    for ledger in stats.ledgers:
        if ledger.rank < len(message.ranks):
            message.ranks[ledger.rank].memory.CopyFrom(_ledger(ledger))
    return message


def _ledger(ledger: MemoryLedger) -> pb.MemoryLedger:
    return pb.MemoryLedger(**{name: getattr(ledger, name) for name in _LEDGER_FIELDS})


def loads(stats: EngineStats, num_open_calls: int) -> pb.GetLoadsResponse:
    """The moment, of the engine and of this process."""
    queues, cache = stats.queues, stats.cache
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pb.GetLoadsResponse(
        num_running=queues.num_running,
        num_waiting=queues.num_waiting,
        num_swapped=queues.num_swapped,
        num_queued=queues.num_queued,
        num_queued_tokens=queues.num_queued_tokens,
        num_total_blocks=cache.num_total_blocks,
        num_free_blocks=cache.num_free_blocks,
        cache_usage=cache.usage,
        num_prefix_queries=cache.prefix_queries,
        num_prefix_hits=cache.prefix_hits,
        output_tokens_per_s=stats.output_tokens_per_s,
        num_preemptions=stats.num_preemptions,
        num_steps=stats.num_steps,
        num_open_calls=num_open_calls,
        num_tasks=len(asyncio.all_tasks()),
        num_threads=len(os.listdir("/proc/self/task")),
        num_file_descriptors=len(os.listdir("/proc/self/fd")),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )
