"""The `tpengine` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpengine import __version__
from tpengine.cli.parser import CommandParser
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineDeadError, TPEngineError, counted
from tpengine.host import signals_end_at_once, sigterm_as_interrupt, streamed_text
from tpengine.sampling_arguments import add_sampling_arguments, sampling_params_from
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tpengine.llm import LLM

_BENCHMARKS = {
    "throughput": "output tokens/s of the whole engine on a mixed, seeded workload",
    "latency": "time per token by number of running sequences, against the bandwidth floor",
    "kernels": "the kernels of CPU or GPU: bytes and operations per second",
    "perplexity": "what bfloat16 and int8 cost in quality",
    "scheduler": "time of schedule + update with many running and waiting requests",
    "groups": "one request with n sequences against n separate requests",
    "prefix": "what prefix caching brings and costs",
    "swap": "time to swap a preempted sequence, and to compute it again",
    "serve": "latency against load over gRPC: first token, inter-token, goodput, a plot",
    "collectives": "all-reduce of CPU ranks over shared memory, beside gloo",
    "sampler": "time of each stage of sampling: penalties, biases, bans, log probabilities",
    "ranks": "two ranks of one thread against one process of two; and how ranks start, by phase",
    "recovery": "kills of ranks: found after, ready after, longest gap on a stream; with spares",
    "streams": "what streams cost the engine: its step with many readers, against offline",
    "visit": "everything that a GPU is wanted for, in one go of under ten minutes",
    "transport": "a step without a model, driver to Ray actors and back, beside Ray's own ways",
}
_SERVING = {
    "serve": ("tpengine.cli.serve", "serve a model over gRPC"),
    "client": ("tpengine.cli.client", "talk to a server that `tpengine serve` runs"),
}
_DEFAULT_PROMPT = "Hello, my name is"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _build_parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:  # the command's own usage helps, not that of `tpengine`
        getattr(args, "command", parser).refuse(unknown)
    try:
        return int(args.run(args))
    except TPEngineError as error:
        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _build_parser(words: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        prog="tpengine",
        description="Runs large language models. Without a model's name every command uses\n"
        "the small trained one that tpengine carries.",
        epilog="Begin with:  tpengine generate 'The capital of France is'\n"
        "Each command has its own --help, and each benchmark: tpengine bench latency --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tpengine {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    for name, (home, help_text) in _SERVING.items():
        command = commands.add_parser(name, help=help_text)
        if list(words[:1]) == [name]:
            _import_serving(home).add_arguments(command)
            command.set_defaults(command=command)
    bench = commands.add_parser("bench", help="measure the engine on this machine")
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)
    for name, help_text in _BENCHMARKS.items():
        command = benchmarks.add_parser(name, help=help_text)
        if list(words[:2]) == ["bench", name]:  # importing them all would slow every command
            module = _import_serving(f"tpengine.bench.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run, command=command)
    return parser


def _import_serving(home: str) -> Any:
    """The module of a command that may need grpc, which is no dependency of the rest."""
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (
            "grpc",
            "grpc_health",
            "grpc_reflection",
            "google",
        ):
            raise
        raise SystemExit(f"{error}; serving needs: pip install 'tpengine[serve]'") from None


def _add_generate(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "generate",
        help="complete prompts, the text appearing as it is generated",
        description="Completes prompts: those given as arguments, or each line of a file or of\n"
        "standard input, or a small example when there are none.",
        epilog="Examples:\n"
        "  tpengine generate 'Once upon a time' --temperature 0\n"
        "  tpengine generate --chat 'What is the capital of France?'\n"
        "  tpengine generate --file prompts.txt --model FOLDER",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    command.add_argument("--file", metavar="FILE", help="one prompt per line; - is standard input")
    command.add_argument(
        "--chat",
        action="store_true",
        help="answer prompts as messages, by the model's chat template",
    )
    add_sampling_arguments(
        command, "from the engine's seed and the prompt's number, so that a run repeats"
    )
    EngineArgs.add_cli_args(command)
    command.set_defaults(run=_generate, command=command)


def _generate(args: argparse.Namespace) -> int:
    params = sampling_params_from(args)
    with sigterm_as_interrupt():
        return _complete(args, _read_prompts(args), params)


def _complete(args: argparse.Namespace, prompts: Sequence[str], params: SamplingParams) -> int:
    """Completes the prompts in turn; returns the exit code. Whoever interrupts it, also while the
    model is loaded, is told how far it has come."""
    finished = failed = 0

    def progress() -> str:
        others = f", {failed} failed" if failed else ""
        of_all = f"{finished} of {counted(len(prompts), 'prompt')} finished"
        return f"tpengine: interrupted; {of_all}{others}"

    # Lines of statistics would break up the text.
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    with signals_end_at_once(progress()):
        from tpengine.llm import LLM
    try:
        # Ranks on Ray have to be ended in order, whenever it is.
        with nullcontext() if engine_args.uses_ray else signals_end_at_once(progress()):
            llm = LLM(**vars(engine_args))
        with llm:
            for prompt in prompts:
                try:
                    _stream_one(llm, prompt, params, args.chat)
                    finished += 1
                except EngineDeadError:  # it would fail all that follow, too
                    raise
                except TPEngineError as error:
                    print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
                    failed += 1
    except KeyboardInterrupt:
        print(progress(), file=sys.stderr)
        raise
    return 1 if failed else 0


def _read_prompts(args: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    if args.file == "-" or (args.file is None and not args.prompts and not sys.stdin.isatty()):
        lines = sys.stdin.read().splitlines()
    elif args.file is not None:
        try:
            lines = Path(args.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TPEngineError(f"--file {args.file} cannot be read: {error}") from error
    return [*args.prompts, *(line for line in lines if line)] or [_DEFAULT_PROMPT]


def _stream_one(llm: LLM, prompt: str, params: SamplingParams, chat: bool) -> None:
    token_ids = llm.chat_token_ids([{"role": "user", "content": prompt}]) if chat else None
    with streamed_text() as write:
        write(f"> {prompt}\n" if chat else prompt)
        for text in llm.stream(None if chat else prompt, params, token_ids):
            write(text)
        write("\n\n")
