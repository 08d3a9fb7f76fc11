"""Many clients, each with its own connection, that arrive at a rate however slow the answers are:
`crowd.py TARGET COUNT RATE SEED PROMPT_TOKENS`.

At most `CONNECTING` of them connect at a time. Prints JSON: the seconds that all took, and one
entry a client with the status that its call ended with, the seconds from its call to its end, its
priority, and its seconds in the queue. They cost a fraction of what a gRPC library's clients would,
so that what is measured is the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import grpc
from support import http2

from tpengine.proto import tpengine_pb2 as pb

CONNECTING = 64
PRIORITIES = (-5, 5)
TIMEOUT_S = 120.0
METHOD = "/tpengine.v1.GenerationService/GenerateStream"
NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


async def come(
    target: str, gate: asyncio.Semaphore, due: float, rng: random.Random, num_tokens: int
) -> list[object]:
    """One client; returns [status, seconds, priority, seconds in the queue or None]."""
    priority = rng.choice(PRIORITIES)
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[rng.randrange(5, 500) for _ in range(num_tokens)]),
        sampling=pb.SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0),
        priority=priority,
    )
    words = http2.opening(target, METHOD, request.SerializeToString())
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    host, _, port = target.rpartition(":")
    async with gate:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), TIMEOUT_S)
    begin = time.perf_counter()
    try:
        writer.write(words)
        status, data = await asyncio.wait_for(_read(reader, writer), TIMEOUT_S)
        seconds = time.perf_counter() - begin
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        return [type(error).__name__, time.perf_counter() - begin, priority, None]
    finally:
        writer.close()
    queue_s = None
    for message in http2.messages(data):
        queue_s = pb.GenerateResponse.FromString(message).usage.queue_s
    return [NAMES.get(status, f"{status}"), seconds, priority, queue_s]


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int | None, bytes]:
    """The call's status (None: the stream ended without one) and its data."""
    status, data = None, b""
    while True:
        length, kind, flags = http2.read_head(await reader.readexactly(http2.HEAD_BYTES))
        payload = await reader.readexactly(length)
        writer.write(http2.reply(kind, flags, payload))
        if kind == http2.HEADERS:
            status = http2.read_status(payload)
        elif kind == http2.DATA:
            data += payload
        if http2.ends_stream(kind, flags):
            return status, data


async def main(target: str, count: int, rate: float, seed: int, num_tokens: int) -> None:
    """Runs all clients, and waits for the last one."""
    rng, gate = random.Random(seed), asyncio.Semaphore(CONNECTING)
    start = time.perf_counter()
    clients = [
        come(target, gate, start + number / rate, random.Random(rng.random()), num_tokens)
        for number in range(count)
    ]
    ends = await asyncio.gather(*clients)
    print(json.dumps({"elapsed_s": time.perf_counter() - start, "ends": ends}), flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    asyncio.run(main(words[0], int(words[1]), float(words[2]), int(words[3]), int(words[4])))
