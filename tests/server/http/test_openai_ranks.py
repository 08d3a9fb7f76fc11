"""A rank is killed in the middle of the streams of many clients: no answer changes."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess, wait_until

from server.http.openai_door import Door, assert_same, joined, mixed, offline
from server.test_ranks import RANKS, RAY_S, _own_ray  # noqa: F401
from tpengine import LLM
from tpengine.proto import tpengine_pb2 as pb

MAX_TOKENS = 200
OPTIONS = [*RANKS[:-1], "1024", "--http-port", "0", "--max-model-len", "512"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "executor"), [(12, "processes"), pytest.param(200, "ray", marks=pytest.mark.soak)]
)
def test_streams_go_on_over_a_recovery(count: int, executor: str, llm: LLM, tmp_path: Path) -> None:
    requests = mixed(count, count, MAX_TOKENS)
    begun: set[int] = set()
    done: set[int] = set()
    options = [*OPTIONS, "--executor", executor]
    with ServerProcess(*options, log=tmp_path / "log", start_timeout_s=RAY_S) as server:
        door = Door(server.http_address)

        def about() -> Any:
            return server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=RAY_S)

        def call(place: int) -> dict[str, Any]:
            path, body = requests[place]
            chunks: list[dict[str, Any]] = []
            if "best_of" in body:
                return door.whole(path, body)
            options = {"stream_options": {"include_usage": True}}
            for chunk in door.chunks(path, {**body, **options}):
                chunks.append(chunk)
                begun.add(place)
            done.add(place)
            return joined(chunks)

        found = re.search(r"pid[ =](\d+)", about().ranks[1].device)
        assert found is not None
        with ThreadPoolExecutor(count) as pool:
            answers = [pool.submit(call, place) for place in range(count)]
            wait_until(lambda: len(begun) >= count // 2, RAY_S)
            os.kill(int(found[1]), signal.SIGKILL)
            assert len(done) < count // 2, "most streams were over before the rank was killed"
            got = [answer.result() for answer in answers]
        assert about().recoveries == 1
    for (path, body), answer in zip(requests, got, strict=True):
        assert_same(llm, body, answer, offline(llm, path, body))
