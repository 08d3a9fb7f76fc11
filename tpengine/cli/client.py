"""Talks to a server that `tpengine serve` runs.

Examples:
  tpengine client generate 'Once upon a time' --temperature 0
  tpengine client embed 'A text'            # of a model that embeds
  tpengine client chat                      # a conversation; its --help lists the commands
  tpengine client health --target gpu3:50051
  tpengine client limits                    # of requests, calls and connections
  tpengine client load --rate 20 --num-requests 500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from tpengine import envs, errors
from tpengine.cli import conversation
from tpengine.cli.lines import Line, read_lines
from tpengine.cli.parser import add_sampling_options, given_sampling, in_words
from tpengine.client.client_messages import Prompt, Sampling
from tpengine.client.generation_client import GenerationClient
from tpengine.client.grpc_channel import ClientTLS
from tpengine.client.load import COMPLETE, describe_load, poisson_plan, run_load, summarise
from tpengine.host import streamed_text
from tpengine.options import Options, option
from tpengine.proto import LIVENESS, READINESS
from tpengine.server.auth import read_tokens

_TOKEN_HINT = "; give your token with --token-file FILE or in TPENGINE_CLIENT_TOKEN"

_Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the client's event loop."""
_Action = Callable[[argparse.Namespace, GenerationClient, _Run], int]


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
    OutputOptions.add_cli_args(generate)
    embed = add(
        "embed", "print the embedding of each text, as a line of JSON; null: there is none", _embed
    )
    for command in (generate, embed):
        command.add_argument(
            "prompts", nargs="*", metavar="PROMPT", help="its text; default: lines of stdin"
        )
    chat = add("chat", "hold a conversation by the model's chat template", _chat)
    conversation.add_arguments(chat)
    health = add("health", "ask whether the server is ready: exit code 0, else 1", _health)
    health.add_argument(
        "--liveness", action="store_true", help="ask whether it lives; it may still load its model"
    )
    add("limits", "print what the server allows a request and a client", _limits)
    load = add("load", "send requests at a rate, and print latencies and failures", _load)
    LoadOptions.add_cli_args(load)
    for command in (generate, chat, load):
        add_sampling_options(command)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen command; returns the exit code."""
    with asyncio.Runner() as runner:
        client = runner.run(open_client(args))
        try:
            return int(args.action(args, client, runner.run))
        except errors.UnauthenticatedError as error:
            raise errors.UnauthenticatedError(f"{error}{_TOKEN_HINT}") from error
        finally:
            runner.run(client.close())


async def open_client(args: argparse.Namespace) -> GenerationClient:
    """Makes the client of `args.target` and the connection options, in the event loop that it uses.

    Raises:
        ConfigError: a file cannot be read, or two options contradict each other.
    """
    options = ConnectionOptions.from_cli_args(args)
    options.check()
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    timeouts: dict[str, Any] = {}
    if options.timeout is not None:
        timeouts = {"timeout_s": options.timeout, "call_timeout_s": options.timeout}
    tls = ClientTLS(*files) if options.tls or any(files) else None
    return GenerationClient(args.target, token=_read_token(options.token_file), tls=tls, **timeouts)


def _read_token(path: str | None) -> str | None:
    if path is None:
        return envs.client_token()
    token, *others = read_tokens(path, None, "--token-file")
    if others:
        raise errors.ConfigError(
            f"--token-file {path} holds {1 + len(others)} tokens, and a client has one: give a "
            "file with that line alone; lines that begin with # do not count"
        )
    return token


def _generate(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    params = given_sampling(args) | {"n": args.n, "logprobs": args.logprobs}

    def serve(prompt: str) -> None:
        echo = prompt if args.echo else ""
        if args.n == 1 and args.logprobs is None:
            run(_print_stream(client, prompt, params, echo))
        else:
            run(_print_whole(client, prompt, params, echo))
        print("\n", flush=True)

    return _serve_each(args, serve)


def _embed(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    def serve(prompt: str) -> None:
        print(json.dumps(run(client.embed(prompt)).outputs.embedding), flush=True)

    return _serve_each(args, serve, lambda: print("null", flush=True))


def _serve_each(
    args: argparse.Namespace, serve: Callable[[str], None], skip: Callable[[], None] = lambda: None
) -> int:
    """Serves each prompt that was given; returns the exit code.

    Args:
        skip: called for each that is empty or fails.
    """
    failed = 0
    lines = [Line(1, prompt, "a prompt") for prompt in args.prompts]
    for line in lines or read_lines():
        if not line.text.strip():
            skip()
            continue
        try:
            serve(line.checked())
        except errors.RequestError as error:
            _print_failure(error)
            skip()
            failed += 1
    return 1 if failed else 0


def _chat(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    options = given_sampling(args)
    params = {"max_tokens": conversation.MAX_TOKENS} | options
    info = run(client.model_info())
    num_tokens = 0

    async def stream(messages: conversation.Messages, write: Callable[[str], None]) -> None:
        nonlocal num_tokens
        async for output in client.stream(messages, params):
            num_tokens += len(output.outputs[0].token_ids)
            write(output.outputs[0].text)

    talk = conversation.Conversation(
        info.max_model_len,
        params["max_tokens"],
        lambda messages: run(client.chat_token_ids(messages)),
        lambda messages, write: run(stream(messages, write)),
        lambda: num_tokens,
        args.system,
    )
    words = in_words(params, options, "the server's")
    title = f"{info.model}, {info.max_model_len} tokens; {words}"
    return conversation.converse(talk, title, args.message)


def _health(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    service = LIVENESS if args.liveness else READINESS
    try:
        status = run(client.health(service))
    except errors.ServerUnavailableError as error:
        _print_failure(error)
        return 1
    print(f"{service} {status}")
    return 0 if status == "SERVING" else 1


def _limits(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    fields = run(client.server_info()).limits.ListFields()
    width = max(len(field.name) for field, _ in fields)
    for field, value in fields:
        print(f"{field.name:{width}}  {value:>12,.10g}")
    return 0


def _load(args: argparse.Namespace, client: GenerationClient, run: _Run) -> int:
    if not args.rate > 0 or args.num_requests < 1:
        must = "--rate must be above 0 and --num-requests at least 1"
        raise errors.ConfigError(f"{must}, got {args.rate} and {args.num_requests}")
    params = given_sampling(args)
    plan = poisson_plan(args.rate, [(args.prompt, params)] * args.num_requests, args.load_seed)
    run(client.loads())  # fails before the clock runs if there is no server
    summary = summarise(*run(run_load(client, plan, args.timeout)))
    print(describe_load(summary))
    return 0 if summary.ends[COMPLETE] == args.num_requests else 1


async def _print_stream(
    client: GenerationClient, prompt: Prompt, params: Sampling, echo: str
) -> None:
    """Prints the text as it comes.

    Args:
        echo: printed before it, once the server has taken the request.
    """
    with streamed_text() as write:
        async for output in client.stream(prompt, params):
            write(echo)
            echo = ""
            for sequence in output.outputs:
                write(sequence.text)


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
                f"{'*' if one_id == token_id else ''}{c.decoded_token!r} {c.logprob:.3f}"
                for one_id, c in candidates.items()
            )
            print("   ", ", ".join(shown))


def _print_failure(error: errors.TPEngineError) -> None:
    hint = _TOKEN_HINT if isinstance(error, errors.UnauthenticatedError) else ""
    print(f"tpengine: {type(error).__name__}: {error}{hint}", file=sys.stderr)
