"""The `tpengine` command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from tpengine import __version__
from tpengine.cli.parser import CommandParser
from tpengine.errors import TPEngineError

COMMANDS = {
    "generate": "complete prompts, the text appearing as it is generated",
    "chat": "hold a conversation in the terminal, with the model in this process",
    "serve": "serve a model over gRPC and OpenAI's HTTP",
    "client": "talk to a server that `tpengine serve` runs",
}
BENCHMARKS = {
    "throughput": "output tokens/s of the whole engine on a mixed, seeded workload",
    "latency": "time per token by number of running sequences, against the memory bandwidth",
    "perplexity": "perplexity of bfloat16, int8, int4 and a small KV cache against float32",
    "serve": "latency against load over gRPC: first token, inter-token, goodput, a plot",
}
_SERVING_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "google")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `Line.checked` names the line
    parser = build_parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:  # the usage of the command helps, not that of `tpengine`
        getattr(args, "command", parser).refuse(unknown)
    try:
        return int(args.run(args))
    except TPEngineError as error:
        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def build_parser(words: Sequence[str]) -> CommandParser:
    """The parser for a command line, which may be incomplete. Only the command that it names is
    imported: all together would slow every command down."""
    parser = CommandParser(
        prog="tpengine",
        description="Runs large language models. Without --model every command uses the small\n"
        "trained model that is part of tpengine.",
        epilog="Begin with:  tpengine generate 'The capital of France is'\n"
        "Each command has its own --help, and each benchmark: tpengine bench latency --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tpengine {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if list(words[:1]) == [name]:
            _add_command(command, f"tpengine.cli.{name}")
    bench = commands.add_parser("bench", help="measure the engine on this machine")
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)
    for name, text in BENCHMARKS.items():
        command = benchmarks.add_parser(name, help=text)
        if list(words[:2]) == ["bench", name]:
            _add_command(command, f"tpengine.bench.{name}")
    return parser


def _add_command(command: CommandParser, module_name: str) -> None:
    """Imports a command's module, which declares its options. Its docstring is the text of
    `--help`, from the examples on below the options."""
    try:
        module: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:  # grpc is an optional dependency
        if (error.name or "").partition(".")[0] not in _SERVING_PACKAGES:
            raise
        raise SystemExit(f"{error}; to serve, install tpengine with its extra serve") from None
    command.description, title, examples = (module.__doc__ or "").partition("Examples:\n")
    command.epilog = title + examples
    command.set_defaults(run=module.run, command=command)
    module.add_arguments(command)
