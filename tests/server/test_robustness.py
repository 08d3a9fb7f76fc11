"""Invalid bytes get the right status, no internals leak, and the server goes on."""

from __future__ import annotations

import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.http2 import PREFACE
from support.mutations import mutated
from support.server_process import ServerProcess, wait_until
from support.servers import MODEL_LENGTH

from server.calls import SERVICE, TIMEOUT_S, Refusal, Watcher, ids, refused, sampling
from server.guarded import guarded_server
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc
from tpengine.server.state import ServerState

Code = grpc.StatusCode
FEW_MUTATIONS, MANY_MUTATIONS = 128, 10_000
AT_ONCE = 32
INSIDES = ("Traceback", 'File "', "Error(", "google", "<class", "object at 0x", ".py", "SECRET")
CORRUPT = {
    "noise": b"\xff\xff\xff",
    "cut short": b"\x12\x7fabc",
    "no UTF-8": b"\x12\x02\xff\xfe",
    "field of another type": b"\x10\x01\x2a\x01\x08",
    "deep nesting": b"\x2b" * 5000,
    "no end": b"\xff" * 100_000,
    "zeros": bytes(5000),
}


@pytest.fixture(autouse=True)
def _lives(server: ServerProcess) -> Iterator[None]:
    """After each test the same process answers as before, and holds no resources of it."""
    before = server.loads()
    yield
    assert server.process.poll() is None
    answer = server.stub.Generate(valid(), timeout=TIMEOUT_S)
    assert answer.outputs[0].text == " Paris. The city lies on the Seine"

    def holds_nothing() -> bool:
        now = server.loads()
        blocks_are_back = now.num_free_blocks == before.num_free_blocks
        return not now.num_open_calls and blocks_are_back and now.num_tasks <= before.num_tasks + 2

    wait_until(holds_nothing, TIMEOUT_S)


@pytest.fixture(scope="module", autouse=True)
def patient(server: ServerProcess) -> Iterator[Watcher]:
    """A client that only waits and pings while the other tests run."""
    options = [
        ("grpc.keepalive_time_ms", 300),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(server.target, options) as channel:
        watcher = Watcher(channel, "liveness", timeout_s=5.0)
        wait_until(lambda: bool(watcher.said), TIMEOUT_S)
        yield watcher
        watcher.close()


def valid() -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="The capital of France is", sampling=sampling())


def rich() -> pb.GenerateRequest:
    """A request with every kind of field."""
    params = sampling(
        stop=["é", "xyz"],
        stop_token_ids=[3],
        logit_bias={5: 1.5, 7: -2.0},
        allowed_token_ids=ids(*range(4, 90)),
        bad_words=["no"],
        bad_words_token_ids=[ids(9, 10)],
        seed=5,
        top_p=0.9,
        logprobs=2,
    )
    return pb.GenerateRequest(prompt_token_ids=ids(5, 900, 31), sampling=params, priority=0)


def assert_says_nothing(refusal: Refusal) -> None:
    for word in INSIDES:
        assert word not in refusal.text, refusal.text
    assert len(refusal.text) <= 500


@pytest.mark.parametrize(
    "count", [FEW_MUTATIONS, pytest.param(MANY_MUTATIONS, marks=pytest.mark.soak)]
)
def test_random_mutations(server: ServerProcess, count: int) -> None:
    rng = random.Random(7)
    seeds = [rich().SerializeToString(), valid().SerializeToString()]
    # The client sends the bytes unchanged and unchecked.
    unary = server.channel.unary_unary(SERVICE + "Generate")
    stream = server.channel.unary_stream(SERVICE + "GenerateStream")
    codes: Counter[str] = Counter()
    pending: list[tuple[bytes, Callable[[], Any]]] = []
    for i in range(count):
        data = mutated(seeds[i % 2], rng)
        if i % 4:
            pending.append((data, unary.future(data, timeout=TIMEOUT_S).result))
        else:
            pending.append((data, partial(list, stream(data, timeout=TIMEOUT_S))))
        if len(pending) >= AT_ONCE or i == count - 1:
            for sent, call in pending:
                codes[outcome(sent, call)] += 1
            pending.clear()
    assert sum(codes.values()) == count
    # A mutation may also name another model, or set a wait of milliseconds.
    assert set(codes) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"}, codes
    assert codes["OK"] > count / 20
    assert codes["INVALID_ARGUMENT"] > count / 4


def outcome(sent: bytes, finish: Callable[[], Any]) -> str:
    try:
        assert finish()
    except grpc.RpcError as error:
        refusal = Refusal(error)
        assert_says_nothing(refusal)
        assert refusal.code is not Code.UNKNOWN, sent
        return str(refusal.code.name)
    return "OK"


@pytest.mark.parametrize("name", list(CORRUPT))
def test_bytes_that_are_no_message(server: ServerProcess, name: str) -> None:
    data = CORRUPT[name]
    paths = [SERVICE + method for method in ("Generate", "Abort", "Tokenize", "Drain")]
    paths.append("/grpc.health.v1.Health/Check")
    for path in paths if name == "noise" else paths[:1]:
        refusal = refused(server.channel.unary_unary(path), data)
        assert refusal.code is Code.INVALID_ARGUMENT, (path, refusal.text)
        assert_says_nothing(refusal)
    for path in (SERVICE + "GenerateStream", "/grpc.health.v1.Health/Watch"):
        refusal = refused(server.channel.unary_stream(path), CORRUPT["noise"])
        assert refusal.code is Code.INVALID_ARGUMENT
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    refusal = refused(server.channel.stream_stream(path), iter([CORRUPT["noise"]]))
    assert refusal.code is Code.INVALID_ARGUMENT
    assert_says_nothing(refusal)


@pytest.mark.parametrize(
    "data",
    [
        b"POST /tpengine.v1.GenerationService/Generate HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        PREFACE + random.Random(2).randbytes(4096),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(3).randbytes(508),
        # A settings frame, then headers with a wrong length.
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01\x05\x00\x00\x00\x01",
    ],
    ids=["POST", "after the preface", "TLS", "frames"],
)
def test_garbage_on_the_port(server: ServerProcess, data: bytes) -> None:
    host, _, port = server.target.partition(":")
    heard = b""
    with (
        socket.create_connection((host, int(port)), timeout=1.0) as connection,
        suppress(TimeoutError, ConnectionError),
    ):
        connection.sendall(data)
        while part := connection.recv(65536):
            heard += part
    for word in INSIDES:
        assert word.encode() not in heard


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_bombs(server: ServerProcess, kind: grpc.Compression) -> None:
    generate = server.channel.unary_unary(SERVICE + "Generate")
    answer = generate(valid().SerializeToString(), timeout=TIMEOUT_S, compression=kind)
    assert pb.GenerateResponse.FromString(answer).finished, "an honest one is read"
    bomb = pb.GenerateRequest(prompt="a" * (32 << 20)).SerializeToString()
    before = server.system.memory_info().rss
    for _ in range(3):
        assert refused(generate, bomb, compression=kind).code is Code.RESOURCE_EXHAUSTED
    assert server.system.memory_info().rss < before + (24 << 20)


def test_too_much(server: ServerProcess) -> None:
    generate = server.channel.unary_unary(SERVICE + "Generate")
    bound = server.stub.GetServerInfo(pb.GetServerInfoRequest()).limits.max_message_bytes
    assert bound == (512 << 10) + 64 * MODEL_LENGTH  # follows max_model_len
    for size in (bound, 5 << 20):
        large = pb.GenerateRequest(prompt="a" * size).SerializeToString()
        assert refused(generate, large).code is Code.RESOURCE_EXHAUSTED
    refusal = refused(generate, valid().SerializeToString(), metadata=(("x-large", "a" * 20_000),))
    assert refusal.code is Code.RESOURCE_EXHAUSTED


def test_a_text_that_cannot_fit_costs_nothing(server: ServerProcess) -> None:
    """Refused by its length alone: tokenizing would take seconds and delay other clients, and ids
    are not looked at."""
    text, bad_ids = "ab " * (1 << 17), pb.TokenIds(ids=[-1] * 40_000)
    chat = pb.Conversation(messages=[pb.Message(role="user", content=text)])
    calls = (
        (server.stub.Generate, pb.GenerateRequest(prompt=text), "prompt"),
        (server.stub.Generate, pb.GenerateRequest(messages=chat), "messages"),
        (server.stub.Generate, pb.GenerateRequest(prompt_token_ids=bad_ids), "prompt_token_ids"),
        (server.stub.Tokenize, pb.TokenizeRequest(text=text), "text"),
        (server.stub.Tokenize, pb.TokenizeRequest(messages=chat), "messages"),
        (server.stub.Detokenize, pb.DetokenizeRequest(token_ids=[5] * (1 << 18)), "token_ids"),
    )
    for call, request, field in calls:
        refusal = refused(call, request)
        assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field)
        assert re.search(rf", more than .*max_model_len = {MODEL_LENGTH}", refusal.text)


def test_a_fault_of_ours_tells_nothing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("SECRET")

    monkeypatch.setattr(ServerState, "uptime_s", property(broken))
    with guarded_server() as target, grpc.insecure_channel(target) as channel:
        stub = tpengine_pb2_grpc.GenerationServiceStub(channel)
        refusal = refused(stub.GetServerInfo, pb.GetServerInfoRequest())
    assert refusal.code is Code.INTERNAL
    assert_says_nothing(refusal)
    assert refusal.request_id in refusal.text
    for packed in refusal.status.details:
        assert b"SECRET" not in packed.value


def test_prompts_are_not_in_the_log(server: ServerProcess) -> None:
    marker = "zxqj"
    long = pb.Message(role=marker, content=marker * 2000)
    good = pb.GenerateRequest(prompt=f"{marker} a", sampling=sampling())
    assert server.stub.Generate(good, timeout=TIMEOUT_S).finished
    for request in (
        pb.GenerateRequest(prompt=f"{marker} " * 2000),
        pb.GenerateRequest(prompt="a", sampling=sampling(stop=[""], bad_words=[marker])),
        pb.GenerateRequest(messages=pb.Conversation(messages=[long])),
    ):
        assert refused(server.stub.Generate, request).code is Code.INVALID_ARGUMENT
    log = server.log.read_text()
    assert "request 'req-" in log
    assert marker not in log


def test_a_client_may_wait_and_look_whether_we_live(patient: Watcher) -> None:
    """Pings while no data comes, as in a long queue or a recovery, are no abuse: the eleventh ended
    the connection once."""
    wait_until(lambda: patient.code is not None, TIMEOUT_S)
    assert patient.code is Code.DEADLINE_EXCEEDED
    assert patient.said == [health_pb2.HealthCheckResponse.SERVING]
