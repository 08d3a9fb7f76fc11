"""Pictures over gRPC: what is sent, answered and refused, and streams that resume."""

from __future__ import annotations

from typing import Any

import pytest
from client.talks import collect, joined_parts
from PIL import Image
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated.common_pb2 import Modality
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from support.engines import greedy
from support.picture_files import encoded
from support.programs import Cli
from support.server_process import ServerProcess
from support.small_llavas import PNG, QUESTION, data_url
from support.whole_models import PICTURES

from server.calls import refused
from server.cutting_proxy import CuttingProxy
from tpengine import LLM, SamplingParams, errors
from tpengine.client.client_messages import RequestFields, to_request
from tpengine.client.generation_client import GenerationClient
from tpengine.proto import tpengine_pb2 as pb

LENGTH = 24
PARAMS = greedy(LENGTH)
JPEG = encoded(Image.fromarray(PICTURES[0]), "JPEG")
PART = {"type": "image", "image": JPEG}
URL_PART = {"type": "image_url", "image_url": {"url": data_url(PNG)}}


def pictured(*images: Any, prompt: Any = "What? <image>") -> Any:
    field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {field: prompt, "multi_modal_data": {"image": list(images)}}


def asks(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": [*parts, QUESTION]}]


async def test_outputs_are_those_of_the_engine(
    seeing: ServerProcess, seeing_llm: LLM, server: ServerProcess
) -> None:
    prompts = [pictured(PNG), pictured(JPEG, PNG, prompt="<image> and <image>")]
    chats = [asks(PART), asks(PART, URL_PART)]
    prompts.append(pictured(PNG, prompt=seeing_llm.get_tokenizer().encode("<image> ?")))
    wanted = seeing_llm.generate(prompts, PARAMS, use_tqdm=False)
    wanted += seeing_llm.chat(chats, PARAMS, use_tqdm=False)
    async with GenerationClient(seeing.target) as client:
        assert (await client.model_info()).max_images == 16
        for prompt, offline in zip((*prompts, *chats), wanted, strict=True):
            assert (await client.generate(prompt, PARAMS)).outputs == offline.outputs
        assert await client.chat_token_ids(chats[0]) == wanted[3].prompt_token_ids
    assert len({output.outputs[0].token_ids for output in wanted}) == len(wanted)
    async with GenerationClient(server.target) as client:
        assert not (await client.model_info()).max_images
        with pytest.raises(errors.InvalidPromptError, match="text alone"):
            await client.generate(pictured(PNG))


async def test_a_stream_with_a_picture_resumes(seeing: ServerProcess) -> None:
    async with GenerationClient(seeing.target) as client:
        whole = await client.generate(pictured(PNG), PARAMS)
    num_steps = seeing.loads().num_steps
    proxy = CuttingProxy(seeing.target, [900])
    async with proxy.listening() as target, GenerationClient(target) as client:
        parts = await collect(client.stream(pictured(PNG), PARAMS))
    assert (proxy.num_cuts, joined_parts(parts)) == (1, whole.outputs)
    assert seeing.loads().num_steps <= num_steps + LENGTH + 1, "it ran once"


@pytest.mark.parametrize(
    "prompt",
    [
        pictured("a.png"),
        pictured(PICTURES[0]),
        {"prompt": "a", "multi_modal_data": {"image": PNG, "video": b""}},
        asks({**PART, "detail": "low"}),
        asks({"type": "input_audio"}),
    ],
)
def test_what_the_client_refuses(prompt: Any) -> None:
    with pytest.raises(errors.InvalidPromptError, match=r"must be .* got .{,99}$"):
        to_request(prompt, PARAMS, RequestFields())


PARTS: list[dict[str, Any]] = [{"text": "a"}, {}, {"text": "ab " * (1 << 17)}, {"image": b"GIF"}]
TURNS = [pb.Message(role="user", parts=[pb.ContentPart(**part)]) for part in PARTS]
TURNS.append(pb.Message(role="user", content="a", parts=[pb.ContentPart(text="a")]))
CHATS = [pb.Conversation(messages=[turn]) for turn in TURNS]


@pytest.mark.parametrize(
    ("fields", "at_fault", "words"),
    [
        ({"prompt": "<image>", "images": [b"text"]}, "images", "PNG"),
        ({"prompt": "<image>", "images": [PNG, PNG]}, "images", "2 pictures"),
        ({"prompt": "<image>", "images": [bytes(22 << 20)]}, "images", "limit"),
        ({"prompt": "<image>", "images": [bytes(30 << 20)]}, None, "--max-message-mib"),
        ({"messages": CHATS[0], "images": [PNG]}, "images", "their parts"),
        ({"messages": CHATS[1]}, "messages", "unknown"),
        ({"messages": CHATS[2]}, "messages", "max_model_len"),
        ({"messages": CHATS[3]}, "messages", "PNG"),
        ({"messages": CHATS[4]}, "messages", "content and parts"),
    ],
)
def test_refusals(
    seeing: ServerProcess, fields: dict[str, Any], at_fault: str | None, words: str
) -> None:
    refusal = refused(seeing.stub.Generate, pb.GenerateRequest(**fields))
    assert (refusal.field, words in refusal.text) == (at_fault, True), refusal.text
    assert refusal.code.name == ("INVALID_ARGUMENT" if at_fault else "RESOURCE_EXHAUSTED")


async def test_references_of_a_gateway(seeing: ServerProcess) -> None:
    stub = VllmEngineStub(seeing.channel)
    info = stub.GetServerInfo(vllm_pb.GetServerInfoRequest())
    fields = info.mm_processor, info.mm_media_ref_schemes, info.mm_item_limits
    assert fields == ("inprocess", "data", "image=16")
    assert stub.GetModelInfo(vllm_pb.GetModelInfoRequest()).supports_vision
    sampling = vllm_pb.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    request = vllm_pb.GenerateRequest(text="What? <image>", sampling_params=sampling)
    request.media_refs.items.add(modality=Modality.IMAGE, url=data_url(PNG))
    (answer,) = stub.Generate(request)
    async with GenerationClient(seeing.target) as client:
        whole = await client.generate(pictured(PNG), PARAMS)
    assert tuple(answer.complete.output_ids) == whole.outputs[0].token_ids
    request.media_refs.items[0].url = "https://example.org/a.png"
    refusal = refused(stub.Generate, request)
    assert (refusal.code.name, refusal.field) == ("INVALID_ARGUMENT", "media_refs")


def test_a_chat_with_a_server(seeing: ServerProcess, seeing_llm: LLM, cli: Cli) -> None:
    folder = seeing.log.parent
    (folder / "cat.jpg").write_bytes(JPEG)
    words = ["client", "chat", "--temperature", "0", "--max-tokens", "9", "--target", seeing.target]
    without, seen = (
        cli(*words, typed=f"/system Look.\n/image {folder / name}\n{QUESTION['text']}", code=code)
        for name, code in (("config.json", 1), ("cat.jpg", 0))
    )
    params = SamplingParams(temperature=0.0, max_tokens=9)
    (blind,), (wanted,) = (seeing_llm.chat(asks(*parts), params) for parts in ([], [PART]))
    assert without.out + seen.out == f"{blind.outputs[0].text}\n{wanted.outputs[0].text}\n"
    assert "config.json' cannot be read: the picture is no PNG" in without.err
