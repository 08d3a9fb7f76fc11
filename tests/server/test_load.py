"""Clients that vanish, thousands of clients, unread streams: the server stays unaffected."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from client.talks import collect
from support import http2
from support.engines import greedy
from support.footprint import assert_settles, footprint_at_rest
from support.server_process import ServerProcess, serving, wait_until
from support.servers import LASTING
from support.silent_reader import SilentReader

from server.calls import SERVICE, ids, long_request, running, sampling
from tpengine.client.generation_client import GenerationClient
from tpengine.errors import DeadlineExceededError
from tpengine.proto import tpengine_pb2 as pb

STREAM = f"{SERVICE}GenerateStream"
NUM_SEQS, QUEUE, CONNECTING = 4, 64, 64
STREAMS_OF_CUT = 30
VANISH_RATE = 180.0
"""Clients that come in a second."""
CROWD_TIMEOUT_S = 200.0
MEMORY_SLACK = 96 << 20
QUIET_S = 120.0
ENDED = "tpengine:request_success_total"
NUM_SILENT, UNREAD_TOKENS = 4, 200
TOUCH_TOKENS, BLOCK_SIZE = 480, 16
MAX_HELD_BYTES = 4 << 20
"""Bound for a stream whose 200 tokens have 20 candidates each."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ["--dtype", "float32", "--num-device-blocks-override", "512"]
    options += ["--max-queued-requests", str(QUEUE), "--max-num-seqs", str(NUM_SEQS)]
    with serving(tmp_path_factory.mktemp("load"), *options) as process:
        yield process


async def _vanish_by_cancel(client: GenerationClient, rng: random.Random) -> None:
    prompt = [rng.randrange(5, 500) for _ in range(rng.randint(1, 60))]
    task = asyncio.create_task(collect(client.stream(prompt, greedy(200))))
    await asyncio.sleep(rng.uniform(0, 0.3))
    task.cancel()
    await asyncio.wait([task])
    # a client that was starved meanwhile finds its stream whole; result() raises what went wrong
    assert task.cancelled() or task.result()


async def _vanish_by_deadline(client: GenerationClient, rng: random.Random) -> None:
    prompt = [rng.randrange(5, 500) for _ in range(rng.randint(1, 60))]
    with pytest.raises(DeadlineExceededError):
        await client.generate(prompt, greedy(1900), timeout_s=rng.uniform(0.001, 0.3))


async def _frames(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[tuple[int, int, bytes]]:
    """(kind, flags, payload) of each frame that the server sends; what wants an answer gets one."""
    while True:
        length, kind, flags = http2.read_head(await reader.readexactly(http2.HEAD_BYTES))
        payload = await reader.readexactly(length)
        writer.write(http2.reply(kind, flags, payload))
        yield kind, flags, payload


async def _vanish_by_cut(client: GenerationClient, rng: random.Random) -> None:
    """A client of many streams that loses its connection, as when its process is killed."""
    target = client.target
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    asked = [long_request(200, prompt_token_ids=_drawn_ids(rng)) for _ in range(STREAMS_OF_CUT)]
    data = [request.SerializeToString() for request in asked]
    calls = [http2.call(target, STREAM, message, 2 * i + 1) for i, message in enumerate(data)]
    writer.write(http2.greeting() + b"".join(calls))
    num_begun = 0
    async for kind, _, _ in _frames(reader, writer):
        num_begun += kind == http2.HEADERS
        if num_begun >= STREAMS_OF_CUT:
            break
    await asyncio.sleep(rng.uniform(0, 0.3))
    writer.transport.abort()


def _drawn_ids(rng: random.Random) -> pb.TokenIds:
    return ids(*(rng.randrange(5, 500) for _ in range(8)))


async def _vanish(target: str, cancels: int, deadlines: int, cuts: int, seed: int) -> None:
    rng = random.Random(seed)
    spread_s = (cancels + deadlines) / VANISH_RATE

    async def come(vanish: Callable[..., Awaitable[None]]) -> None:
        own = random.Random(rng.random())
        await asyncio.sleep(own.uniform(0, spread_s))
        await vanish(client, own)

    async with GenerationClient(target) as client:
        ways = [_vanish_by_cancel] * cancels + [_vanish_by_deadline] * deadlines
        await asyncio.gather(*map(come, [*ways, *[_vanish_by_cut] * cuts]))


@pytest.mark.parametrize(
    ("cancels", "deadlines", "cuts"),
    [(100, 80, 3), pytest.param(400, 300, 10, marks=pytest.mark.soak)],
)
def test_clients_that_vanish_leave_nothing(
    server: ServerProcess, cancels: int, deadlines: int, cuts: int
) -> None:
    answer = _complete(server)
    asyncio.run(_vanish(server.target, 60, 60, 1, seed=1))  # pools grow to their size
    wait_until(server.is_at_rest, QUIET_S)
    before, aborted = footprint_at_rest(server), server.metric(ENDED, finished_reason="abort")
    asyncio.run(_vanish(server.target, cancels, deadlines, cuts, seed=2))
    assert_settles(server, before)
    # The streams that were cut and many of the others had reached the engine.
    assert (server.metric(ENDED, finished_reason="abort") - aborted) > cuts * STREAMS_OF_CUT // 2
    assert _complete(server) == answer


def _complete(server: ServerProcess) -> tuple[int, ...]:
    """Output ids of an ordinary request."""
    return tuple(server.stub.Generate(long_request(16), timeout=QUIET_S).outputs[0].token_ids)


async def _come(target: str, gate: asyncio.Semaphore) -> str:
    """One client with a connection of its own; returns the status that its call ends with."""
    request = pb.GenerateRequest(prompt="a", sampling=sampling(ignore_eos=True))
    host, _, port = target.rpartition(":")
    async with gate:
        reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http2.opening(target, STREAM, request.SerializeToString()))
    async for kind, flags, payload in _frames(reader, writer):
        if http2.ends_stream(kind, flags):
            status = http2.read_status(payload)
            break
    writer.close()
    return next(code.name for code in grpc.StatusCode if code.value[0] == status)


@pytest.mark.parametrize("size", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_crowd_is_refused(crowded: ServerProcess, size: int) -> None:
    """While all slots are taken, as many wait as may; the others are told so at once."""
    _touch_cache(crowded)
    answer = _complete(crowded)
    before, memory = footprint_at_rest(crowded), crowded.system.memory_info().rss
    queued, held = [0], [0]

    async def come() -> list[str]:
        gate = asyncio.Semaphore(CONNECTING)
        crowd = [asyncio.create_task(_come(crowded.target, gate)) for _ in range(size)]
        while (num_done := sum(client.done() for client in crowd)) < size:
            queued.append((await asyncio.to_thread(crowded.loads)).num_queued)
            held.append(crowded.system.memory_info().rss - memory)
            if num_done >= size - QUEUE:
                taken.close()  # all others are refused: those that wait may begin
            await asyncio.wait(crowd, timeout=0.1)
        return [client.result() for client in crowd]

    with ExitStack() as taken:
        for _ in range(NUM_SEQS):
            taken.enter_context(running(crowded.stub, long_request(LASTING)))
        ends = Counter(asyncio.run(asyncio.wait_for(come(), CROWD_TIMEOUT_S)))
    assert set(ends) == {"OK", "RESOURCE_EXHAUSTED"}
    assert ends["OK"] >= QUEUE == max(queued)
    assert max(held) < MEMORY_SLACK
    assert_settles(crowded, before)
    assert _complete(crowded) == answer


def _touch_cache(server: ServerProcess) -> None:
    """Fills every block once: the system allocates a page when it is first written, and this must
    not count as growth."""
    rng = random.Random(0)
    for _ in range(-(-2 * server.loads().num_total_blocks // (TOUCH_TOKENS // BLOCK_SIZE))):
        prompt = ids(*(rng.randrange(5, 500) for _ in range(TOUCH_TOKENS)))
        server.stub.Generate(long_request(1, prompt_token_ids=prompt), timeout=QUIET_S)


def _unread(server: ServerProcess) -> SilentReader:
    """A long stream with large messages."""
    params = sampling(max_tokens=UNREAD_TOKENS, ignore_eos=True, logprobs=20)
    request = pb.GenerateRequest(prompt="Once upon a time", sampling=params)
    return SilentReader(server.target, STREAM, request.SerializeToString())


@pytest.mark.parametrize("num_others", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_an_unread_stream_does_not_delay_others(server: ServerProcess, num_others: int) -> None:
    """It is made and its blocks are free while it is unread; others are answered meanwhile."""
    _touch_cache(server)
    answer = _complete(server)
    wait_until(server.is_at_rest, QUIET_S)
    before, memory = footprint_at_rest(server), server.system.memory_info().rss
    with ExitStack() as stack:
        silent = [stack.enter_context(_unread(server)) for _ in range(NUM_SILENT)]
        wait_until(lambda: server.loads().num_open_calls == NUM_SILENT, QUIET_S)
        wait_until(lambda: server.loads().num_running == 0, QUIET_S)  # all is made, nothing is read
        assert [_complete(server) for _ in range(num_others)] == [answer] * num_others
        held = server.system.memory_info().rss - memory
        assert [reader.num_data_bytes for reader in silent] == [0] * NUM_SILENT
        wait_until(lambda: (now := server.loads()).num_free_blocks == now.num_total_blocks, QUIET_S)
        for reader in silent:
            messages = [pb.GenerateResponse.FromString(data) for data in reader.read_all(QUIET_S)]
            tokens = [len(out.token_ids) for message in messages for out in message.outputs]
            assert sum(tokens) == UNREAD_TOKENS
            assert messages[-1].finished
            # Waiting outputs were merged: they take a few messages, not one per token.
            assert len(messages) < UNREAD_TOKENS / 4
    assert held < NUM_SILENT * MAX_HELD_BYTES
    assert_settles(server, before)
