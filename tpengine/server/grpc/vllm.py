"""vLLM's service for gateways: the same requests, limits and engine behind `VllmEngine`.

A gateway such as `smg` tokenizes, applies chat templates and finds stop strings in text itself; it
sends ids and gets ids. Answers never hold text.

`vllm_engine.proto` comes with the package `smg-grpc-proto`. Most of its scalars cannot be unset: a
zero of them means vLLM's default, as in the servicer of vLLM itself.
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
from smg_grpc_proto.generated.common_pb2 import Modality

import tpengine
from tpengine.engine.requests import GenerateRequest
from tpengine.engine.tokenizer import tokenizer_archive
from tpengine.errors import InvalidPromptError, NotOfferedError, RequestAbortedError
from tpengine.inputs import PoolingParams
from tpengine.outputs import RequestOutput
from tpengine.proto.parameter_fields import read_field, read_fields
from tpengine.sampling_params import PARAMETERS, SamplingParams, StructuredOutputsParams
from tpengine.sampling_params import RequestOutputKind as Kind
from tpengine.server.grpc.service import abort_requests, open_request
from tpengine.server.limits import Limits, at_most, check_sampling, last_ids
from tpengine.server.state import ServerState
from tpengine.server.stream_sender import (
    CandidateTurns,
    Positions,
    of_output,
    of_prompt,
    send_stream,
)

REFUSED = (
    "mm_inputs", "extra_mm_inputs", "kv_transfer_params", "kv_transfer_params_json",
    "data_parallel_rank",
)  # fmt: skip
"""Fields of a request that would change its answer, and that are not offered."""
NOT_READ = ("spaces_between_special_tokens",)
"""It shapes text alone."""


def read_request(
    message: pb.GenerateRequest, limits: Limits, max_model_len: int
) -> GenerateRequest:
    """The engine's form of a message; id, owner and deadline, which belong to the call, are unset.

    Raises:
        RequestError: a field is out of its bounds, or is not offered.
    """
    for field, value in message.ListFields():
        name = field.name
        if name in REFUSED and value:  # rank 0 is the only one
            raise InvalidPromptError.of_field(name, "is not offered; leave it out")
    input_field = message.WhichOneof("input")
    if input_field is None:
        raise InvalidPromptError("a request needs tokenized or text; got neither")
    kind = Kind.DELTA if message.stream else Kind.FINAL_ONLY
    params = read_sampling_params(message.sampling_params, kind, limits, max_model_len)
    token_ids = None
    if input_field == "tokenized":
        token_ids = last_ids(message.tokenized.input_ids, params.truncate_prompt_tokens)
    prompt: Any = message.text if token_ids is None else None
    check_sampling(params, limits, max_model_len, [prompt if token_ids is None else token_ids])
    if message.HasField("media_refs"):
        prompt = {"prompt": prompt, "multi_modal_data": {"image": read_media(message.media_refs)}}
    return GenerateRequest(prompt, token_ids, params=params)


def read_media(message: pb.MediaRefs) -> list[str]:
    """The URLs of pictures, one for each placeholder.

    Raises:
        InvalidPromptError: one is of a video, or of sound.
    """
    for item in message.items:
        if item.modality not in (Modality.IMAGE, Modality.MODALITY_UNSPECIFIED):
            text = f"holds an item of modality {item.modality}; only IMAGE = 1 is served"
            raise InvalidPromptError.of_field("media_refs", text)
    return [item.url for item in message.items]


def read_sampling_params(
    message: pb.SamplingParams, kind: Kind, limits: Limits, max_model_len: int
) -> SamplingParams:
    """`SamplingParams` as vLLM reads them: a number that cannot be unset has its default if it is
    0. The output has text only if a stop string needs it.

    Raises:
        InvalidSamplingParamsError: a value is out of its range, or is not offered.
    """
    fields: dict[str, Any] = {"max_tokens": None}
    bounds = limits.max_entries()
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name not in PARAMETERS or name in NOT_READ:
            continue
        value: Any = getattr(message, name)
        if name in bounds:  # it has room for millions of entries
            at_most(f"the number of entries of {name}", len(value), bounds[name], name)
        is_set = message.HasField(name) if field.has_presence else value or value is False
        if is_set:
            fields[name] = read_field(field, value)
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        content = read_fields(message)[constraint]
        name = "json" if constraint == "json_schema" else constraint
        fields["structured_outputs"] = StructuredOutputsParams.read({name: content})
    if fields.get("truncate_prompt_tokens") == -1:
        fields["truncate_prompt_tokens"] = max_model_len
    return SamplingParams(**fields, detokenize=bool(message.stop), output_kind=kind)


class VllmWriter:
    """Makes the messages of one request, in lists: in a stream a chunk for the new tokens of each
    sequence; at the end of each sequence, in any case, one that completes it.

    A completing message has all ids and counts of its sequence. Log probabilities are in the
    chunks; without a stream they are in the completing message.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._streams = request.stream
        self._sampling = request.sampling_params
        self._prompt = (0, 0)  # tokens, and those of them that were cached
        # Of the sequences that have not ended.
        self._token_ids: dict[int, list[int]] = {i: [] for i in range(self._sampling.n or 1)}
        self._turns = CandidateTurns()
        self._tokens = pb.GenerateResponse()

    def write_tokens(self, output: RequestOutput) -> list[pb.GenerateResponse]:
        """The chunk of a delta that `has_only_tokens`. The next call changes this chunk."""
        self._read_prompt(output)
        completion = output.outputs[0]
        self._token_ids[completion.index] += completion.token_ids
        self._tokens.chunk.token_ids[:] = completion.token_ids
        self._count(self._tokens.chunk, completion.index, len(completion.token_ids))
        return [self._tokens]

    async def write(self, output: RequestOutput) -> list[pb.GenerateResponse]:
        """The messages of an output. Yields to the event loop while it converts many candidates."""
        self._read_prompt(output)
        messages = []
        for completion in output.outputs:
            index, token_ids = completion.index, completion.token_ids
            message = pb.GenerateResponse()
            part = message.chunk if self._streams else message.complete
            sampling = self._sampling
            await self._add(part.input_logprobs, of_prompt(output), sampling.prompt_logprobs)
            await self._add(part.output_logprobs, of_output(completion), sampling.logprobs)
            self._token_ids[index] += token_ids
            if self._streams and token_ids:
                message.chunk.token_ids.extend(token_ids)
                self._count(message.chunk, index, len(token_ids))
                messages.append(message)
            if completion.finish_reason is not None:
                last = pb.GenerateResponse() if self._streams else message
                messages.append(self._end(last, index, completion.finish_reason))
                if isinstance(completion.stop_reason, str):
                    last.complete.matched_stop_str = completion.stop_reason
                elif completion.stop_reason is not None:
                    last.complete.matched_token_id = completion.stop_reason
        return messages

    async def write_abort(self, unread: RequestOutput | None) -> list[pb.GenerateResponse]:
        """The last messages of a request that was aborted.

        Args:
            unread: what has not been written of its output; None: all has been.
        """
        messages = [] if unread is None else await self.write(unread)
        return messages + [
            self._end(pb.GenerateResponse(), index, "abort") for index in tuple(self._token_ids)
        ]

    def _end(self, message: pb.GenerateResponse, index: int, reason: str) -> pb.GenerateResponse:
        token_ids = self._token_ids.pop(index)
        message.complete.output_ids.extend(token_ids)
        message.complete.finish_reason = reason
        self._count(message.complete, index, len(token_ids))
        return message

    def _read_prompt(self, output: RequestOutput) -> None:
        self._prompt = output.num_prompt_tokens, output.num_cached_tokens

    def _count(self, part: Any, index: int, num_tokens: int) -> None:
        part.index = index
        part.completion_tokens = num_tokens
        part.prompt_tokens, part.cached_tokens = self._prompt

    async def _add(self, written: Any, positions: Positions, count: int) -> None:
        """Writes the log probability of each token, and its `count` most likely candidates."""
        async for token_id, candidates in self._turns.take(positions):
            written.token_ids.append(token_id)
            if isinstance(written, pb.OutputLogProbs):
                written.token_logprobs.append(candidates[token_id].logprob)
            elif candidates:
                written.token_logprobs.add(value=candidates[token_id].logprob)
            else:  # no token precedes the first one
                written.token_logprobs.add()
            if count:
                ranked = sorted(candidates.items(), key=lambda item: item[1].rank or 0)[:count]
                written.top_logprobs.add(
                    token_ids=[candidate for candidate, _ in ranked],
                    values=[entry.logprob for _, entry in ranked],
                )


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
