"""A server whose ranks have processes of their own: recovery, drain and end, from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import complete, greedy, make_engine
from support.server_process import ServerProcess, wait_until

from server.calls import long_request
from server.processes import END_S, dying_server, own_ray, rank_pid, session
from tpengine.config import EMBEDDED_MODEL
from tpengine.host import start_ticks
from tpengine.proto import tpengine_pb2 as pb

RANKS = ["--tensor-parallel-size", "2", "--device", "cpu", "--dtype", "float32"]
RANKS += ["--num-device-blocks-override", "256"]
CHILDREN = [*RANKS[:2], "--executor", "processes"]
NUM_TOKENS = 600
RAY_S = 120.0
"""Time for Ray and two ranks to start on a loaded machine."""


@pytest.fixture(autouse=True)
def _own_ray() -> Iterator[None]:
    pytest.importorskip("ray")
    with own_ray():
        yield


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_streams_go_on_over_a_recovery_and_a_drain(tmp_path: Path, size: int) -> None:
    """Of ranks that are children of the server; also of the only one, with --isolate."""
    with make_engine(EMBEDDED_MODEL) as engine:
        expected = list(complete(engine, [5, 6, 7], greedy(NUM_TOKENS)).token_ids)
    log = tmp_path / "log"
    options = [*RANKS[2:], *(["--isolate"] if size == 1 else CHILDREN), "--drain-timeout", "90"]
    with ServerProcess(*options, log=log, start_timeout_s=RAY_S) as server:

        def about() -> Any:
            return server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=END_S)

        stream = server.stub.GenerateStream(long_request(NUM_TOKENS), timeout=RAY_S)
        token_ids = list(next(stream).outputs[0].token_ids)
        ranks = about().ranks
        found = [(rank.rank, bool(rank.node), bool(rank.device)) for rank in ranks]
        assert found == [(0, True, True), (1, True, True)][:size]
        os.kill(rank_pid(ranks[-1]), signal.SIGKILL)
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
        late = server.stub.Generate.future(long_request(NUM_TOKENS), timeout=RAY_S)
        wait_until(lambda: server.loads().num_open_calls == 2, END_S)
        server.process.send_signal(signal.SIGTERM)
        for message in stream:
            token_ids += message.outputs[0].token_ids
        assert token_ids == expected
        assert list(late.result().outputs[0].token_ids) == expected
        assert server.process.wait(END_S) == 0
        wait_until(lambda: not any(map(start_ticks, pids)), END_S)


@pytest.mark.parametrize("ranks", [CHILDREN, pytest.param(RANKS, marks=pytest.mark.soak)])
def test_a_signal_during_start_up_leaves_no_process(tmp_path: Path, ranks: list[str]) -> None:
    log = tmp_path / "log"
    with dying_server(log, "1000000", *RANKS, *ranks) as (process, _):
        wait_until(lambda: "rank 1 on " in log.read_text() or process.poll() is not None, RAY_S)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert "SIGTERM during start-up" in log.read_text()
        wait_until(lambda: not session(process.pid), END_S)
