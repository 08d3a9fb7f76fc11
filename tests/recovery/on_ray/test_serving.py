"""What clients see of a recovery: streams stay open, and aborts, deadlines and new requests behave
as at any time; and of the one that is too many: a typed end, and nothing left."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.calls import ids, refused, sampling
from support.engines import complete, greedy, make_engine
from support.matrix import only
from support.namespaces import children_of
from support.server_process import ServerProcess
from support.waiting import wait_until

from recovery.on_ray.processes import actors
from tpengine.proto import tpengine_pb2 as pb

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12] * 20, [13, 14]]
NUM_TOKENS = 400
"""So many that a stream does not end before the kill."""
SOON_S = 30.0
"""For what is answered while the ranks are rebuilt, which the tests look at afterwards."""
PATIENCE_S = 90.0
SERVING = health_pb2.HealthCheckResponse.SERVING
RECOVERING = pb.SERVER_STATE_RECOVERING


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What each prompt gets from one rank in this process."""
    with make_engine(folder) as engine:
        return [list(complete(engine, prompt, greedy(NUM_TOKENS)).token_ids) for prompt in PROMPTS]


@pytest.fixture(params=only(["processes"], ["processes", "ray"]))
def server(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    options = ["--model", str(folder), "--tensor-parallel-size", "2", "--executor", request.param]
    if request.param == "ray":
        options += ["--ray-address", request.getfixturevalue("ray_address")]
    options += ["--dtype", "float32", "--device", "cpu", "--num-device-blocks-override", "256"]
    options += ["--keep-kv", "never"]  # else a recovery is over before a request can meet it
    # By a shell, so that it is executed and not forked. Without a template new ranks import torch,
    # and the requests of this test come while they do.
    more: dict[str, Any] = {"log": tmp_path / "log", "max_files": 1024}
    with ServerProcess(*options, "--max-recoveries", "1", **more) as process:
        yield process


def request(index: int, **fields: Any) -> pb.GenerateRequest:
    params = sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(prompt_token_ids=ids(*PROMPTS[index]), sampling=params, **fields)


def kill_a_rank(ranks: dict[int, str]) -> None:
    os.kill(random.Random(1).choice(sorted(ranks)), signal.SIGKILL)


def token_ids(messages: Any) -> list[int]:
    return [token for message in messages for token in message.outputs[0].token_ids]


def test_server(server: ServerProcess, expected: list[list[int]]) -> None:
    """Over gRPC; then it is lost once more than it may be."""
    health = health_pb2_grpc.HealthStub(server.channel)

    def state() -> int:
        return int(server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SOON_S).state)

    def healthy() -> bool:
        names = ("liveness", "readiness")
        requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
        return all(health.Check(request, timeout=SOON_S).status == SERVING for request in requests)

    kept = server.stub.GenerateStream(request(0), timeout=PATIENCE_S)
    aborted = server.stub.GenerateStream(request(1, request_id="aborted"), timeout=PATIENCE_S)
    answered = token_ids([next(kept)])
    next(aborted)
    before = actors()
    for template in set(children_of(server.pid)) - before.keys():
        os.kill(template, signal.SIGKILL)
    kill_a_rank(before)
    wait_until(lambda: state() == RECOVERING, SOON_S)
    assert server.stub.Abort(pb.AbortRequest(request_id="aborted"), timeout=SOON_S).aborted
    assert refused(lambda **_: aborted).code is grpc.StatusCode.CANCELLED
    new = server.stub.Generate.future(request(2), timeout=PATIENCE_S)
    for fields, timeout_s in (({}, 0.1), ({"max_queue_ms": 100}, SOON_S)):
        late = refused(server.stub.Generate, request(3, **fields), timeout=timeout_s)
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert healthy()
    assert state() == RECOVERING, "it was all too late"
    assert answered + token_ids(kept) == expected[0]
    assert list(new.result(timeout=PATIENCE_S).outputs[0].token_ids) == expected[2]
    assert healthy()
    info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SOON_S)
    assert (info.epoch, info.recoveries, info.state) == (2, 1, pb.SERVER_STATE_RUNNING)
    loads = server.loads()
    assert loads.num_free_blocks == loads.num_total_blocks > 0

    last = server.stub.GenerateStream(request(0), timeout=PATIENCE_S)
    next(last)
    ranks = actors()
    assert not ranks.keys() & before.keys()
    kill_a_rank(ranks)
    end = refused(lambda **_: last)
    assert end.code is grpc.StatusCode.UNAVAILABLE, end.text
    assert server.process.wait(PATIENCE_S) == 1
    wait_until(lambda: not actors(), SOON_S)
    said = server.log.read_text()
    for word in ("EngineDeadError", "max_recoveries = 1", "SIGKILL", "epoch 2", "execute_model"):
        assert word in said, said[-3000:]
