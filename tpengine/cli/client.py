"""Talks to a server that `tpengine serve` runs."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial

from tpengine import envs
from tpengine.cli.client_input import read_lines
from tpengine.client.channel import ClientTLS
from tpengine.client.convert import Message, Prompt
from tpengine.client.generation_client import GenerationClient
from tpengine.client.load import COMPLETE, describe_load, poisson_plan, run_load, summarise
from tpengine.errors import (
    ConfigError,
    RequestError,
    ServerUnavailableError,
    UnauthenticatedError,
)
from tpengine.host import streamed_text
from tpengine.sampling_arguments import add_sampling_arguments, sampling_params_from
from tpengine.sampling_params import SamplingParams
from tpengine.server.auth import read_tokens
from tpengine.server.grpc.proto import LIVENESS, READINESS

DEFAULT_TARGET = "127.0.0.1:50051"
_TOKEN_HINT = "; give your token with --token-file FILE or in TPENGINE_CLIENT_TOKEN"
_SEED_DEFAULT = "from the server's seed and the number of the request; a repeat differs"
_Action = Callable[[argparse.Namespace, GenerationClient], Awaitable[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `tpengine client`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.epilog = (
        "Examples:\n"
        "  tpengine client generate 'Once upon a time' --temperature 0\n"
        "  tpengine client chat                      # a conversation, one message a line\n"
        "  tpengine client health --target gpu3:50051\n"
        "  tpengine client load --rate 20 --num-requests 500"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate = _add_command(
        commands, "generate", "complete prompts, the text appearing as it is generated", _generate
    )
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to complete; default: lines of stdin"
    )
    generate.add_argument("--no-echo", action="store_true", help="print only what is generated")
    generate.add_argument(
        "--n",
        type=int,
        default=1,
        help="sequences per prompt, printed when complete if several (default: %(default)s)",
    )
    generate.add_argument(
        "--logprobs",
        type=int,
        metavar="NUM",
        help="print each token's log probability, and the NUM most likely ones; default: none",
    )
    add_sampling_arguments(generate, _SEED_DEFAULT)
    chat = _add_command(commands, "chat", "hold a conversation by the model's chat template", _chat)
    chat.add_argument(
        "message",
        nargs="*",
        metavar="WORD",
        help="of one message; default: each line of stdin is one",
    )
    add_sampling_arguments(chat, _SEED_DEFAULT)
    health = _add_command(
        commands, "health", "ask whether the server is ready: exit code 0, else 1", _health
    )
    health.add_argument(
        "--liveness", action="store_true", help="ask whether it lives; it may still load its model"
    )
    _add_load(commands)


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_text: str,
    action: _Action,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
    parser.set_defaults(run=partial(_run, action), command=parser)
    add_connection_arguments(parser)
    return parser


def add_connection_arguments(
    parser: argparse.ArgumentParser, without_target: str | None = None
) -> None:
    """Adds what is needed to reach a server.

    Args:
        without_target: what is done without --target, for `--help`; None: it has its default.
    """
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=DEFAULT_TARGET if without_target is None else None,
        help="the server; default: %(default)s"
        if without_target is None
        else f"the server; default: {without_target}",
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="until a call is given up (default: 600 for one that generates, 10 for any other)",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the bearer token in a line; default: $TPENGINE_CLIENT_TOKEN, or none",
    )
    group.add_argument(
        "--tls", action="store_true", help="encrypt; the system's authorities are trusted"
    )
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt, and trust these (PEM)")
    group.add_argument("--tls-cert", metavar="FILE", help="the client's own certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")


def open_client(args: argparse.Namespace) -> GenerationClient:
    """The client that the options describe; to be called in the event loop that uses it.

    Raises:
        ConfigError: a file cannot be read, or an option does not go with another.
    """
    files = (args.tls_ca, args.tls_cert, args.tls_key)
    encrypted = args.tls or any(path is not None for path in files)
    timeouts = {}
    if args.timeout is not None:
        if not 0 < args.timeout < math.inf:
            raise ConfigError(f"--timeout must be a positive number of seconds, got {args.timeout}")
        timeouts = {"timeout_s": args.timeout, "call_timeout_s": args.timeout}
    return GenerationClient(
        args.target,
        token=_read_token(args.token_file),
        tls=ClientTLS(*files) if encrypted else None,
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


def _run(action: _Action, args: argparse.Namespace) -> int:
    async def connected() -> int:
        async with open_client(args) as client:
            return await action(args, client)

    try:
        return asyncio.run(connected())
    except UnauthenticatedError as error:
        raise UnauthenticatedError(f"{error}{_TOKEN_HINT}") from error


async def _generate(args: argparse.Namespace, client: GenerationClient) -> int:
    failed = 0
    params = replace(sampling_params_from(args), n=args.n, logprobs=args.logprobs)
    async for prompt in _given(args.prompts) if args.prompts else read_lines():
        echo = "" if args.no_echo else prompt
        if args.n == 1 and args.logprobs is None:
            text = await _print_stream(client, prompt, params, echo)
        else:
            text = await _print_whole(client, prompt, params, echo)
        if text is None:
            failed += 1
        else:
            print("\n", flush=True)
    return 1 if failed else 0


async def _print_whole(
    client: GenerationClient, prompt: Prompt, params: SamplingParams, echo: str
) -> str | None:
    """Prints all sequences, one after the other; None when the request failed."""
    try:
        output = await client.generate(prompt, params)
    except RequestError as error:
        _print_failure(error)
        return None
    for sequence in output.outputs:
        number = f"[{sequence.index}] " if len(output.outputs) > 1 else ""
        print(f"{number}{echo}{sequence.text}")
        for token_id, candidates in zip(sequence.token_ids, sequence.logprobs or (), strict=False):
            shown = (
                f"{'*' if one_id == token_id else ''}{one.decoded_token!r} {one.logprob:.3f}"
                for one_id, one in candidates.items()
            )
            print("   ", ", ".join(shown))
    return "".join(sequence.text for sequence in output.outputs)


def _print_failure(error: RequestError) -> None:
    hint = _TOKEN_HINT if isinstance(error, UnauthenticatedError) else ""
    print(f"tpengine: {type(error).__name__}: {error}{hint}", file=sys.stderr)


async def _chat(args: argparse.Namespace, client: GenerationClient) -> int:
    conversation: list[Message] = []
    failed = 0
    one = _given([" ".join(args.message)])
    async for line in one if args.message else read_lines("> "):
        conversation.append({"role": "user", "content": line})
        answer = await _print_stream(client, conversation, sampling_params_from(args))
        print(flush=True)
        if answer is None:
            conversation.pop()
            failed += 1
        else:
            conversation.append({"role": "assistant", "content": answer})
    return 1 if failed else 0


async def _given(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def _print_stream(
    client: GenerationClient, prompt: Prompt, params: SamplingParams, echo: str = ""
) -> str | None:
    """Prints the text as it comes; returns it, or None when the request failed.

    Args:
        echo: printed before it, once the server has taken the request.
    """
    texts: list[str] = []
    try:
        with streamed_text() as write:
            async for output in client.stream(prompt, params):
                if echo:
                    write(echo)
                    echo = ""
                for sequence in output.outputs:
                    texts.append(sequence.text)
                    write(sequence.text)
    except RequestError as error:
        _print_failure(error)
        return None
    return "".join(texts)


async def _health(args: argparse.Namespace, client: GenerationClient) -> int:
    service = LIVENESS if args.liveness else READINESS
    try:
        status = await client.health(service)
    except ServerUnavailableError as error:
        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{service} {status}")
    return 0 if status == "SERVING" else 1


def _add_load(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "load", "send requests at a rate, and say how they fared", _load
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=math.inf,
        help="mean requests/s of a Poisson process; inf: all at once (default: %(default)s)",
    )
    parser.add_argument(
        "--num-requests", type=int, default=100, help="how many to send (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", default="Once upon a time", help="of every request (default: %(default)r)"
    )
    parser.add_argument(
        "--load-seed", type=int, default=0, help="fixes when they arrive (default: %(default)s)"
    )
    add_sampling_arguments(parser, _SEED_DEFAULT)


async def _load(args: argparse.Namespace, client: GenerationClient) -> int:
    if not args.rate > 0 or args.num_requests < 1:
        raise ConfigError(
            "--rate must be above 0 and --num-requests at least 1, got "
            f"{args.rate} and {args.num_requests}"
        )
    params = sampling_params_from(args)
    plan = poisson_plan(args.rate, [(args.prompt, params)] * args.num_requests, args.load_seed)
    await client.loads()  # that the server is there is found out before the clock runs
    summary = summarise(*await run_load(client, plan, args.timeout))
    print(describe_load(summary))
    return 0 if summary.ends[COMPLETE] == args.num_requests else 1
