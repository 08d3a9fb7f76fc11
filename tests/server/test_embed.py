"""`Embed` of both gRPC services and of the client: the offline engine's values, and each error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from support.programs import Cli
from support.server_process import ServerProcess, serving, wait_until
from support.small_poolers import MOST_TOKENS, SIZE, write_embedder

from server.calls import TIMEOUT_S, Refusal, ids, refused
from tpengine import LLM, PoolingParams, errors
from tpengine.client.generation_client import GenerationClient
from tpengine.proto import tpengine_pb2 as pb

TEXT, IDS, LONG = "the quick brown fox", [9, 300, 17], ids(*[5, 6, 7] * 1300)
TALK: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
OPTIONS = ["--dtype", "float32", "--cpu-kv-cache-space", "0.01", "--swap-space", "0"]
TIGHT = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--no-enable-prefix-caching"]
Both = tuple[ServerProcess, LLM]
SMALL: dict[str, Any] = {"dtype": "float32", "cpu_kv_cache_space": 0.01, "swap_space": 0}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A server in which a long prompt takes many steps and few prompts run at once, and the offline
    engine."""
    folder = write_embedder(tmp_path_factory.mktemp("embedder"))
    options = ["--model", str(folder), *OPTIONS, *TIGHT]
    server_folder = tmp_path_factory.mktemp("embed-server")
    with LLM(str(folder), **SMALL) as llm, serving(server_folder, *options) as process:
        yield process, llm


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (TEXT, {}), (IDS, {"normalize": False}), ({"prompt": TEXT}, {"dimensions": 8}),
        ({"prompt_token_ids": IDS}, {"dimensions": SIZE, "normalize": True}),
        (TEXT * 99, {"truncate_prompt_tokens": 4}),
        ([7] * (MOST_TOKENS + 9), {"truncate_prompt_tokens": -1, "activation": False}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_values_are_those_of_the_offline_engine(
    embedder: Both, prompt: Any, fields: dict[str, Any]
) -> None:
    (server, llm), params = embedder, PoolingParams(**fields)
    (offline,) = llm.encode(prompt, params, use_tqdm=False)
    async with GenerationClient(server.target) as client:
        answer = await client.embed(prompt, None, params, request_id="mine")
    assert answer.outputs == offline.outputs
    assert len(answer.outputs.embedding) == fields.get("dimensions", SIZE)
    assert (answer.request_id, answer.usage.num_output_tokens) == ("mine", 0)
    assert answer.usage.num_prompt_tokens == len(offline.prompt_token_ids)


async def test_many_at_once_and_a_conversation(embedder: Both) -> None:
    server, llm = embedder
    texts = [TEXT[: 1 + i % len(TEXT)] * (1 + i % 7) for i in range(64)]
    async with GenerationClient(server.target) as client:
        answers = await asyncio.gather(*map(client.embed, texts))
        by_talk = await client.embed(TALK)
        by_ids = await client.embed(await client.chat_token_ids(TALK))
    offline = llm.encode(texts, use_tqdm=False)
    assert [answer.outputs for answer in answers] == [output.outputs for output in offline]
    assert len({tuple(answer.outputs.embedding) for answer in answers}) == len(set(texts))
    assert by_talk.outputs == by_ids.outputs


def test_the_command(embedder: Both, cli: Cli) -> None:
    server, llm = embedder
    shown = cli("client", "embed", "--target", server.target, TEXT, "a").out
    printed = list(map(json.loads, shown.splitlines()))
    offline = llm.encode([TEXT, "a"], use_tqdm=False)
    assert printed == [output.outputs.embedding for output in offline]


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({}, "input", "needs prompt"), ({"prompt": "a" * 500_000}, "prompt", "bytes, more than"),
        ({"prompt_token_ids": ids()}, "prompt_token_ids", "empty"),
        ({"prompt_token_ids": ids(512)}, "prompt_token_ids", "no id of the vocabulary"),
        ({"prompt_token_ids": ids(*[5] * (MOST_TOKENS + 1))}, "prompt_token_ids", "max_model_len"),
        ({"prompt": TEXT, "second": "b"}, "prompt", "takes no second text"),
        ({"prompt": TEXT, "second": "a" * 500_000}, "second", "bytes, more than"),
        ({"messages": pb.Conversation(messages=TALK), "second": "b"}, "messages", "takes no"),
        ({"prompt": TEXT, "priority": 1}, "priority", "scheduling_policy"),
        ({"prompt": TEXT, "max_queue_ms": -1}, "max_queue_ms", "at least 0"),
        ({"dimensions": SIZE + 1}, "pooling.dimensions", f"the model's {SIZE}"),
        ({"dimensions": 0}, "pooling.dimensions", "at least 1"),
        ({"prompt_name": "a"}, "pooling.prompt_name", "it has none"),
        ({"truncate_prompt_tokens": 0}, "pooling.truncate_prompt_tokens", "at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_refused_field_is_named(
    embedder: Both, fields: dict[str, Any], path: str, words: str
) -> None:
    if path.startswith("pooling"):
        fields = {"prompt": TEXT, "pooling": pb.PoolingParams(**fields)}
    refusal = refused(embedder[0].stub.Embed, pb.EmbedRequest(**fields))
    assert (refusal.code, refusal.field) == (StatusCode.INVALID_ARGUMENT, path)
    assert words in refusal.text


def test_a_call_of_the_wrong_kind(embedder: Both, server: ServerProcess) -> None:
    stub = embedder[0].stub
    other = pb.EmbedRequest(prompt=TEXT, model="none")
    assert refused(stub.Embed, other).code is StatusCode.NOT_FOUND
    generating = refused(stub.Generate, pb.GenerateRequest(prompt=TEXT))
    embedding = refused(server.stub.Embed, pb.EmbedRequest(prompt=TEXT))
    request = vllm_pb.EmbedRequest(tokenized=vllm_pb.TokenizedInput(input_ids=IDS))
    of_gateway = refused(VllmEngineStub(server.channel).Embed, request)
    assert (of_gateway.code, of_gateway.field) == (StatusCode.INVALID_ARGUMENT, None)
    assert generating.code is embedding.code is StatusCode.INVALID_ARGUMENT
    assert (generating.field, embedding.field) == ("prompt", "pooling")
    assert "does 'embed' and makes no tokens; use LLM.encode" in generating.text
    assert "the model generates; to embed with it" in embedding.text
    for process, facts in ((embedder[0], ("embed", SIZE)), (server, ("generate", 0))):
        info = process.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert (info.task, info.num_outputs) == facts


async def test_errors_of_the_client(embedder: Both) -> None:
    wrong = PoolingParams(dimensions=1)
    wrong.dimensions = -1
    async with GenerationClient(embedder[0].target) as client:
        with pytest.raises(errors.InvalidSamplingParamsError, match="dimensions"):
            await client.embed(TEXT, None, wrong)
        with pytest.raises(errors.InvalidPictureError, match="multi_modal_data"):
            await client.embed({"prompt": TEXT, "multi_modal_data": {"image": b"a"}})
        with pytest.raises(errors.InvalidSamplingParamsError, match="no prompt") as raised:
            await client.embed(TEXT, None, PoolingParams(prompt_name="a"))
    assert raised.value.field == "prompt_name"


def test_abort_deadline_and_cancellation(embedder: Both) -> None:
    """Long prompts fill the queue; one behind them is aborted, others miss their times."""
    server, stub = embedder[0], embedder[0].stub
    crowd = [stub.Embed.future(pb.EmbedRequest(prompt_token_ids=LONG)) for _ in range(60)]
    wait_until(lambda: server.loads().num_queued > 20, TIMEOUT_S)
    mine = pb.EmbedRequest(prompt_token_ids=LONG, request_id="mine")
    aborted, abort = stub.Embed.future(mine, timeout=TIMEOUT_S), pb.AbortRequest(request_id="mine")
    wait_until(lambda: stub.Abort(abort, timeout=TIMEOUT_S).aborted, TIMEOUT_S)
    assert aborted.code() is StatusCode.CANCELLED
    assert Refusal(aborted).request_id == "mine"
    for fields, metadata in (({}, [("x-timeout-ms", "50")]), ({"max_queue_ms": 20}, [])):
        late = pb.EmbedRequest(prompt_token_ids=LONG, **fields)
        assert refused(stub.Embed, late, metadata=metadata).code is StatusCode.DEADLINE_EXCEEDED
    num_steps = server.loads().num_steps
    for call in crowd:
        call.cancel()
    wait_until(server.is_at_rest, TIMEOUT_S)
    assert server.loads().num_steps < num_steps + 1000, "cancelled prompts are not computed"


def test_the_service_for_gateways(embedder: Both) -> None:
    stub, info = VllmEngineStub(embedder[0].channel), vllm_pb.GetModelInfoRequest()
    assert not stub.GetModelInfo(info, timeout=TIMEOUT_S).is_generation
    (offline,) = embedder[1].encode(prompt_token_ids=[IDS], use_tqdm=False)
    requests = [
        vllm_pb.EmbedRequest(tokenized=vllm_pb.TokenizedInput(input_ids=token_ids))
        for token_ids in (IDS, [], [512], [5] * (MOST_TOKENS + 1))
    ]
    answer = stub.Embed(requests[0], timeout=TIMEOUT_S)
    assert list(answer.embedding) == offline.outputs.embedding
    assert (answer.prompt_tokens, answer.embedding_dim) == (len(IDS), SIZE)
    for request in (vllm_pb.EmbedRequest(), *requests[1:]):
        refusal = refused(stub.Embed, request)
        assert (refusal.code, refusal.field) == (StatusCode.INVALID_ARGUMENT, "tokenized")


async def test_a_pair_has_the_score_of_the_offline_engine(tmp_path: Path) -> None:
    folder, raw = str(write_embedder(tmp_path, "score")), PoolingParams(activation=False)
    with LLM(folder, **SMALL) as llm:
        (scored,) = llm.score(TEXT, "a fox", use_tqdm=False)
        (unscaled,) = llm.score(TEXT, "a fox", pooling_params=raw, use_tqdm=False)
    with serving(tmp_path, "--model", folder, *OPTIONS) as process:
        async with GenerationClient(process.target) as client:
            answer = await client.embed(TEXT, "a fox")
            number = await client.embed(TEXT, "a fox", raw)
            info = await client.model_info()
    assert answer.outputs.embedding == [scored.outputs.score]
    assert number.outputs.embedding == [unscaled.outputs.score] != answer.outputs.embedding
    assert answer.usage.num_prompt_tokens == len(scored.prompt_token_ids)
    assert (info.task, info.num_outputs, list(info.labels)) == ("score", 1, ["LABEL_0"])
