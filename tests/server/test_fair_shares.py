"""A client that fills a server with `--fairness owner`, and another one beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
from support.server_process import ServerProcess
from support.waiting import wait_until

from server.calls import TIMEOUT_S, as_client, bearer, long_request, refused, token_files
from server.http.openai_door import Door

FLOOD, OTHER = "flood-0123456789abcdef", "other-0123456789abcdef"
NUM_QUEUED = 4


def label(token: str) -> str:
    return f"token {hashlib.sha256(token.encode()).hexdigest()[:12]}"


def test_another_client_is_served_beside_a_flood(tmp_path: Path) -> None:
    options = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "2"]
    options += ["--num-device-blocks-override", "300", "--fairness", "owner", "--http-port", "0"]
    options += ["--max-queued-requests", str(NUM_QUEUED)]
    options += token_files(tmp_path, FLOOD, f"{OTHER} 3")
    with ServerProcess(*options, log=tmp_path / "log") as server:

        def waiting(token: str, what: str = "requests_waiting") -> float:
            return server.metric(f"tpengine:owner_{what}", owner=label(token))

        generate = server.stub.Generate
        calls = [generate.future(long_request(2000), **as_client(FLOOD)) for _ in range(2)]
        wait_until(lambda: waiting(FLOOD, "requests_running") == 2, TIMEOUT_S)
        calls += [
            generate.future(long_request(2000), **as_client(FLOOD)) for _ in range(NUM_QUEUED)
        ]
        wait_until(lambda: waiting(FLOOD) == NUM_QUEUED, TIMEOUT_S)
        refusal = refused(generate, long_request(1), metadata=bearer(FLOOD))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{NUM_QUEUED} of them this client's" in refusal.text

        assert generate(long_request(5), **as_client(OTHER)).finished
        door = Door(server.http_address, OTHER)
        answer = door.whole("completions", {"prompt": "a", "max_tokens": 5, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 5
        # Without shares both wait for five of the six calls, without room for them the second for
        # three.
        num_done = sum(call.done() for call in calls)
        assert num_done <= 2, "the flood need not end before"
        assert waiting(OTHER, "tokens_total") >= 10
        assert waiting(FLOOD) >= NUM_QUEUED - num_done
        calls.append(generate.future(long_request(2000), **as_client(OTHER)))
        wait_until(lambda: waiting(OTHER, "requests_running") == 1, TIMEOUT_S)
        calls += [generate.future(long_request(2000), **as_client(OTHER)) for _ in range(3)]
        wait_until(lambda: waiting(OTHER) == 3, TIMEOUT_S)
        refusal = refused(generate, long_request(1), metadata=bearer(OTHER))
        assert "3 of them this client's" in refusal.text
        for call in calls:
            call.cancel()
