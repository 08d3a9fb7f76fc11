"""Completes prompts: those given as arguments, or each line of a file or of standard input, or an
example if there are none."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpengine.cli.parser import SamplingOptions
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineDeadError, TPEngineError, counted
from tpengine.host import signals_end_at_once, sigterm_as_interrupt, streamed_text
from tpengine.model_defaults import sampling_defaults
from tpengine.model_files import read_generation_config
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tpengine.llm import LLM

EPILOG = """\
Examples:
  tpengine generate 'Once upon a time' --temperature 0
  tpengine generate --chat 'What is the capital of France?'
  tpengine generate --file prompts.txt --model FOLDER
"""
_EXAMPLE_PROMPT = "Hello, my name is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    parser.add_argument("--file", metavar="FILE", help="one prompt per line; - is standard input")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer prompts as messages, by the model's chat template",
    )
    SamplingOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Completes the prompts in turn; returns the exit code.

    Interrupted, also while the model loads, it prints how many prompts are finished.
    """
    options = SamplingOptions.from_cli_args(args)
    options.given()  # checks them before the model is loaded
    # Lines of statistics would break the text up.
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    finished = failed = 0
    with sigterm_as_interrupt():
        prompts = _read_prompts(args)
        try:
            with load_llm(engine_args, _progress(0, 0, len(prompts))) as llm:
                params, _ = sampling_of(llm, options)
                for prompt in prompts:
                    try:
                        _stream_one(llm, prompt, params, args.chat)
                        finished += 1
                    except EngineDeadError:  # all prompts that follow would fail too
                        raise
                    except TPEngineError as error:
                        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
                        failed += 1
        except KeyboardInterrupt:
            print(_progress(finished, failed, len(prompts)), file=sys.stderr)
            raise
    return 1 if failed else 0


def _progress(finished: int, failed: int, total: int) -> str:
    others = f", {failed} failed" if failed else ""
    return f"tpengine: interrupted; {finished} of {counted(total, 'prompt')} finished{others}"


def load_llm(engine_args: EngineArgs, last_words: str) -> LLM:
    """Loads a model for a command.

    Args:
        last_words: printed if a signal ends the process meanwhile.

    Raises:
        EngineError: see `LLM`.
    """
    with signals_end_at_once(last_words):
        from tpengine.llm import LLM
    # Ranks on Ray have to be ended in order, at any time.
    with nullcontext() if engine_args.uses_ray else signals_end_at_once(last_words):
        return LLM(**vars(engine_args))


def sampling_of(
    llm: LLM, options: SamplingOptions, max_tokens: int = 100
) -> tuple[SamplingParams, str]:
    """Returns the parameters that the user gave with the model's defaults for the others, and in
    words what they are.

    Args:
        max_tokens: for a model that recommends none.
    """
    folder = llm.llm_engine.get_model_config().model
    defaults, source = sampling_defaults(folder, read_generation_config(folder), max_tokens)
    fields = defaults | options.given()
    shown = ", ".join(f"{name} {fields[name]}" for name in sorted(fields))
    return SamplingParams(**fields), f"{shown} (defaults: {source})"


def _read_prompts(args: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    if args.file == "-" or (args.file is None and not args.prompts and not sys.stdin.isatty()):
        lines = sys.stdin.read().splitlines()
    elif args.file is not None:
        try:
            lines = Path(args.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TPEngineError(f"--file {args.file} cannot be read: {error}") from error
    return [*args.prompts, *(line for line in lines if line)] or [_EXAMPLE_PROMPT]


def _stream_one(llm: LLM, prompt: str, params: SamplingParams, chat: bool) -> None:
    token_ids = llm.chat_token_ids([{"role": "user", "content": prompt}]) if chat else None
    with streamed_text() as write:
        write(f"> {prompt}\n" if chat else prompt)
        for text in llm.stream(None if chat else prompt, params, token_ids):
            write(text)
        write("\n\n")
