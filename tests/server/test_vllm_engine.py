"""vLLM's service for gateways, by its raw stubs."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from support.server_process import ServerProcess, wait_until
from support.servers import LASTING, MODEL_LENGTH
from transformers import AutoTokenizer

from server.calls import TIMEOUT_S, bearer, refused
from server.guarded import guarded_server
from tpengine import LLM, SamplingParams
from tpengine.options import parameters
from tpengine.server.auth import Authenticator
from tpengine.server.grpc import vllm
from tpengine.server.limits import Limits

PROMPT = "The capital of France is"
SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
METHODS = {method.name: GetMessageClass(method.input_type)() for method in SERVICE.methods}
HEALTH = METHODS.pop("HealthCheck")
NOT_OFFERED = ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
LONG = {"max_tokens": LASTING, "ignore_eos": True}
MIXED: list[dict[str, Any]] = [
    {"max_tokens": 24, "ignore_eos": True, "repetition_penalty": 1.25},
    {"logprobs": 2, "prompt_logprobs": 1}, {"logprobs": 0, "temperature": 1.0, "seed": 5},
    {"temperature": 0.75, "seed": -7, "n": 3, "top_k": 40, "min_p": 0.125},
    {"temperature": 0.75, "seed": 0, "frequency_penalty": 0.5}, {"truncate_prompt_tokens": 3},
    {"max_tokens": 60, "stop": ["Seine"]}, {"logit_bias": {17: -100.0}, "min_tokens": 12},
    {"max_tokens": 60, "stop_token_ids": [1152], "presence_penalty": 0.25},
]  # fmt: skip
WRONG = (
    ("temperature", -1.0), ("top_p", 1.5), ("min_p", float("nan")), ("frequency_penalty", 3.0),
    ("presence_penalty", -3.0), ("repetition_penalty", -1.0), ("max_tokens", 0), ("n", 129),
    ("min_tokens", 13), ("stop", ["a"] * 65), ("stop_token_ids", [1] * 65), ("logprobs", -1),
    ("logit_bias", {9999: 1.0}), ("prompt_logprobs", -1), ("truncate_prompt_tokens", 0),
    ("json_schema", "{"), ("structural_tag", "a"), ("json_object", False),
    ("choice", pb.ChoiceConstraint()),
)  # fmt: skip
MEDIA, UNKNOWN = (pb.MediaRefs(items=[pb.MediaRef(modality=kind)]) for kind in (3, 77))
OTHERS = (
    ("mm_inputs", pb.MultimodalInputs()), ("extra_mm_inputs", [pb.MultimodalInputs()]),
    ("media_refs", MEDIA), ("media_refs", UNKNOWN), ("kv_transfer_params", pb.KvTransferParams()),
    ("kv_transfer_params_json", "{}"), ("data_parallel_rank", 1), ("request_id", "a b"),
    ("text", "a" * 100_000), ("tokenized", pb.TokenizedInput(input_ids=[5] * (MODEL_LENGTH + 1))),
    ("tokenized", pb.TokenizedInput(input_ids=[1 << 31])), ("tokenized", pb.TokenizedInput()),
)  # fmt: skip


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Any:
    return VllmEngineStub(server.channel)


def asked(sampling: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    """A stream for the prompt; greedy by default."""
    params = pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **(sampling or {})})
    return pb.GenerateRequest(
        **{"text": PROMPT, "stream": True, "sampling_params": params, **fields}
    )


def generate(stub: Any, request: pb.GenerateRequest) -> list[pb.GenerateComplete]:
    """The completing messages by index, each with what is only in its chunks."""
    chunks: dict[int, pb.GenerateStreamChunk] = {}
    ends: dict[int, pb.GenerateComplete] = {}
    for message in stub.Generate(request, timeout=TIMEOUT_S):
        if message.WhichOneof("response") == "complete":
            assert ends.setdefault(message.complete.index, message.complete) is message.complete
            continue
        assert len(message.chunk.token_ids) == message.chunk.completion_tokens > 0
        assert message.chunk.index not in ends
        chunks.setdefault(message.chunk.index, pb.GenerateStreamChunk()).MergeFrom(message.chunk)
    assert bool(chunks) == request.stream
    for index, chunk in chunks.items():
        assert chunk.token_ids == ends[index].output_ids
        assert chunk.prompt_tokens == ends[index].prompt_tokens
        for name in ("output_logprobs", "input_logprobs"):
            getattr(ends[index], name).MergeFrom(getattr(chunk, name))
    return [ends[index] for index in sorted(ends)]


@pytest.mark.parametrize(
    ("fields", "stream"),
    [*((fields, True) for fields in MIXED), *((MIXED[i], False) for i in (1, 3))],
)
def test_ids_are_those_of_the_offline_engine(
    stub: Any, llm: LLM, fields: dict[str, Any], stream: bool
) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **fields})
    offline = llm.generate(PROMPT, params, use_tqdm=False)[0]
    answer = generate(stub, asked(fields, stream=stream))
    prompt = offline.prompt_token_ids
    for got, wanted in zip(answer, offline.outputs, strict=True):
        assert tuple(got.output_ids) == wanted.token_ids
        assert got.finish_reason == wanted.finish_reason
        assert (got.prompt_tokens, got.completion_tokens) == (len(prompt), len(wanted.token_ids))
        stop = got.WhichOneof("matched_stop")
        assert (getattr(got, stop) if stop else None) == wanted.stop_reason
        _compare(got.output_logprobs, wanted.token_ids, wanted.logprobs, params.logprobs)
        _compare(got.input_logprobs, prompt, offline.prompt_logprobs, params.prompt_logprobs)


def _compare(got: Any, token_ids: Any, wanted: Any, count: int | None) -> None:
    """Compares log probabilities, of which the most likely `count` are listed."""
    pairs = list(zip(token_ids, wanted or (), strict=False))
    logprobs = [getattr(entry, "value", entry) for entry in got.token_logprobs]
    assert logprobs == pytest.approx([some[i].logprob if some else 0 for i, some in pairs], 1e-4)
    assert list(got.token_ids) == [i for i, _ in pairs]
    assert len(got.top_logprobs) == (len(pairs) if count else 0)
    for top, (_, some) in zip(got.top_logprobs, pairs, strict=False):
        ranked = sorted((entry.rank, token_id) for token_id, entry in (some or {}).items())[:count]
        assert list(top.token_ids) == [token_id for _, token_id in ranked]
        assert list(top.values) == pytest.approx([some[i].logprob for _, i in ranked], 1e-4)


def test_ids_as_prompt_and_a_cached_one(stub: Any) -> None:
    request = asked(text=None, tokenized=pb.TokenizedInput(input_ids=range(200, 280)))
    first, again = (generate(stub, request)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens, again.prompt_tokens) == (0, 64, 80)
    assert first.output_ids == again.output_ids


def test_what_unset_and_zero_mean(stub: Any) -> None:
    neutral = SamplingParams(max_tokens=None, detokenize=False, skip_special_tokens=False)

    def read(**fields: Any) -> SamplingParams:
        message = pb.SamplingParams(**fields)
        return vllm.read_sampling_params(message, neutral.output_kind, Limits(), 99)

    assert read() == read(n=0, top_p=0.0, top_k=0, repetition_penalty=0.0) == neutral
    neutral.temperature, neutral.seed, neutral.logprobs = 0.0, 0, 0
    neutral.stop, neutral.detokenize, neutral.truncate_prompt_tokens = ["a"], True, 99
    zeros = {"temperature": 0.0, "seed": 0, "logprobs": 0, "stop": ["a"]}
    assert read(**zeros, truncate_prompt_tokens=-1) == neutral
    prompt = {"text": None, "tokenized": pb.TokenizedInput(input_ids=[5] * (MODEL_LENGTH - 9))}
    (end,) = generate(stub, asked({"max_tokens": None, "ignore_eos": True}, **prompt))
    assert end.prompt_tokens + end.completion_tokens == MODEL_LENGTH


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("json_schema", '{"type": "boolean"}', "true|false"),
        ("json_object", True, r"\{(.|\n)*"),
        ("regex", "[0-9]{2}x", r"\d\dx"),
        ("choice", pb.ChoiceConstraint(choices=["ab", "cd"]), "ab|cd"),
        ("grammar", 'root ::= "a" | "b"', "a|b"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_output_is_held(stub: Any, llm: LLM, name: str, value: Any, pattern: str) -> None:
    (end,) = generate(stub, asked({"temperature": 1.0, "seed": 5, "max_tokens": 20, name: value}))
    assert re.fullmatch(pattern, llm.get_tokenizer().decode(end.output_ids[:-1]))


@pytest.mark.parametrize(
    ("name", "value"), [*WRONG, *OTHERS, ("input", None)], ids=lambda value: str(value)[:40]
)
def test_a_refused_field_is_named(stub: Any, name: str, value: Any) -> None:
    if (name, value) in WRONG:
        request, path = asked({"temperature": 1.0, name: value}), f"sampling_params.{name}"
    else:
        text = None if name in ("tokenized", "input") else PROMPT
        request, path = asked(**{"text": text} | ({name: value} if value else {})), name
    refusal = refused(stub.Generate, request)
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    assert name in refusal.text


def test_every_field_is_read_or_refused() -> None:
    """A field that a newer package adds must be looked at."""
    fields, params = pb.GenerateRequest.DESCRIPTOR, pb.SamplingParams.DESCRIPTOR
    read = {*parameters(SamplingParams), "grammar_from_first_token"}  # without effect here
    assert set(params.fields_by_name) - read == {
        "json_schema", *(field.name for field in params.oneofs[0].fields)
    } - read  # fmt: skip
    read = {"request_id", "tokenized", "text", "sampling_params", "stream", "media_refs"}
    assert set(fields.fields_by_name) - read == set(vllm.REFUSED)


@pytest.mark.parametrize("method", NOT_OFFERED)
def test_what_is_not_offered_is_named(stub: Any, method: str) -> None:
    refusal = refused(getattr(stub, method), METHODS[method])
    assert (refusal.code, method in refusal.text) == (grpc.StatusCode.UNIMPLEMENTED, True)


def test_a_token_is_needed_and_a_model() -> None:
    token = "a" * 16
    with guarded_server(Authenticator([token])) as target, grpc.insecure_channel(target) as channel:
        stub = VllmEngineStub(channel)
        for method in METHODS.keys() - set(NOT_OFFERED):
            for metadata, code in (((), "UNAUTHENTICATED"), (bearer(token), "UNAVAILABLE")):
                refusal = refused(getattr(stub, method), METHODS[method], metadata=metadata)
                assert refusal.code.name == code
        assert not stub.HealthCheck(HEALTH, metadata=bearer(token)).healthy


def test_abort_and_deadline(server: ServerProcess, stub: Any) -> None:
    wait_until(lambda: server.loads().num_running == 0, TIMEOUT_S)
    free, request = server.loads().num_free_blocks, asked(LONG, request_id="a")
    stream = stub.Generate(request, timeout=TIMEOUT_S)
    token_ids = list(next(stream).chunk.token_ids)
    stub.Abort(pb.AbortRequest(request_ids=["unknown", "a"]), timeout=TIMEOUT_S)
    assert server.loads().num_free_blocks == free
    *messages, end = stream
    token_ids += [token_id for message in messages for token_id in message.chunk.token_ids]
    assert (end.complete.finish_reason, list(end.complete.output_ids)) == ("abort", token_ids)
    assert refused(stub.Abort, pb.AbortRequest(request_ids=["a"] * 5000)).field == "request_ids"
    for timeout_ms, code in (("20", "DEADLINE_EXCEEDED"), ("soon", "INVALID_ARGUMENT")):
        refusal = refused(stub.Generate, request, metadata=[("x-timeout-ms", timeout_ms)])
        assert refusal.code.name == code


def test_what_a_gateway_asks(stub: Any) -> None:
    assert stub.HealthCheck(HEALTH, timeout=TIMEOUT_S).healthy
    model = stub.GetModelInfo(METHODS["GetModelInfo"], timeout=TIMEOUT_S)
    assert (model.served_model_name, list(model.eos_token_ids)) == ("embedded", [0, 3])
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.7, "top_p": 0.9}
    stream = stub.Generate(asked(LONG), timeout=TIMEOUT_S)
    next(stream)
    info = stub.GetServerInfo(METHODS["GetServerInfo"], timeout=TIMEOUT_S)
    assert (info.active_requests, info.block_size, info.max_num_seqs) == (1, 16, 256)
    (load,) = stub.GetLoads(METHODS["GetLoads"], timeout=TIMEOUT_S).loads
    assert (load.num_running_reqs, load.num_total_reqs) == (1, 1)
    assert 0 < load.token_usage < 1
    assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
    stream.cancel()


def test_the_tokenizer_comes_as_an_archive(stub: Any, llm: LLM, tmp_path: Path) -> None:
    chunks = list(stub.GetTokenizer(METHODS["GetTokenizer"], timeout=TIMEOUT_S))
    archive = b"".join(chunk.data for chunk in chunks)
    assert "".join(chunk.sha256 for chunk in chunks) == hashlib.sha256(archive).hexdigest()
    zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path)
    saved, own = AutoTokenizer.from_pretrained(tmp_path), llm.get_tokenizer()
    assert saved.encode("Der Fluß: 東京 🙂") == own.encode("Der Fluß: 東京 🙂")
    assert saved.chat_template == own.chat_template
