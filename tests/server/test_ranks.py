"""A server whose ranks have processes of their own: recovery, drain and end, from outside."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.engines import greedy
from support.server_process import ServerProcess, wait_until

from server.calls import long_request
from server.http.openai_door import Door, assert_same, joined, mixed, offline
from server.processes import END_S, dying_server, rank_pid, session
from tpengine import LLM
from tpengine.host import start_ticks
from tpengine.proto import tpengine_pb2 as pb

SMALL = ["--device", "cpu", "--dtype", "float32", "--num-device-blocks-override", "1024"]
TWO = ["--tensor-parallel-size", "2"]
CHILDREN = [*TWO, "--executor", "processes", "--keep-kv", "never"]  # so that it takes a while
NUM_TOKENS, MAX_TOKENS = 400, 200
RAY_S = 120.0
"""Time for Ray and two ranks to start on a loaded machine."""


@pytest.fixture(autouse=True)
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers have a Ray of their own, with the variables of `support.ray_cluster`."""
    pytest.importorskip("ray")
    # Ray's sockets are in its folder, and paths of sockets must be short.
    folder = tempfile.mkdtemp(prefix="tpe", dir="/tmp")
    for name, value in {"RAY_TMPDIR": folder, "RAY_ADDRESS": "local"}.items():
        monkeypatch.setenv(name, value)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "size", "count"),
    [
        (CHILDREN, 2, 12),
        pytest.param(["--isolate", "--keep-kv", "never"], 1, 12, marks=pytest.mark.soak),
        pytest.param([*TWO, "--executor", "ray"], 2, 200, marks=pytest.mark.soak),
    ],
)
def test_streams_go_on_over_a_recovery_and_a_drain(
    tmp_path: Path, llm: LLM, options: list[str], size: int, count: int
) -> None:
    """A rank is killed in the middle of the streams of many clients: no answer changes."""
    (expected,) = llm.generate(None, greedy(NUM_TOKENS), [[5, 6, 7]], use_tqdm=False)
    requests, begun = mixed(count, count, MAX_TOKENS), set[int]()
    options = [*SMALL, *options, "--http-port", "0", "--drain-timeout", "90"]
    log = tmp_path / "log"
    with (
        ServerProcess(*options, log=log, start_timeout_s=RAY_S) as server,
        ThreadPoolExecutor(count) as pool,
    ):

        def about() -> Any:
            return server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=END_S)

        def call(place: int) -> dict[str, Any]:
            """An answer over HTTP, streamed if that is possible."""
            path, body = requests[place]
            if "best_of" in body:
                return door.whole(path, body)
            chunks = []
            for chunk in door.chunks(path, {**body, "stream_options": {"include_usage": True}}):
                chunks.append(chunk)
                begun.add(place)
            return joined(chunks)

        door = Door(server.http_address)
        stream = server.stub.GenerateStream(long_request(NUM_TOKENS), timeout=RAY_S)
        token_ids = list(next(stream).outputs[0].token_ids)
        answers = [pool.submit(call, place) for place in range(count)]
        wait_until(lambda: len(begun) >= count // 2, RAY_S)
        ranks = about().ranks
        known = [(rank.rank, bool(rank.node), bool(rank.device)) for rank in ranks]
        assert known == [(0, True, True), (1, True, True)][:size]
        os.kill(rank_pid(ranks[-1]), signal.SIGKILL)
        num_done = sum(answer.done() for answer in answers)
        assert num_done < count // 2, "most streams were over before the rank was killed"
        states = set()

        def is_back() -> bool:
            info = about()  # always answers, also during the recovery
            states.add(info.state)
            assert len(info.ranks) == size
            return bool(info.recoveries == 1 and info.state == pb.SERVER_STATE_RUNNING)

        wait_until(is_back, RAY_S)
        assert pb.SERVER_STATE_RECOVERING in states
        assert about().epoch == 2
        pids = [rank_pid(rank) for rank in about().ranks]
        late = server.stub.GenerateStream(long_request(NUM_TOKENS), timeout=RAY_S)
        late_ids = list(next(late).outputs[0].token_ids)  # so the new group serves it
        server.process.send_signal(signal.SIGTERM)
        got = [answer.result() for answer in answers]
        for ids, messages in ((token_ids, stream), (late_ids, late)):
            ids += [token_id for message in messages for token_id in message.outputs[0].token_ids]
            assert tuple(ids) == expected.outputs[0].token_ids
        assert server.process.wait(END_S) == 0
        wait_until(lambda: not any(map(start_ticks, pids)), END_S)
    for (path, body), answer in zip(requests, got, strict=True):
        assert_same(llm, body, answer, offline(llm, path, body))


@pytest.mark.parametrize("ranks", [CHILDREN, pytest.param(TWO, marks=pytest.mark.soak)])
def test_a_signal_during_start_up_leaves_no_process(tmp_path: Path, ranks: list[str]) -> None:
    log = tmp_path / "log"
    with dying_server(log, "1000000", *SMALL, *ranks) as (process, *_):
        wait_until(lambda: "rank 1 on " in log.read_text() or process.poll() is not None, RAY_S)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert "SIGTERM during start-up" in log.read_text()
        wait_until(lambda: not session(process.pid), END_S)
