"""Mutated requests over HTTP: the right status, and nothing is left over."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import pytest
from support.footprint import assert_settles, footprint_at_rest
from support.server_process import ServerProcess, serving

from server.http import bad_clients
from server.http.bad_clients import Connection
from server.test_robustness import INSIDES

CONNECTIONS = 32
WARM_UP = 100
MEMORY_SLACK = 64 << 20
FRAMES = 5
"""One of so many requests has a mutated frame."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose outputs are short and that has room for all requests."""
    options = ["--dtype", "float32", "--num-device-blocks-override", "512", "--http-port", "0"]
    options += ["--max-model-len", "64", "--swap-space", "0"]
    with serving(tmp_path_factory.mktemp("http"), *options) as process:
        yield process


def _address(server: ServerProcess) -> tuple[str, int]:
    host, _, port = server.http_address.removeprefix("http://").rpartition(":")
    return host, int(port)


def _judge(sent: bytes, answer: HTTPResponse, body: bytes) -> int:
    """The status, or that of the error that a stream ended with."""
    text, status = body.decode(), answer.status
    shown = f"{sent[:2000]!r}: {status} {text[-1000:]}"
    for word in INSIDES:
        assert word not in text, shown
    if answer.headers["content-type"] == "text/event-stream; charset=utf-8":
        *events, empty = text.split("\n\n")
        assert empty == "", shown
        last = events.pop()
        for event in events:
            assert json.loads(event.removeprefix("data: "))["choices"] is not None, shown
        if last != "data: [DONE]":
            error = json.loads(last.removeprefix("data: "))["error"]
            status = 500 if error["type"] == "server_error" else 400
    elif text and answer.headers["content-type"] == "application/json":
        assert (set(json.loads(text)) == {"error"}) == (status >= 400), shown
    assert status < 500, shown  # the server has room, so that 503 would be wrong, too
    assert status != 429, shown
    return status


def _mutate(server: ServerProcess, count: int, seed: int) -> Counter[int]:
    """Sends mutated requests; the number of answers by status, 0 where none is due."""
    numbers = iter(range(count))

    def client(_: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        whole, odd = Connection(_address(server)), Connection(_address(server))
        for number in numbers:
            rng = random.Random(f"{seed}:{number}")
            path, body = rng.choice(bad_clients.SEEDS)
            mutated = bad_clients.mutated_body(body, rng)
            if rng.randrange(FRAMES):
                sent = bad_clients.framed(path, mutated)
                answer = whole.ask(sent)
                assert answer is not None, f"no answer: {sent!r}"
            else:
                sent = bad_clients.mutated_frame(path, mutated, rng)
                answer = odd.ask(sent, bad_clients.SILENT_S)
                odd.close()
            statuses[0 if answer is None else _judge(sent, *answer)] += 1
        whole.close()
        return statuses

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return sum(pool.map(client, range(CONNECTIONS)), Counter())


@pytest.mark.parametrize("count", [250, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mutated_requests(server: ServerProcess, count: int) -> None:
    before = footprint_at_rest(server)
    _mutate(server, WARM_UP, seed=1)
    memory = server.system.memory_info().rss
    statuses = _mutate(server, count, seed=2)
    print(f"answers by status, 0: none: {dict(sorted(statuses.items()))}")
    assert statuses[200] > count / 10
    assert statuses[400] > count / 4
    assert_settles(server, before)
    held = server.system.memory_info().rss - memory
    print(f"memory: {held / (1 << 20):.1f} MiB more")
    assert held < MEMORY_SLACK
    assert server.process.poll() is None
