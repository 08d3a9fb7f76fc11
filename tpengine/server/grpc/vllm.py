"""vLLM's service for gateways: the same requests, limits and engine behind `VllmEngine`.

A gateway such as `smg` tokenizes, applies chat templates and finds stop strings in text itself; it
sends ids and gets ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

import tpengine
from tpengine.engine.requests import GenerateRequest
from tpengine.engine.tokenizer import tokenizer_archive
from tpengine.errors import InvalidPromptError, NotOfferedError, RequestAbortedError
from tpengine.inputs import PoolingParams
from tpengine.server.grpc.service import abort_requests, open_request
from tpengine.server.grpc.vllm_messages import VllmWriter, read_request
from tpengine.server.state import ServerState
from tpengine.server.stream_sender import send_stream

VLLM_SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_CHUNK_BYTES = 1 << 16
_ADVERTISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters whose defaults a gateway asks for, to set them in requests that do not."""


def _not_offered(name: str) -> Callable[[Any, Any, Any], Coroutine[Any, Any, Any]]:
    async def refuse(self: Any, request: Any, context: Any) -> Any:
        raise NotOfferedError(f"{name} is not offered by this server")

    return refuse


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves one engine. The methods raise errors; `Guard` turns them into status codes.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        """Completes one prompt. A request that is aborted ends with that as its finish reason."""

        async def send(messages: list[pb.GenerateResponse]) -> None:
            for message in messages:
                await context.write(message)

        state, writer = self._state, VllmWriter(request)
        max_model_len = state.loaded_engine().model_config.max_model_len
        state.check_open(None)
        if request.WhichOneof("input") == "text":
            state.check_text("text", [request.text])
        elif not request.sampling_params.truncate_prompt_tokens:
            state.check_num_tokens(len(request.tokenized.input_ids))
        asked = read_request(request, self._state.limits, max_model_len)
        try:
            async with open_request(state, context, asked, request.request_id or None) as mailbox:
                await send_stream(mailbox, writer, send, self._state.limits.write_s)
        except RequestAbortedError as error:
            await send(await writer.write_abort(error.output))

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Gives the embedding of one prompt."""
        self._state.loaded_engine()
        self._state.check_open(None)
        self._state.check_num_tokens(len(request.tokenized.input_ids))
        token_ids = list(request.tokenized.input_ids)
        asked = GenerateRequest(None, token_ids, pooling_params=PoolingParams())
        request_id = request.request_id or None
        async with open_request(self._state, context, asked, request_id) as mailbox:
            output = await mailbox.take()
        return pb.EmbedResponse(
            embedding=output.pooled,
            prompt_tokens=len(output.prompt_token_ids),
            embedding_dim=len(output.pooled or ()),
        )

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends requests of the same client, or with the admin token of any client."""
        count, most = len(request.request_ids), self._state.limits.max_calls
        if count > most:
            raise InvalidPromptError.of_field("request_ids", f"must be at most {most}, got {count}")
        await abort_requests(self._state, request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether new requests are taken and make progress: readiness."""
        why = self._state.why_not_ready()
        message = self._state.state.value if why is None else why
        return pb.HealthCheckResponse(healthy=why is None, message=message)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The model, its tokenizer, and the defaults of sampling parameters."""
        engine, sampling = self._state.loaded_engine(), self._state.sampling
        model = engine.model_config
        defaults = {name: sampling[name] for name in _ADVERTISED if name in sampling}
        return pb.GetModelInfoResponse(
            model_path=model.model,
            served_model_name=self._state.model,
            tokenizer_path=model.tokenizer or "",
            is_generation=model.pooling is None,
            supports_vision=engine.llm_engine.reads_pictures,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len,
            vocab_size=model.vocab_size,
            model_type=model.hf_config.get("model_type") or "",
            architectures=[model.architecture],
            eos_token_ids=sorted(model.end_token_ids),
            default_sampling_params_json=json.dumps(defaults),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The engine's state and sizes."""
        engine = self._state.loaded_engine()
        scheduler, seeing = await engine.get_scheduler_config(), {}
        if (pictures := scheduler.pictures) is not None:
            schemes = "http,https,data" if pictures.allowed_hosts else "data"
            seeing = {"mm_processor": "inprocess", "mm_media_ref_schemes": schemes}
            seeing["mm_item_limits"] = f"image={pictures.max_per_prompt}"
        return pb.GetServerInfoResponse(
            **seeing,
            active_requests=engine.get_num_unfinished_requests(),
            uptime_seconds=self._state.uptime_s,
            data_parallel_size=1,
            block_size=engine.stats().cache.block_size,
            max_num_seqs=scheduler.max_num_seqs,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Queues, cache and rates at this moment."""
        engine = self._state.loaded_engine()
        stats = engine.stats()
        cache, queues = stats.cache, stats.queues
        num_waiting = queues.num_waiting + queues.num_swapped
        num_tokens = cache.num_total_blocks * cache.block_size
        load = pb.SchedulerLoad(
            num_running_reqs=queues.num_running,
            num_waiting_reqs=num_waiting,
            num_total_reqs=queues.num_running + num_waiting,
            num_used_tokens=num_tokens - cache.num_free_blocks * cache.block_size,
            max_total_num_tokens=num_tokens,
            token_usage=cache.usage,
            gen_throughput=stats.output_tokens_per_s,
            cache_hit_rate=cache.prefix_hits / max(1, stats.prompt_tokens),
            max_running_requests=(await engine.get_scheduler_config()).max_num_seqs,
            num_waiting_uncached_tokens=queues.num_queued_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=tpengine.__version__,
            dp_rank_count=1,
            loads=[load] if request.dp_rank == 0 else [],
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The tokenizer's files as a ZIP archive in parts; the last part has its SHA-256."""
        engine = self._state.loaded_engine()
        tokenizer, folder = engine.llm_engine.tokenizer, engine.model_config.tokenizer
        if tokenizer is None or folder is None:
            raise NotOfferedError("GetTokenizer is not offered: this model has no tokenizer")
        # On a thread: the first time takes up to tenths of a second.
        archive = await asyncio.to_thread(tokenizer_archive, tokenizer, folder)
        for start in range(0, len(archive), _CHUNK_BYTES):
            chunk = common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
            if start + _CHUNK_BYTES >= len(archive):
                chunk.sha256 = hashlib.sha256(archive).hexdigest()
            yield chunk

    FlushCache = _not_offered("FlushCache")
    StartProfile = _not_offered("StartProfile")
    StopProfile = _not_offered("StopProfile")
    SubscribeKvEvents = _not_offered("SubscribeKvEvents")
