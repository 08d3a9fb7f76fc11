"""Every status code over the wire, with the name of the field; what a server says of itself."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.server_process import ServerProcess, wait_until
from support.servers import LASTING, MODEL_LENGTH

from server import calls
from tpengine.proto import tpengine_pb2 as pb

Code = grpc.StatusCode


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("input", "prompt_token_ids", {"prompt": None}),
    ("prompt_token_ids", "at least one", {"prompt_token_ids": calls.ids()}),
    ("prompt", "empty", {"prompt": ""}),
    ("messages", "empty", {"messages": pb.Conversation()}),
    ("messages", "content", {"messages": pb.Conversation(messages=[pb.Message(role="user")])}),
    (
        "prompt_token_ids",
        f"{MODEL_LENGTH + 1} tokens, more than max_model_len = {MODEL_LENGTH}",
        {"prompt_token_ids": calls.ids(*[5] * (MODEL_LENGTH + 1))},
    ),
    ("sampling.n", "temperature", {"sampling": calls.sampling(n=2)}),
    ("priority", "priority = 1", {"priority": 1}),
    ("priority", "1001", {"priority": 1001}),
    ("max_queue_ms", "-1", {"max_queue_ms": -1}),
    ("sampling.stop_token_ids", "1536", {"sampling": calls.sampling(stop_token_ids=[1536])}),
    ("request_id", "1 to 128", {"request_id": ""}),
    ("request_id", "129", {"request_id": "a" * 129}),
    ("request_id", "printable", {"request_id": "a b"}),
    ("request_id", "printable", {"request_id": "a\nb"}),
    ("request_id", "ASCII", {"request_id": "é"}),
]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(("field", "words", "fields"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_by_field(
    server: ServerProcess, method: str, field: str, words: str, fields: dict[str, Any]
) -> None:
    request = pb.GenerateRequest(**{"prompt": "a", **fields})
    refusal = calls.refused(getattr(server.stub, method), request)
    assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field)
    assert refusal.status.code == Code.INVALID_ARGUMENT.value[0]
    assert field.rpartition(".")[2] in refusal.text
    assert words in refusal.text


def test_bad_input_of_the_other_methods(server: ServerProcess) -> None:
    stub = server.stub
    cases = [
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[1536]), "token_ids"),
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[-1]), "token_ids"),
        (stub.Tokenize, pb.TokenizeRequest(), "input"),
        (stub.Abort, pb.AbortRequest(), "request_id"),
    ]
    for call, request, field in cases:
        refusal = calls.refused(call, request)
        assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field), refusal.text


def test_another_model_is_not_found(server: ServerProcess) -> None:
    refusal = calls.refused(server.stub.Generate, pb.GenerateRequest(prompt="a", model="gpt-17"))
    assert refusal.code is Code.NOT_FOUND
    assert "'gpt-17'" in refusal.text
    assert "'embedded'" in refusal.text


def test_abort(server: ServerProcess) -> None:
    wait_until(lambda: server.loads().num_open_calls == 0, calls.TIMEOUT_S)
    before = server.loads()
    call = server.stub.Generate.future(calls.long_request(LASTING, request_id="mine"))
    wait_until(lambda: server.loads().num_running == 1, calls.TIMEOUT_S)
    now = server.loads()
    assert (now.num_open_calls, 0.0 < now.cache_usage < 1.0) == (1, True)
    assert now.num_free_blocks < before.num_free_blocks
    aborted = server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=calls.TIMEOUT_S)
    now = server.loads()
    assert aborted.aborted
    assert (now.num_running, now.num_free_blocks) == (0, before.num_free_blocks)
    assert now.num_steps > before.num_steps
    outcome = calls.refused(call.result)
    assert (outcome.code, outcome.request_id) == (Code.CANCELLED, "mine")
    assert "'mine'" in outcome.text
    again = server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=calls.TIMEOUT_S)
    assert again.HasField("aborted")
    assert not again.aborted


def test_priorities(tight: ServerProcess) -> None:
    stub = tight.stub
    with (
        calls.running(stub, calls.long_request(LASTING // 2)) as first,
        calls.running(stub, calls.long_request(LASTING // 2)),
    ):
        late, early = (stub.Generate.future(calls.long_request(40, priority=i)) for i in (1, -1))
        wait_until(lambda: tight.loads().num_queued == 2, calls.TIMEOUT_S)
        first.cancel()
        waits_s = [call.result(calls.TIMEOUT_S).usage.queue_s for call in (late, early)]
        assert waits_s[0] > waits_s[1], "the one that came first waited until the other had ended"


def test_the_request_id_comes_first(server: ServerProcess) -> None:
    stream = server.stub.GenerateStream(pb.GenerateRequest(prompt="a"), timeout=calls.TIMEOUT_S)
    request_id = dict(stream.initial_metadata())["x-request-id"]
    assert {message.request_id for message in stream} == {request_id}
    own = pb.GenerateRequest(prompt="a", request_id="my/own:id~!")
    assert server.stub.Generate(own, timeout=calls.TIMEOUT_S).request_id == "my/own:id~!"


def test_what_is_served(server: ServerProcess) -> None:
    info = server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=calls.TIMEOUT_S)
    assert (info.model, info.architecture) == ("embedded", "LlamaForCausalLM")
    assert (info.max_model_len, info.vocab_size) == (MODEL_LENGTH, 1536)
    assert info.has_tokenizer
    assert info.has_chat_template
    state = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=calls.TIMEOUT_S)
    assert state.limits.max_logprobs == 20
    assert state.state == pb.SERVER_STATE_RUNNING
    assert (state.epoch, state.recoveries) == (1, 0)
    assert [rank.rank for rank in state.ranks] == [0]
    assert state.ranks[0].memory.weights_bytes > 1_000_000
    assert state.num_device_blocks == server.loads().num_total_blocks > 100
    named = pb.GenerateRequest(prompt="a", model="embedded")
    assert server.stub.Generate(named, timeout=calls.TIMEOUT_S).finished
