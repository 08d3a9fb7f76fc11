"""What valid but costly requests cost the other clients of one server, over gRPC and HTTP.

Four clients read streams while another client repeats one request: first without its costly part,
then with it. The ratio of their tokens per second shows what the costly part alone costs them.
Rounds alternate which comes first. The goal is a ratio of at least 0.5.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import shlex
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from support.server_process import ServerProcess

import tpengine
from benchmarks.common import add_numbers, alternate
from benchmarks.door_load import METHOD, TIMEOUT_S, Load, over_http, run_streams
from tpengine.bench.harness import report_head
from tpengine.proto import tpengine_pb2 as pb

GOAL = 0.5
_OTHERS = 4
_PROMPT_TOKENS = 16
_VOCAB = 500
_HEAD_START_S = 3.0
"""Longest wait for the first part of the costly answer."""
_END_S = 0.5
_LEAD_S, _LONGER = 0.1, 2
"""Where the other clients begin first: by how much, and how many times longer their streams are."""
_HUGE = (("grpc.max_receive_message_length", -1),)


@dataclass(frozen=True)
class Attack:
    """A request with and without its costly part.

    Attributes:
        plain, costly: fields of the sampling parameters, as both doors name them.
        plain_prompt, costly_prompt: ids of the prompt, or a number of empty messages.
        is_refused: whether the server refuses the request, with and without its costly part.
        num_costly: costly requests that are open at once. If several, the other clients begin
            first: what counts is what those that wait cost those that run.
    """

    name: str
    plain: dict[str, Any]
    costly: dict[str, Any]
    plain_prompt: list[int] | int = field(default_factory=lambda: _PROMPT_TOKENS * [5])
    costly_prompt: list[int] | int = field(default_factory=lambda: _PROMPT_TOKENS * [5])
    is_refused: bool = False
    num_costly: int = 1


def attacks(num_sequences: int, max_bytes: int) -> list[Attack]:
    """The requests, each for so many sequences, in messages of so many bytes."""
    many = {"n": num_sequences, "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
    beams = {
        "n": num_sequences, "max_tokens": 900, "use_beam_search": True, "temperature": 0.0,
        "ignore_eos": True, "early_stopping": "EARLY_STOPPING_NEVER",
    }  # fmt: skip
    rng = random.Random(0)
    long = [rng.randrange(5, _VOCAB) for _ in range(1100)]
    words = ["".join(rng.choices("etaoin shrdlu", k=size)).strip() + "x" for size in range(2, 360)]
    # The text is one letter again and again, and each stop differs only at its end.
    stops = [400 * "a" + 10 * index * "a" + "b" for index in range(60)]
    repeat = {**many, "allowed_token_ids": [_letter_a()]}
    bias = {str(token_id): 1.0 for token_id in range(5, 1505)}
    return [
        Attack("bad words", many, {**many, "bad_words": words}, long, long),
        Attack("stop strings", repeat, {**repeat, "stop": stops}),
        Attack("beams with stop ids", beams, {**beams, "stop_token_ids": list(range(100, 111))}),
        Attack("bias", many, {**many, "logit_bias": bias}),
        Attack("ids", {}, {}, 3000 * [5], (max_bytes // 2 - 99) * [5], True),
        Attack("messages", {}, {}, 5000, max_bytes // 3 - 99, True),
        Attack("waiting", many, many, long, long, num_costly=240),
    ]


def _letter_a() -> int:
    from transformers import AutoTokenizer

    folder = Path(tpengine.__file__).parent / "assets" / "embedded"
    return int(AutoTokenizer.from_pretrained(folder).encode("a")[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--only", help="names of attacks, separated by commas; default: all")
    parser.add_argument("--doors", default="gRPC,HTTP", help="default: %(default)s")
    parser.add_argument(
        "--server", default="--dtype float32", help="options of the server (default: %(default)s)"
    )
    add_numbers(
        parser,
        sequences=(128, "sequences of the costly request"),
        output_tokens=(128, "tokens that each other client reads"),
        rounds=(3, "median of these"),
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    options = ("--http-port", "0", "--disable-log-requests", *shlex.split(args.server))
    with (
        tempfile.TemporaryDirectory() as logs,
        multiprocessing.get_context("spawn").Pool(1) as clients,
        ServerProcess(*options, log=Path(logs) / "log") as server,
    ):
        addresses = {"gRPC": server.target, "HTTP": server.http_address.removeprefix("http://")}
        limits = server.stub.GetServerInfo(pb.GetServerInfoRequest()).limits
        chosen = attacks(args.sequences, limits.max_message_bytes)
        if args.only:
            chosen = [one for one in chosen if one.name in args.only.split(",")]
        print(report_head(None, {"work": f"{_OTHERS} clients, embedded", "server": args.server}))
        for attack in chosen:
            for door in args.doors.split(","):
                load = Load(
                    door, addresses[door], _OTHERS, _PROMPT_TOKENS, args.output_tokens, _VOCAB
                )

                def measure(
                    is_costly: bool, _: int, load: Load = load, own: Attack = attack
                ) -> float:
                    return float(clients.apply(run_beside, (load, own, is_costly)))

                rates = alternate((False, True), args.rounds, measure)
                print(_line(door, attack.name, rates), flush=True)
                held = server.resident_bytes() >> 20
                print(f"    the server holds {held} MiB", flush=True)
    return 0


def _line(door: str, name: str, rates: dict[bool, list[float]]) -> str:
    plain, costly = (statistics.median(rates[is_costly]) for is_costly in (False, True))
    pairs = zip(rates[True], rates[False], strict=True)
    ratio = statistics.median(beside / without for beside, without in pairs)
    verdict = "holds" if ratio >= GOAL else "MISSES THE GOAL"
    return (
        f"{name} over {door}: others {plain:.1f} tokens/s during the plain request, "
        f"{costly:.1f} during the costly one; ratio {ratio:.2f} ({verdict})"
    )


def run_beside(load: Load, attack: Attack, is_costly: bool) -> float:
    """Tokens/s of a load beside an attack."""
    return asyncio.run(asyncio.wait_for(_run_beside(load, attack, is_costly), TIMEOUT_S))


async def _run_beside(load: Load, attack: Attack, is_costly: bool) -> float:
    prompt = attack.costly_prompt if is_costly else attack.plain_prompt
    fields = attack.costly if is_costly else attack.plain
    repeat = _repeat_grpc if load.door == "gRPC" else _repeat_http
    count = attack.num_costly if is_costly else 1
    if attack.num_costly > 1:
        load = dataclasses.replace(load, num_output=_LONGER * load.num_output)
        streams = asyncio.create_task(run_streams(load))
        await asyncio.sleep(_LEAD_S)
        async with repeat(load.address, prompt, fields, attack.is_refused, count):
            result = await streams
        await asyncio.sleep(_END_S)
        return load.num_streams * load.num_output / result.elapsed_s
    async with repeat(load.address, prompt, fields, attack.is_refused, count) as begun:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(begun.wait(), _HEAD_START_S)
        result = await run_streams(load)
    await asyncio.sleep(_END_S)  # the server ends the request
    return load.num_streams * load.num_output / result.elapsed_s


@contextlib.asynccontextmanager
async def _repeating(
    once: Callable[[asyncio.Event], Any], count: int
) -> AsyncIterator[asyncio.Event]:
    """Repeats so many calls at once while the context is open; the event is set when an answer
    begins."""
    begun = asyncio.Event()

    async def repeat() -> None:
        while True:
            await once(begun)
            begun.set()
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(repeat()) for _ in range(count)]
    yield begun
    for task in tasks:
        assert not task.done(), f"the attack has ended: {task.exception()}"
        task.cancel()
    await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def _repeat_grpc(
    address: str, prompt: list[int] | int, fields: dict[str, Any], is_refused: bool, count: int
) -> AsyncIterator[asyncio.Event]:
    if isinstance(prompt, int):
        data = _empty_messages(prompt)
    else:
        sampling = dict(fields)
        if "allowed_token_ids" in sampling:
            sampling["allowed_token_ids"] = {"ids": sampling["allowed_token_ids"]}
        message = {"prompt_token_ids": {"ids": prompt}, "sampling": sampling}
        data = ParseDict(message, pb.GenerateRequest()).SerializeToString()
    async with grpc.aio.insecure_channel(address, options=_HUGE) as channel:
        method = channel.unary_stream(METHOD)

        async def once(begun: asyncio.Event) -> None:
            try:
                async for _ in method(data):
                    begun.set()
            except grpc.aio.AioRpcError:
                if not is_refused:
                    raise

        async with _repeating(once, count) as begun:
            yield begun


def _empty_messages(count: int) -> bytes:
    """A request of so many messages without a field; this process need not hold them."""
    size = 2 * count
    head = pb.GenerateRequest(prompt=size * "x").SerializeToString()[:-size]
    assert head[:1] == b"\x12"  # the number of `prompt`; that of `messages` is 4
    return b"\x22" + head[1:] + b"\n\0" * count


@contextlib.asynccontextmanager
async def _repeat_http(
    address: str, prompt: list[int] | int, fields: dict[str, Any], is_refused: bool, count: int
) -> AsyncIterator[asyncio.Event]:
    if isinstance(prompt, int):
        data = over_http("/v1/chat/completions", {"messages": [{}] * prompt})
    else:
        # A search gives its beams at the end, which a stream of HTTP does not wait for.
        fields = {**fields, "stream": not fields.get("use_beam_search")}
        if not fields["stream"]:
            fields["early_stopping"] = "never"
        data = over_http("/v1/completions", {**fields, "prompt": prompt})
    host, _, port = address.rpartition(":")

    async def once(begun: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):  # a refusal may come before all is sent
                answer = await reader.read(1 << 16)
                assert answer.startswith(b"HTTP/1.1 200") != is_refused, answer[:500]
                begun.set()
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.close()

    async with _repeating(once, count) as begun:
        yield begun
