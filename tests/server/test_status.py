"""Every status code over the wire, with the name of the field; the server goes on."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.server_process import ServerProcess, wait_until
from support.servers import LASTING, MODEL_LENGTH

from server import calls
from tpengine.proto import tpengine_pb2 as pb

Code = grpc.StatusCode
VOCABULARY = 1536


def bad(field: str, *words: str, **fields: Any) -> tuple[pb.GenerateRequest, str, tuple[str, ...]]:
    """A request, the path of its field at fault, and what the refusal says of it."""
    return pb.GenerateRequest(**fields), field, words


BAD = {
    "no input": bad("input", "prompt_token_ids", "messages"),
    "no tokens": bad("prompt_token_ids", "empty", "at least one", prompt_token_ids=calls.ids()),
    "empty text": bad("prompt", "empty", prompt=""),
    "no messages": bad("messages", "empty", messages=pb.Conversation()),
    "half a message": bad(
        "messages", "content", messages=pb.Conversation(messages=[pb.Message(role="user")])
    ),
    "ids too long": bad(
        *("prompt_token_ids", f"{MODEL_LENGTH + 1} tokens", f"max_model_len = {MODEL_LENGTH}"),
        prompt_token_ids=calls.ids(*[5] * (MODEL_LENGTH + 1)),
    ),
    "zero tokens": bad(
        "sampling.max_tokens", "0", prompt="a", sampling=calls.sampling(max_tokens=0)
    ),
    "greedy pair": bad("sampling.n", "temperature", prompt="a", sampling=calls.sampling(n=2)),
    "priority without a policy": bad("priority", "priority = 1", prompt="a", priority=1),
    "priority out of range": bad("priority", "1001", prompt="a", priority=1001),
    "negative wait": bad("max_queue_ms", "-1", prompt="a", max_queue_ms=-1),
    "beyond the vocabulary": bad(
        "sampling.stop_token_ids",
        str(VOCABULARY),
        prompt="a",
        sampling=calls.sampling(stop_token_ids=[VOCABULARY]),
    ),
    **{
        f"id {request_id[:3]!r}": bad("request_id", word, prompt="a", request_id=request_id)
        for request_id, word in (
            *(("", "1 to 128"), ("a" * 129, "129"), ("a b", "printable")),
            *(("a\nb", "printable"), ("é", "ASCII")),
        )
    },
}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_refused_by_field(server: ServerProcess, method: str, name: str) -> None:
    request, field, words = BAD[name]
    refusal = calls.refused(getattr(server.stub, method), request)
    assert refusal.code is Code.INVALID_ARGUMENT
    assert refusal.field == field
    assert refusal.status.code == Code.INVALID_ARGUMENT.value[0]
    for word in (field.rpartition(".")[2], *words):
        assert word in refusal.text


def test_bad_input_of_the_other_methods(server: ServerProcess) -> None:
    stub = server.stub
    cases = [
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=[VOCABULARY]), "token_ids"),
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
    with calls.waiting(server.stub, calls.long_request(LASTING, request_id="mine")) as call:
        wait_until(lambda: server.loads().num_running == 1, calls.TIMEOUT_S)
        now = server.loads()
        assert (now.num_open_calls, 0.0 < now.cache_usage < 1.0) == (1, True)
        assert now.num_free_blocks < before.num_free_blocks
        aborted = server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=calls.TIMEOUT_S)
        now = server.loads()
        assert aborted.aborted
        assert (now.num_running, now.num_free_blocks) == (0, before.num_free_blocks)
        assert now.num_steps > before.num_steps
        assert call["done"].wait(calls.TIMEOUT_S)
        outcome = call["outcome"]
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
        calls.waiting(stub, calls.long_request(40, priority=1)) as late,
        calls.waiting(stub, calls.long_request(40, priority=-1)) as early,
    ):
        wait_until(lambda: tight.loads().num_queued == 2, calls.TIMEOUT_S)
        first.cancel()
        for call in (early, late):
            assert call["done"].wait(calls.TIMEOUT_S)
        # The one that came first waited until the other had ended.
        assert late["outcome"].usage.queue_s > early["outcome"].usage.queue_s


def test_unknown_methods_and_names(server: ServerProcess) -> None:
    for path in ("/tpengine.v1.GenerationService/Nothing", "/unknown.Service/Method"):
        assert calls.refused(server.channel.unary_unary(path), b"").code is Code.UNIMPLEMENTED
