"""Talks to a server that `tpengine serve` runs."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpengine import envs
from tpengine.cli.parser import SamplingOptions
from tpengine.client.channel import ClientTLS
from tpengine.client.convert import Message, Prompt, Sampling
from tpengine.client.generation_client import GenerationClient
from tpengine.client.load import COMPLETE, describe_load, poisson_plan, run_load, summarise
from tpengine.errors import (
    ConfigError,
    RequestError,
    ServerUnavailableError,
    TPEngineError,
    UnauthenticatedError,
)
from tpengine.host import streamed_text
from tpengine.options import Options, option
from tpengine.server.auth import read_tokens
from tpengine.server.grpc.proto import LIVENESS, READINESS

EPILOG = """\
Examples:
  tpengine client generate 'Once upon a time' --temperature 0
  tpengine client chat                      # a conversation, one message a line
  tpengine client health --target gpu3:50051
  tpengine client load --rate 20 --num-requests 500
"""
_TOKEN_HINT = "; give your token with --token-file FILE or in TPENGINE_CLIENT_TOKEN"
_CHUNK_BYTES = 1 << 16

_Action = Callable[[argparse.Namespace, GenerationClient], Awaitable[int]]


@dataclass
class ConnectionOptions(Options):
    """How a client connects to its server."""

    group: ClassVar[str] = "connection"

    timeout: float | None = option(None, more_than=0, unit=" seconds", metavar="SECONDS")
    """Time limit of a call; default: 600 for one that generates, 10 for any other."""
    token_file: str | None = option(None, metavar="FILE")
    """File with the bearer token in one line; default: $TPENGINE_CLIENT_TOKEN, or no token."""
    tls: bool = option(False)
    """Encrypt, and trust the authorities that the system trusts."""
    tls_ca: str | None = option(None, metavar="FILE")
    """Encrypt, and trust the authorities in this PEM file."""
    tls_cert: str | None = option(None, metavar="FILE")
    """PEM file of the client's own certificate."""
    tls_key: str | None = option(None, metavar="FILE")
    """PEM file of its key."""


@dataclass
class TargetOptions(ConnectionOptions):
    """Which server, and how to connect to it."""

    target: str = option("127.0.0.1:50051", metavar="HOST:PORT")
    """The server."""


@dataclass
class OutputOptions(Options):
    """What `client generate` prints for each prompt."""

    group: ClassVar[str] = "output"

    echo: bool = option(True)
    """Print the prompt before its output."""
    n: int = option(1)
    """Sequences per prompt; more than one are printed when complete."""
    logprobs: int | None = option(None, metavar="NUM")
    """Print each token's log probability and the NUM most likely tokens; default: neither."""


@dataclass
class LoadOptions(Options):
    """Which requests are sent, and when."""

    group: ClassVar[str] = "load"

    rate: float = option(math.inf)
    """Mean requests/s of a Poisson process; inf sends all at once."""
    num_requests: int = option(100)
    """Requests to send."""
    prompt: str = option("Once upon a time", metavar="TEXT")
    """Prompt of every request."""
    load_seed: int = option(0)
    """Fixes when the requests arrive."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `tpengine client`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str, action: _Action) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        command.set_defaults(action=action, command=command)
        TargetOptions.add_cli_args(command)
        return command

    generate = add("generate", "complete prompts, the text appearing as it is generated", _generate)
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to complete; default: lines of stdin"
    )
    OutputOptions.add_cli_args(generate)
    chat = add("chat", "hold a conversation by the model's chat template", _chat)
    chat.add_argument(
        "message",
        nargs="*",
        metavar="WORD",
        help="words of one message; default: each line of stdin is one",
    )
    health = add("health", "ask whether the server is ready: exit code 0, else 1", _health)
    health.add_argument(
        "--liveness", action="store_true", help="ask whether it lives; it may still load its model"
    )
    load = add("load", "send requests at a rate, and print latencies and failures", _load)
    LoadOptions.add_cli_args(load)
    for command in (generate, chat, load):
        SamplingOptions.add_cli_args(command)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen command; returns the exit code."""

    async def connected() -> int:
        async with open_client(args) as client:
            action: _Action = args.action
            return await action(args, client)

    try:
        return asyncio.run(connected())
    except UnauthenticatedError as error:
        raise UnauthenticatedError(f"{error}{_TOKEN_HINT}") from error


def open_client(args: argparse.Namespace) -> GenerationClient:
    """Makes the client of `args.target` and the connection options; call it in its event loop.

    Raises:
        ConfigError: a file cannot be read, or two options contradict each other.
    """
    options = ConnectionOptions.from_cli_args(args)
    options.check()
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    timeouts: dict[str, Any] = {}
    if options.timeout is not None:
        timeouts = {"timeout_s": options.timeout, "call_timeout_s": options.timeout}
    return GenerationClient(
        args.target,
        token=_read_token(options.token_file),
        tls=ClientTLS(*files) if options.tls or any(files) else None,
        **timeouts,
    )


def _read_token(path: str | None) -> str | None:
    if path is None:
        return envs.client_token()
    token, *others = read_tokens(path, None, "--token-file")
    if others:
        raise ConfigError(
            f"--token-file {path} holds {1 + len(others)} tokens, and a client has one: give a "
            "file with that line alone; lines that begin with # do not count"
        )
    return token


async def _generate(args: argparse.Namespace, client: GenerationClient) -> int:
    failed = 0
    params = SamplingOptions.from_cli_args(args).given()
    params |= {"n": args.n, "logprobs": args.logprobs}
    async for prompt in _lines(args.prompts):
        echo = prompt if args.echo else ""
        try:
            if args.n == 1 and args.logprobs is None:
                await _print_stream(client, prompt, params, echo)
            else:
                await _print_whole(client, prompt, params, echo)
            print("\n", flush=True)
        except RequestError as error:
            _print_failure(error)
            failed += 1
    return 1 if failed else 0


async def _chat(args: argparse.Namespace, client: GenerationClient) -> int:
    conversation: list[Message] = []
    failed = 0
    params = SamplingOptions.from_cli_args(args).given()
    message = [" ".join(args.message)] if args.message else []
    async for line in _lines(message, "> "):
        conversation.append({"role": "user", "content": line})
        try:
            answer = await _print_stream(client, conversation, params)
            conversation.append({"role": "assistant", "content": answer})
        except RequestError as error:
            _print_failure(error)
            conversation.pop()
            failed += 1
        print(flush=True)
    return 1 if failed else 0


async def _health(args: argparse.Namespace, client: GenerationClient) -> int:
    service = LIVENESS if args.liveness else READINESS
    try:
        status = await client.health(service)
    except ServerUnavailableError as error:
        _print_failure(error)
        return 1
    print(f"{service} {status}")
    return 0 if status == "SERVING" else 1


async def _load(args: argparse.Namespace, client: GenerationClient) -> int:
    if not args.rate > 0 or args.num_requests < 1:
        raise ConfigError(
            "--rate must be above 0 and --num-requests at least 1, got "
            f"{args.rate} and {args.num_requests}"
        )
    params = SamplingOptions.from_cli_args(args).given()
    plan = poisson_plan(args.rate, [(args.prompt, params)] * args.num_requests, args.load_seed)
    await client.loads()  # fails before the clock runs if there is no server
    summary = summarise(*await run_load(client, plan, args.timeout))
    print(describe_load(summary))
    return 0 if summary.ends[COMPLETE] == args.num_requests else 1


async def _print_stream(
    client: GenerationClient, prompt: Prompt, params: Sampling, echo: str = ""
) -> str:
    """Prints the text as it comes; returns it.

    Args:
        echo: printed before it, once the server has taken the request.
    """
    texts: list[str] = []
    with streamed_text() as write:
        async for output in client.stream(prompt, params):
            write(echo)
            echo = ""
            for sequence in output.outputs:
                texts.append(sequence.text)
                write(sequence.text)
    return "".join(texts)


async def _print_whole(
    client: GenerationClient, prompt: Prompt, params: Sampling, echo: str
) -> None:
    """Prints all sequences when they are complete, with their log probabilities."""
    output = await client.generate(prompt, params)
    for sequence in output.outputs:
        number = f"[{sequence.index}] " if len(output.outputs) > 1 else ""
        print(f"{number}{echo}{sequence.text}")
        for token_id, candidates in zip(sequence.token_ids, sequence.logprobs or (), strict=False):
            shown = (
                f"{'*' if one_id == token_id else ''}{one.decoded_token!r} {one.logprob:.3f}"
                for one_id, one in candidates.items()
            )
            print("   ", ", ".join(shown))


def _print_failure(error: TPEngineError) -> None:
    hint = _TOKEN_HINT if isinstance(error, UnauthenticatedError) else ""
    print(f"tpengine: {type(error).__name__}: {error}{hint}", file=sys.stderr)


async def _lines(given: Sequence[str], invitation: str = "") -> AsyncIterator[str]:
    """Yields the given lines, or without any those of standard input that are not blank.

    `sys.stdin.readline` would block the event loop, and Ctrl-C, which asyncio turns into a
    cancelled task, would have no effect before the next line.

    Args:
        invitation: printed before each line at a terminal.

    Raises:
        ConfigError: standard input cannot be read.
    """
    for line in given:
        yield line
    if given or sys.stdin is None:  # it was closed when Python started
        return
    left, at_end = b"", False
    while not at_end:
        with streamed_text() as write:
            if sys.stdin.isatty():
                write(invitation)
            while b"\n" not in left and not at_end:
                more = await _read_stdin()
                left, at_end = left + more, not more
            if at_end and invitation and sys.stdin.isatty():
                write("\n")
        first, _, left = left.partition(b"\n")
        # Invalid bytes become characters that the server refuses, for this line alone.
        text = first.removesuffix(b"\r").decode(sys.stdin.encoding, "surrogateescape")
        if text.strip():
            yield text


async def _read_stdin() -> bytes:
    """Reads the bytes that are there; empty at the end. It waits for a person, without a limit."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = sys.stdin.fileno()
        try:
            loop.add_reader(descriptor, readable.set)
        except PermissionError:  # epoll refuses files, which never block
            return os.read(descriptor, _CHUNK_BYTES)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
        return os.read(descriptor, _CHUNK_BYTES)
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error}") from error
