"""Clients that vanish, thousands of clients, unread streams: the server stays unaffected."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from itertools import islice
from pathlib import Path

import pytest
from support.footprint import Footprint, assert_settles
from support.processors import Stopwatch
from support.server_process import ServerProcess, wait_until
from support.silent_reader import SilentReader

from tpengine import SamplingParams
from tpengine.client.client_messages import to_request
from tpengine.client.generation_client import GenerationClient
from tpengine.client.load import percentiles
from tpengine.errors import DeadlineExceededError
from tpengine.proto import tpengine_pb2 as pb

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENGINE = ["--dtype", "float32", "--num-device-blocks-override", "512"]
QUEUE = 256
NUM_CANCELS, NUM_DEADLINES, NUM_KILLED = 400, 300, 10
STREAMS_OF_KILLED = 30
VANISH_S = 8.0
CROWD_RATE, LEAST_RATE, NUM_TO_GAUGE = 700.0, 120.0, 400
CROWD_TIMEOUT_S = 200.0
MAX_REFUSAL = {50: 0.05, 99: 0.5}
"""Percentiles of the refusals' times, as shares of the wait in the queue that is refused, which a
loaded machine prolongs as well."""
MEMORY_SLACK = 96 << 20
QUIET_S = 40.0
ENDED = "tpengine:request_success_total"
NUM_READERS, NUM_SILENT, UNREAD_TOKENS = 4, 4, 400
UNREAD_S, LONG_UNREAD_S = 3.0, 30.0
WINDOW_S = 1.5
TOUCH_TOKENS, BLOCK_SIZE = 480, 16
MIN_RATE, STARVED_MIN_RATE = 0.6, 0.3
"""Shares of the rate without silent readers."""
MIN_SHARE = 0.7
"""Share of the CPU time that server and readers need; with less, rates vary by themselves."""
MAX_HELD_BYTES = 4 << 20
"""Bound for a stream whose 400 tokens have 20 candidates each."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("load") / "server.log"
    options = ["--max-queued-requests", str(QUEUE), "--scheduling-policy", "priority"]
    with ServerProcess(*ENGINE, *options, "--max-num-seqs", "16", log=log) as process:
        yield process
    assert "Traceback" not in log.read_text()


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


async def _vanish_by_cancel(client: GenerationClient, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, VANISH_S))
    prompt = [rng.randrange(5, 500) for _ in range(rng.randint(1, 60))]

    async def read() -> None:
        async for _ in client.stream(prompt, _greedy(200)):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(rng.uniform(0, 0.3))
    task.cancel()
    await asyncio.wait([task])
    # a client that was starved meanwhile finds its stream whole; result() raises what went wrong
    assert task.cancelled() or task.result() is None


async def _vanish_by_deadline(client: GenerationClient, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, VANISH_S))
    prompt = [rng.randrange(5, 500) for _ in range(rng.randint(1, 60))]
    with pytest.raises(DeadlineExceededError):
        await client.generate(prompt, _greedy(1900), timeout_s=rng.uniform(0.001, 0.3))


async def _vanish_by_kill(target: str, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, VANISH_S))
    words = [target, str(STREAMS_OF_KILLED), str(rng.randrange(10**6))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(HERE / "vanish.py"), *words, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), QUIET_S)
        assert line == b"open\n"
        await asyncio.sleep(rng.uniform(0, 0.3))
    finally:
        process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), QUIET_S) == -signal.SIGKILL


async def _vanish(target: str, cancels: int, deadlines: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    rngs = [random.Random(rng.random()) for _ in range(cancels + deadlines + kills)]
    async with GenerationClient(target) as client:
        await asyncio.gather(
            *(_vanish_by_cancel(client, one) for one in rngs[:cancels]),
            *(_vanish_by_deadline(client, one) for one in rngs[cancels : cancels + deadlines]),
            *(_vanish_by_kill(target, one) for one in rngs[cancels + deadlines :]),
        )


def test_clients_that_vanish_leave_nothing(server: ServerProcess) -> None:
    answer = _complete(server)
    asyncio.run(_vanish(server.target, 60, 60, 1, seed=1))  # pools grow to their size
    wait_until(lambda: _is_at_rest(server), QUIET_S)
    time.sleep(1.0)
    before, aborted = Footprint.at_rest(server), server.metric(ENDED, finished_reason="abort")
    asyncio.run(_vanish(server.target, NUM_CANCELS, NUM_DEADLINES, NUM_KILLED, seed=2))
    assert_settles(server, before)
    # The killed clients and many of the others had reached the engine.
    num_others, num_killed = NUM_CANCELS + NUM_DEADLINES, NUM_KILLED * STREAMS_OF_KILLED
    num_aborted = server.metric(ENDED, finished_reason="abort") - aborted
    assert num_aborted > num_killed // 2 + num_others // 4
    assert _complete(server) == answer


def _is_at_rest(server: ServerProcess) -> bool:
    """Whether all blocks are free; those of a client that left are freed in the next step."""
    loads = server.loads()
    return not loads.num_open_calls and loads.num_free_blocks == loads.num_total_blocks


def _complete(server: ServerProcess) -> tuple[int, ...]:
    """Output ids of an ordinary request."""

    async def ask() -> tuple[int, ...]:
        async with GenerationClient(server.target, timeout_s=30) as client:
            output = await client.generate("Once upon a time", _greedy(16))
        return tuple(output.outputs[0].token_ids)

    return asyncio.run(ask())


def _crowd(folder: Path, target: str, count: int, rate: float, num_tokens: int) -> subprocess.Popen:
    """Starts many clients; their output goes to a file in the folder, as a pipe would fill up."""
    words = [target, count, rate, 3, num_tokens]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    with (folder / "crowd.json").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", str(HERE / "crowd.py"), *map(str, words)],
            stdout=out,
            env=environment,
        )


def _bearable_rate(folder: Path, target: str) -> float:
    """Clients per second: a third of what this machine can refuse now, but more than it can serve.
    At a higher rate the clients would wait for the processor, and not measure the server."""
    _crowd(folder, target, NUM_TO_GAUGE, math.inf, 0).wait(CROWD_TIMEOUT_S)
    found = json.loads((folder / "crowd.json").read_text())
    assert {status for status, *_ in found["ends"]} == {"INVALID_ARGUMENT"}
    return min(CROWD_RATE, max(LEAST_RATE, NUM_TO_GAUGE / found["elapsed_s"] / 3))


def _is_refused_at_once(server: ServerProcess, folder: Path, size: int) -> bool | None:
    """Sends a crowd; whether its refusals took a small share of the wait that they refuse. None: it
    came so slowly, beside other processes, that the server could serve it."""
    rate = _bearable_rate(folder, server.target)
    memory, crowd = server.resident_bytes(), _crowd(folder, server.target, size, rate, 8)
    most_memory = most_queued = 0
    try:
        deadline = time.monotonic() + CROWD_TIMEOUT_S
        while crowd.poll() is None:
            assert time.monotonic() < deadline
            most_memory = max(most_memory, server.resident_bytes())
            most_queued = max(most_queued, server.loads().num_queued)
            time.sleep(0.2)
        found = json.loads((folder / "crowd.json").read_text())["ends"]
    finally:
        crowd.kill()
        crowd.wait(QUIET_S)
    statuses = Counter(status for status, *_ in found)
    refusals = percentiles([seconds for status, seconds, *_ in found if status != "OK"])
    waits = {
        priority: statistics.median(
            wait for status, _, own, wait in found if status == "OK" and own == priority
        )
        for priority in (-5, 5)
    }
    print(f"{rate:.0f} clients/s: {dict(statuses)}; refusals, s: {refusals}; waits, s: {waits}")
    assert set(statuses) <= {"OK", "RESOURCE_EXHAUSTED"}
    if statuses["RESOURCE_EXHAUSTED"] <= size // 10:
        return None
    assert statuses["OK"] > 2 * QUEUE
    assert QUEUE // 2 < most_queued <= QUEUE
    assert most_memory - memory < MEMORY_SLACK
    assert waits[-5] < 0.5 * waits[5]
    return all(refusals[percent] < share * waits[5] for percent, share in MAX_REFUSAL.items())


@pytest.mark.parametrize("size", [2500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_crowd_is_refused_at_once_and_in_order(
    crowded: ServerProcess, tmp_path: Path, size: int
) -> None:
    """The best of three crowds counts, because other processes slow some down."""
    _touch_cache(crowded)
    answer, before = _complete(crowded), Footprint.at_rest(crowded)
    sent = (_is_refused_at_once(crowded, tmp_path, size) for _ in range(9))
    assert any(islice((found for found in sent if found is not None), 3))
    assert_settles(crowded, before)
    assert _complete(crowded) == answer


async def _read(client: GenerationClient, until: float) -> int:
    """Reads one stream after the other; returns the number of tokens."""
    num_tokens = 0
    while time.monotonic() < until:
        async with aclosing(client.stream("Once upon a time", _greedy(256))) as outputs:
            async for output in outputs:
                num_tokens += sum(len(one.token_ids) for one in output.outputs)
                if time.monotonic() >= until:
                    break
    return num_tokens


def _touch_cache(server: ServerProcess) -> None:
    """Fills every block once: the system allocates a page when it is first written, and this must
    not count as growth."""
    loads, rng = server.loads(), random.Random(0)
    num_prompts = -(-2 * loads.num_total_blocks // (TOUCH_TOKENS // BLOCK_SIZE))

    async def fill() -> None:
        async with GenerationClient(server.target, timeout_s=60) as client:
            for _ in range(num_prompts):
                prompt = [rng.randrange(5, 500) for _ in range(TOUCH_TOKENS)]
                await client.generate(prompt, _greedy(1))

    asyncio.run(fill())


def _rate(server: ServerProcess, duration_s: float) -> tuple[float, float]:
    """(Tokens per second of all readers, share of the CPU time that they needed); the best of three
    windows, because other processes slow some down."""

    async def measure() -> tuple[float, float]:
        watch = Stopwatch(server.pid, os.getpid())
        async with GenerationClient(server.target) as client:
            until = watch.start + duration_s / 3
            read = await asyncio.gather(*(_read(client, until) for _ in range(NUM_READERS)))
        return sum(read) / watch.own_s, watch.share

    return max(asyncio.run(measure()) for _ in range(3))


def _unread(server: ServerProcess) -> SilentReader:
    """A long stream with large messages."""
    params = SamplingParams(temperature=0.0, max_tokens=UNREAD_TOKENS, ignore_eos=True, logprobs=20)
    request = to_request("Once upon a time", params, None, 0, None)
    return SilentReader(
        server.target, "/tpengine.v1.GenerationService/GenerateStream", request.SerializeToString()
    )


def _stay_unread(server: ServerProcess, unread_s: float) -> None:
    _touch_cache(server)
    rates = [_rate(server, WINDOW_S)]
    wait_until(lambda: _is_at_rest(server), QUIET_S)
    before, memory = Footprint.at_rest(server), server.resident_bytes()
    with ExitStack() as stack:
        silent = [stack.enter_context(_unread(server)) for _ in range(NUM_SILENT)]
        wait_until(lambda: server.loads().num_open_calls == NUM_SILENT, QUIET_S)
        wait_until(lambda: server.loads().num_running == 0, QUIET_S)  # all is made, nothing is read
        rate_with = _rate(server, unread_s)
        held = server.resident_bytes() - memory
        assert [one.num_data_bytes for one in silent] == [0] * NUM_SILENT
        wait_until(lambda: server.loads().num_free_blocks == before.free_blocks, QUIET_S)
        for one in silent:
            messages = [pb.GenerateResponse.FromString(data) for data in one.read_all(QUIET_S)]
            tokens = [len(out.token_ids) for message in messages for out in message.outputs]
            assert sum(tokens) == UNREAD_TOKENS
            assert messages[-1].finished
            # Waiting outputs were merged: they take a few messages, not one per token.
            assert len(messages) < UNREAD_TOKENS / 4
    rates.append(_rate(server, WINDOW_S))
    rates.insert(1, rate_with)
    print(f"tokens/s, share of the processors without, with, without silent readers: {rates}")
    is_starved = min(share for _, share in rates) < MIN_SHARE
    least = (STARVED_MIN_RATE if is_starved else MIN_RATE) * min(rates[0][0], rates[2][0])
    assert rate_with[0] > least
    assert held < NUM_SILENT * MAX_HELD_BYTES
    assert_settles(server, before)


def test_an_unread_stream_does_not_delay_others(server: ServerProcess) -> None:
    _stay_unread(server, UNREAD_S)


@pytest.mark.soak
def test_a_stream_that_is_unread_for_long(server: ServerProcess) -> None:
    _stay_unread(server, LONG_UNREAD_S)
