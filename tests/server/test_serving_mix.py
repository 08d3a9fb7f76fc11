"""Minutes of everything that clients do, at once: each request ends in exactly one state, and the
server is afterwards what it was.

`TPENGINE_TEST_SERVING_MIX_S` is the duration in seconds; default: ten minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.footprint import Footprint, assert_settles
from support.server_process import ServerProcess, wait_until

from tpengine import SamplingParams
from tpengine.client.generation_client import GenerationClient
from tpengine.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
)

DURATION_S = float(os.environ.get("TPENGINE_TEST_SERVING_MIX_S", "600"))
NUM_CLIENTS, NUM_TASKS = 4, 48
WARM_UP_S = 10.0
PATIENCE_S = 120.0
MEMORY_SLACK = 48 << 20
OPENINGS = ["Hello, my name is", "The capital of", "Once upon a time", "Two plus three is", "A"]
BAD = [
    {"stop": ["zz"] * 100},
    {"stop_token_ids": [10**6]},
    {"logit_bias": {10**6: 1.0}},
    {"n": 500},
]
ENGINE = ["--dtype", "float32", "--num-device-blocks-override", "160", "--max-num-seqs", "24"]
LIMITS = ["--max-queued-requests", "24", "--scheduling-policy", "priority"]
LIMITS += ["--max-model-len", "512"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(DURATION_S + 900)]
Act = Callable[[GenerationClient, random.Random, str], Awaitable[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log: Path = tmp_path_factory.mktemp("mix") / "log"
    with ServerProcess(*ENGINE, *LIMITS, log=log) as process:
        yield process
        assert process.stop() == 0
    assert "Traceback" not in log.read_text()


def _params(rng: random.Random) -> SamplingParams:
    fields = {"temperature": rng.choice([0.0, 0.8]), "max_tokens": rng.randint(1, 120)}
    if fields["temperature"] and rng.random() < 0.2:
        fields["n"] = rng.randint(2, 4)
    if rng.random() < 0.3:
        fields["stop"] = rng.choice([["."], ["and", "the"]])
    if rng.random() < 0.2:
        fields["logprobs"] = rng.randint(0, 5)
    return SamplingParams(seed=rng.randrange(100), **fields)


def _prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(OPENINGS) for _ in range(rng.randint(1, 20)))


async def _read(client: GenerationClient, rng: random.Random, name: str) -> str:
    """A stream to its end: each sequence ends once, and the last message is the last."""
    ends: Counter[int] = Counter()
    finished = False
    priority, params = rng.randint(-3, 3), _params(rng)
    async for part in client.stream(_prompt(rng), params, request_id=name, priority=priority):
        assert not finished
        finished = part.finished
        ends.update(one.index for one in part.outputs if one.finish_reason is not None)
    assert finished
    assert ends == Counter(range(params.n))
    return "complete"


async def _ask(client: GenerationClient, rng: random.Random, name: str) -> str:
    """One answer; often with little time in all, or in the queue."""
    limits = [{}, {"timeout_s": rng.uniform(0.001, 0.5)}, {"max_queue_s": rng.uniform(0.0, 0.2)}]
    (chosen,) = rng.choices(limits, [6, 4, 3])
    output = await client.generate(_prompt(rng), _params(rng), request_id=name, **chosen)
    assert output.finished
    assert all(one.finish_reason in ("stop", "length") for one in output.outputs)
    return "complete"


async def _leave(client: GenerationClient, rng: random.Random, name: str) -> str:
    stream = client.stream(_prompt(rng), _params(rng), request_id=name)
    try:
        for _ in range(rng.randint(1, 20)):
            if (await anext(stream)).finished:
                return "complete"
    finally:
        await stream.aclose()
    return "left"


async def _cancel(client: GenerationClient, rng: random.Random, name: str) -> str:
    task = asyncio.create_task(_read(client, rng, name))
    await asyncio.wait([task], timeout=rng.uniform(0, 0.5))
    task.cancel()
    await asyncio.wait([task])
    return "left" if task.cancelled() else task.result()


async def _be_aborted(client: GenerationClient, rng: random.Random, name: str) -> str:
    task = asyncio.create_task(_read(client, rng, name))
    await asyncio.sleep(rng.uniform(0, 0.3))
    await client.abort(name)
    return await task


async def _err(client: GenerationClient, rng: random.Random, name: str) -> str:
    prompt, fields = _prompt(rng), rng.choice(BAD)
    if rng.random() < 0.3:
        prompt, fields = [7] * rng.randint(513, 2000), {}
    with pytest.raises(RequestError):
        await client.generate(prompt, SamplingParams(**fields), request_id=name)
    return "refused"


ACTS: dict[Act, int] = {_read: 8, _ask: 13, _leave: 4, _cancel: 4, _be_aborted: 4, _err: 3}


async def _work(
    client: GenerationClient, rng: random.Random, name: str, until: float, ends: Counter[str]
) -> None:
    """One request after the other; whatever is no known end of one fails the test."""
    number = 0
    while time.monotonic() < until:
        number += 1
        (act,) = rng.choices(list(ACTS), list(ACTS.values()))
        try:
            end = await asyncio.wait_for(act(client, rng, f"{name}-{number}"), PATIENCE_S)
        except QueueFullError as error:
            end = "queue full"
            await asyncio.sleep(min(error.retry_after_s, 0.2) * rng.random())
        except DeadlineExceededError:
            end = "too late"
        except RequestAbortedError:
            end = "aborted"
        assert DuplicateRequestError.__name__ not in end
        ends[end] += 1


async def _mix(target: str, duration_s: float, seed: int) -> Counter[str]:
    rng, ends, until = random.Random(seed), Counter[str](), time.monotonic() + duration_s
    clients = [GenerationClient(target, timeout_s=PATIENCE_S) for _ in range(NUM_CLIENTS)]
    try:
        tasks = [
            _work(clients[i % NUM_CLIENTS], random.Random(rng.random()), f"{seed}-{i}", until, ends)
            for i in range(NUM_TASKS)
        ]
        await asyncio.gather(*tasks)
    finally:
        for client in clients:
            await client.close()
    return ends


def test_everything_at_once_leaves_nothing(server: ServerProcess) -> None:
    asyncio.run(_mix(server.target, WARM_UP_S, seed=0))
    wait_until(lambda: server.loads().num_open_calls == 0, PATIENCE_S)
    time.sleep(1.0)
    before, memory = Footprint.at_rest(server), server.resident_bytes()
    assert before.free_blocks == server.loads().num_total_blocks
    ended = server.metric("tpengine:request_success_total")
    ends = asyncio.run(_mix(server.target, DURATION_S, seed=1))
    print(dict(ends))
    assert_settles(server, before)
    for end in ("complete", "left", "refused", "too late", "aborted", "queue full"):
        assert ends[end] > DURATION_S / 60, end
    ended = server.metric("tpengine:request_success_total") - ended
    # Each that the engine took ended there once; those that left may not have come so far.
    taken = sum(ends[end] for end in ("complete", "left", "too late", "aborted"))
    assert ends["complete"] + ends["aborted"] <= ended <= taken
    held = server.resident_bytes() - memory
    assert held < MEMORY_SLACK, f"{held >> 20} MiB more than at the start"
