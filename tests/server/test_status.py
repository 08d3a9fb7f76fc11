"""Every status code over the wire, with the name of the field; the server goes on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from support.server_process import ServerProcess, wait_until
from support.servers import LASTING, MODEL_LENGTH, TIGHT_BLOCKS

from server.calls import (
    TIMEOUT_S,
    Refusal,
    ids,
    long_request,
    refused,
    running,
    sampling,
    waiting,
)
from tpengine.proto import tpengine_pb2 as pb

Code = grpc.StatusCode
VOCABULARY = 1536


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "a", **fields})


BAD: dict[str, tuple[pb.GenerateRequest, str, tuple[str, ...]]] = {
    "no input": (pb.GenerateRequest(), "input", ("prompt_token_ids", "messages")),
    "no tokens": (
        pb.GenerateRequest(prompt_token_ids=ids()),
        "prompt_token_ids",
        ("empty", "at least one"),
    ),
    "empty text": (pb.GenerateRequest(prompt=""), "prompt", ("empty",)),
    "no messages": (pb.GenerateRequest(messages=pb.Conversation()), "messages", ("empty",)),
    "half a message": (
        pb.GenerateRequest(messages=pb.Conversation(messages=[pb.Message(role="user")])),
        "messages",
        ("content",),
    ),
    "ids too long": (
        pb.GenerateRequest(prompt_token_ids=ids(*[5] * (MODEL_LENGTH + 1))),
        "prompt_token_ids",
        (f"{MODEL_LENGTH + 1} tokens", f"max_model_len = {MODEL_LENGTH}"),
    ),
    "text too long": (
        pb.GenerateRequest(prompt="a " * (2 * MODEL_LENGTH)),
        "prompt",
        (f"max_model_len = {MODEL_LENGTH}",),
    ),
    **{
        f"{name} beyond the vocabulary": (
            generate(sampling=sampling(**{name: value})),
            f"sampling.{name}",
            (str(VOCABULARY),),
        )
        for name, value in (
            ("stop_token_ids", [VOCABULARY]),
            ("logit_bias", {VOCABULARY: 1.0}),
            ("allowed_token_ids", ids(VOCABULARY)),
            ("bad_words_token_ids", [ids(VOCABULARY)]),
        )
    },
    "zero tokens": (generate(sampling=sampling(max_tokens=0)), "sampling.max_tokens", ("got 0",)),
    "greedy pair": (generate(sampling=sampling(n=2)), "sampling.n", ("temperature",)),
    "priority without a policy": (generate(priority=1), "priority", ("priority = 1",)),
    "priority out of range": (generate(priority=1001), "priority", ("1001",)),
    "negative wait": (generate(max_queue_ms=-1), "max_queue_ms", ("-1",)),
    "empty id": (generate(request_id=""), "request_id", ("1 to 128",)),
    "long id": (generate(request_id="a" * 129), "request_id", ("129",)),
    "id with a space": (generate(request_id="a b"), "request_id", ("printable",)),
    "id with a line": (generate(request_id="a\nb"), "request_id", ("printable",)),
    "id of another script": (generate(request_id="é"), "request_id", ("ASCII",)),
}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_refused_by_field(server: ServerProcess, method: str, name: str) -> None:
    request, field, words = BAD[name]
    refusal = refused(getattr(server.stub, method), request)
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
        refusal = refused(call, request)
        assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field), refusal.text


def test_a_prompt_as_long_as_the_model(server: ServerProcess) -> None:
    """It leaves room for one token."""
    for length, num_output in ((MODEL_LENGTH, None), (MODEL_LENGTH - 1, 1)):
        request = pb.GenerateRequest(
            prompt_token_ids=ids(*[5] * length), sampling=sampling(max_tokens=8, ignore_eos=True)
        )
        answer = server.stub.Generate(request, timeout=TIMEOUT_S)
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
        if num_output is not None:
            assert answer.usage.num_output_tokens == num_output
        else:
            assert answer.usage.num_output_tokens <= 1
        assert answer.usage.num_prompt_tokens == length


def test_what_never_fits_into_the_cache(tight: ServerProcess) -> None:
    """One sequence would fit; the two of one request do not, even if all others are preempted."""
    length = 1100
    assert length < MODEL_LENGTH
    assert 2 * length > TIGHT_BLOCKS * 16
    request = long_request(length)
    request.sampling.temperature = 1.0
    alone = tight.stub.Generate(request, timeout=TIMEOUT_S)
    assert alone.usage.num_output_tokens == length
    request.sampling.n = 2
    for method in (tight.stub.Generate, tight.stub.GenerateStream):
        refusal = refused(method, request)
        assert refusal.code is Code.INVALID_ARGUMENT
        assert f"the KV cache has {TIGHT_BLOCKS}" in refusal.text
    loads = tight.loads()
    assert loads.num_free_blocks == loads.num_total_blocks


def test_another_model_is_not_found(server: ServerProcess) -> None:
    refusal = refused(server.stub.Generate, generate(model="gpt-17"))
    assert refusal.code is Code.NOT_FOUND
    assert "'gpt-17'" in refusal.text
    assert "'embedded'" in refusal.text


def test_a_live_id_already_exists(server: ServerProcess) -> None:
    with running(server.stub, long_request(LASTING, request_id="twice")):
        refusal = refused(server.stub.Generate, generate(request_id="twice"))
        assert refusal.code is Code.ALREADY_EXISTS
        assert "'twice'" in refusal.text
        assert refusal.request_id == "twice"
    wait_until(lambda: server.loads().num_open_calls == 0, TIMEOUT_S)
    assert server.stub.Generate(generate(request_id="twice"), timeout=TIMEOUT_S).finished


def test_abort(server: ServerProcess) -> None:
    free = server.loads().num_free_blocks
    with waiting(server.stub, long_request(LASTING, request_id="mine")) as call:
        wait_until(lambda: server.loads().num_running == 1, TIMEOUT_S)
        aborted = server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=TIMEOUT_S)
        loads = server.loads()
        assert aborted.aborted
        assert (loads.num_running, loads.num_free_blocks) == (0, free)
        assert call["done"].wait(TIMEOUT_S)
        outcome = call["outcome"]
        assert isinstance(outcome, Refusal)
        assert outcome.code is Code.CANCELLED
        assert "'mine'" in outcome.text
    for _ in range(2):
        again = server.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=TIMEOUT_S)
        assert again.HasField("aborted")
        assert not again.aborted


def test_a_full_queue(tight: ServerProcess) -> None:
    """Two calls may wait, whatever their priorities; what comes beside them is refused."""
    with ExitStack() as calls:
        requests = [long_request(200, priority=-(i % 2)) for i in range(24)]
        started = [calls.enter_context(waiting(tight.stub, request)) for request in requests]
        for call in started:
            assert call["done"].wait(TIMEOUT_S)
        outcomes = [call["outcome"] for call in started]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    answers = [outcome for outcome in outcomes if isinstance(outcome, pb.GenerateResponse)]
    assert len(answers) >= 2
    assert refusals
    assert len(answers) + len(refusals) == len(requests)
    for refusal in refusals:
        assert refusal.code is Code.RESOURCE_EXHAUSTED, refusal.text
        assert refusal.retry_after_s is not None
        assert 0.0 < refusal.retry_after_s <= 30.0
    assert tight.stub.Generate(long_request(1), timeout=TIMEOUT_S).finished


def refused_beside_two(stub: Any, request: pb.GenerateRequest) -> Refusal:
    """Makes a call while both places are taken; again, if one was free before the call came."""
    for _ in range(20):
        with running(stub, long_request(LASTING // 2)), running(stub, long_request(LASTING // 2)):
            try:
                stub.Generate(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                return Refusal(error)
    raise AssertionError("answered 20 times")


def test_time_in_the_queue_is_bounded(tight: ServerProcess) -> None:
    for max_queue_ms in (0, 50):
        refusal = refused_beside_two(tight.stub, long_request(1, max_queue_ms=max_queue_ms))
        assert refusal.code is Code.DEADLINE_EXCEEDED
        assert "waited" in refusal.text
        assert tight.loads().num_queued == 0
    wait_until(lambda: tight.loads().num_open_calls == 0, TIMEOUT_S)


def test_a_deadline_frees_the_blocks(tight: ServerProcess) -> None:
    wait_until(lambda: tight.loads().num_running == 0, TIMEOUT_S)
    free = tight.loads().num_free_blocks
    num_steps = tight.loads().num_steps
    refusal = refused(tight.stub.Generate, long_request(LASTING), timeout=0.1)
    assert refusal.code is Code.DEADLINE_EXCEEDED
    wait_until(lambda: held(tight) == (0, 0, free), TIMEOUT_S)
    assert tight.loads().num_steps < num_steps + 450, "it did not just run to its end"
    assert refused(tight.stub.Generate, long_request(LASTING), timeout=0.0).code is (
        Code.DEADLINE_EXCEEDED
    )


def test_priorities(tight: ServerProcess) -> None:
    stub = tight.stub
    with (
        running(stub, long_request(LASTING // 2)) as first,
        running(stub, long_request(LASTING // 2)),
        waiting(stub, long_request(40, priority=1)) as late,
        waiting(stub, long_request(40, priority=-1)) as early,
    ):
        wait_until(lambda: tight.loads().num_queued == 2, TIMEOUT_S)
        first.cancel()
        for call in (early, late):
            assert call["done"].wait(TIMEOUT_S)
        # The one that came first waited until the other had ended.
        sooner, later = early["outcome"].usage, late["outcome"].usage
        assert later.queue_s > (sooner.queue_s + sooner.total_s) / 2


def test_unknown_methods_and_names(server: ServerProcess) -> None:
    for path in ("/tpengine.v1.GenerationService/Nothing", "/unknown.Service/Method"):
        assert refused(server.channel.unary_unary(path), b"").code is Code.UNIMPLEMENTED


def held(server: ServerProcess) -> tuple[int, int, int]:
    """(running requests, open calls, free blocks)"""
    loads = server.loads()
    return loads.num_running, loads.num_open_calls, loads.num_free_blocks
