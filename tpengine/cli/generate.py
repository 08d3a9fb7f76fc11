"""Completes prompts: those given as arguments, or each line of a file or of standard input, or an
example if there are none.

Examples:
  tpengine generate 'Once upon a time' --temperature 0
  tpengine generate --chat 'What is the capital of France?'
  tpengine generate --file prompts.txt --model FOLDER
  tpengine generate 'USER: <image> What is this? ASSISTANT:' --image cat.jpg --model FOLDER
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from tpengine.checkpoint.model_defaults import sampling_defaults
from tpengine.checkpoint.model_files import read_generation_config
from tpengine.cli.lines import Line, content_of, is_typed, read_lines, read_picture
from tpengine.cli.parser import add_sampling_options, given_sampling, in_words
from tpengine.engine.pooled_outputs import check_generates
from tpengine.engine.tokenizer import has_tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, ModelLoadError, RequestError, counted
from tpengine.host import print_note, signals_end_at_once, sigterm_as_interrupt, streamed_text
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tpengine.llm import LLM

_EXAMPLE_PROMPT = "Hello, my name is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    parser.add_argument("--file", metavar="FILE", help="one prompt per line; - is standard input")
    text = "answer prompts as messages, by the model's chat template"
    parser.add_argument("--chat", action="store_true", help=text)
    text = (
        "picture of each prompt, one for each of its placeholders, such as <image>; without "
        "placeholders, and with --chat, the pictures come before its text"
    )
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=text)
    add_sampling_options(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Completes the prompts in turn; returns the exit code.

    Interrupted, also while the model loads, it prints how many prompts are finished.
    """
    check_words(args.prompts)
    images = list(map(read_picture, args.image))
    options = given_sampling(args)
    engine_args = EngineArgs.from_cli_args(args)
    finished = failed = 0
    with sigterm_as_interrupt():
        prompts = _read_prompts(args)
        try:
            llm, params, words = load_llm(engine_args, options, 100, _progress(0, 0, len(prompts)))
            with llm:
                print_note(f"{engine_args.served_names[0]}; {words}")
                for prompt in prompts:
                    try:
                        _stream_one(llm, prompt.checked(), params, args.chat, images)
                        finished += 1
                    except RequestError as error:
                        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
                        failed += 1
        except KeyboardInterrupt:
            print(_progress(finished, failed, len(prompts)), file=sys.stderr)
            raise
    return 1 if failed else 0


def check_words(words: Sequence[str]) -> None:
    """Checks that the words of a command are text: some programs take a model there.

    Raises:
        ConfigError: the only word is a GGUF file or the folder of a model.
    """
    for word in words if len(words) == 1 else ():
        if word.endswith(".gguf") or (word and os.path.isfile(os.path.join(word, "config.json"))):
            raise ConfigError(f"{word!r} is a model, and stands where a text does: give --model")


def _progress(finished: int, failed: int, total: int) -> str:
    others = f", {failed} failed" if failed else ""
    return f"tpengine: interrupted; {finished} of {counted(total, 'prompt')} finished{others}"


def _sampling_of(
    engine_args: EngineArgs, options: dict[str, Any], max_tokens: int
) -> tuple[SamplingParams, str]:
    """Returns the sampling parameters, and what they are in words; reads no weights.

    Raises:
        ConfigError: see `EngineArgs.read_model`.
        ModelLoadError: the model has no tokenizer, or recommends something wrong.
        InvalidPromptError: it makes no tokens.
    """
    read = engine_args.read_model()
    check_generates(read.pooling)
    folder = read.folder
    if not has_tokenizer(engine_args.find_tokenizer(folder)):
        raise ModelLoadError(
            f"{folder} has no tokenizer, or skip_tokenizer_init is set; name one with --tokenizer"
        )
    defaults, source = sampling_defaults(folder, read_generation_config(folder), max_tokens)
    fields = defaults | options
    words = in_words(fields, options, source if fields.keys() - options.keys() else "")
    return SamplingParams(**fields), words


def load_llm(
    engine_args: EngineArgs, options: dict[str, Any], max_tokens: int, last_words: str
) -> tuple[LLM, SamplingParams, str]:
    """Loads a model for a command.

    Args:
        options: the sampling parameters that the user gave.
        max_tokens: for a model that recommends none.
        last_words: printed if a signal ends the process meanwhile.

    Returns:
        The model; the parameters given, with the model's defaults for the others; what they are, in
        words.

    Raises:
        EngineError: see `LLM`; or the model has no tokenizer.
    """
    with signals_end_at_once(last_words):
        params, words = _sampling_of(engine_args, options, max_tokens)
        from tpengine.llm import LLM
    # Ranks in processes of their own have to be ended in order, at any time.
    is_local = engine_args.chosen_executor == "local"
    with signals_end_at_once(last_words) if is_local else nullcontext():
        # Lines of statistics would break the text up.
        return LLM(**vars(engine_args) | {"disable_log_stats": True}), params, words


def _read_prompts(args: argparse.Namespace) -> list[Line]:
    prompts = [Line(1, prompt, "a prompt") for prompt in args.prompts]
    if args.file is not None or not (args.prompts or is_typed()):
        lines = read_lines(None if args.file == "-" else args.file)
        prompts += [line for line in lines if line.text]
    return prompts or [Line(1, _EXAMPLE_PROMPT)]


def _stream_one(
    llm: LLM, prompt: str, params: SamplingParams, chat: bool, images: list[bytes]
) -> None:
    messages, inputs = None, cast(Any, prompt)
    if chat:
        messages, inputs = [{"role": "user", "content": content_of(prompt, images)}], None
    elif images:
        token = llm.llm_engine.picture_placeholder or ""
        text = prompt if token in prompt else token * len(images) + prompt
        inputs = {"prompt": text, "multi_modal_data": {"image": images}}
    with streamed_text() as write:
        write(f"> {prompt}\n" if chat else prompt)
        for text in llm.stream(inputs, params, None, messages):
            write(text)
        write("\n\n")
