"""Holds a conversation in the terminal, with the model in this process."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tpengine.cli.generate import load_llm
from tpengine.cli.parser import SamplingOptions
from tpengine.config import read_generation_config
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineDeadError, InvalidPromptError, TPEngineError, counted
from tpengine.host import sigterm_as_interrupt, streamed_text
from tpengine.model_defaults import sampling_defaults
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tpengine.llm import LLM

_MAX_TOKENS = 1024
"""Of an answer, for a model that recommends none."""
_COMMANDS = """\
/system TEXT   set the system message; without TEXT: remove it
/reset         forget the conversation; the system message stays
/help          show this
/exit          end; so does the end of input (Ctrl-D)
\"\"\"            begin and end a message of several lines
Ctrl-C         end the answer; twice where a message is awaited: end the chat"""
_OTHER_NAMES = {"/clear": "/reset", "/?": "/help", "/bye": "/exit", "/quit": "/exit"}

EPILOG = f"""\
In the conversation:
{_COMMANDS}

Sampling: options of this command line, else what the model's generation_config.json recommends; if
it recommends nothing, temperature 0.7 and top_p 0.9. The first line of a chat says which.

Examples:
  tpengine chat
  tpengine chat --model FOLDER --system 'Answer in one sentence.'
  tpengine chat 'What is the capital of France?'      one answer, then the end
  tpengine chat --temperature 0 < questions.txt       each line is a message
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "message",
        nargs="*",
        metavar="WORD",
        help="words of one message; default: each line of stdin is one",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    SamplingOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Answers message after message; returns the exit code, 1 if a message was refused."""
    given = SamplingOptions.from_cli_args(args).given()
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    with sigterm_as_interrupt() as must_end:
        llm = load_llm(engine_args, "tpengine: interrupted")
        with llm:
            model = llm.llm_engine.get_model_config()
            defaults = sampling_defaults(read_generation_config(model.model), _MAX_TOKENS)
            fields = {**defaults.fields, **given}
            conversation = Conversation(llm, SamplingParams(**fields), args.system)
            conversation.check()
            shown = ", ".join(
                f"{name} {value}" for name, value in fields.items() if value is not False
            )
            _note(f"{engine_args.served_names[0]}, {model.max_model_len} tokens; {shown}")
            _note(f"sampling parameters that you did not give are {defaults.source}; /help helps")
            if args.message:
                return _answer(conversation, " ".join(args.message), must_end)
            return _converse(conversation, must_end)


def _converse(conversation: Conversation, must_end: Callable[[], bool]) -> int:
    failed = 0
    for text in _messages(must_end):
        name, _, rest = text.strip().partition(" ")
        if text.startswith(" ") or not re.fullmatch(r"/[a-z?]+", name):
            failed |= _answer(conversation, text.strip(), must_end)
            continue
        match _OTHER_NAMES.get(name, name):
            case "/exit":
                break
            case "/system":
                conversation.system = rest.strip() or None
            case "/reset":
                conversation.turns.clear()
            case "/help":
                print(_COMMANDS)
            case _:
                _note(f"unknown command {name}: /help lists them; a space before it sends it")
    return failed


def _answer(conversation: Conversation, text: str, must_end: Callable[[], bool]) -> int:
    """Answers one message; returns 1 if it was refused, else 0."""
    try:
        conversation.answer(text)
    except KeyboardInterrupt:
        if must_end() or not sys.stdin.isatty():
            raise
    except EngineDeadError:
        raise
    except TPEngineError as error:
        print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


class Conversation:
    """What was said, and the model that answers.

    Args:
        system: the system message.

    Attributes:
        system: likewise; the next answer follows it.
        turns: message and answer, in their order.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._max_len = llm.llm_engine.get_model_config().max_model_len
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def check(self) -> None:
        """Checks that the model can chat.

        Raises:
            InvalidPromptError: it has no tokenizer or no chat template, or that refuses messages.
        """
        try:
            self._token_ids([], "Hello")
        except InvalidPromptError as error:
            raise InvalidPromptError(
                f"{error}. `tpengine generate` completes texts with any model"
            ) from error

    def answer(self, text: str) -> None:
        """Prints the answer as it is generated, and remembers message and answer.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after what was generated is remembered.
            RequestError: the message is too long, or the chat template refuses it.
        """
        token_ids = self._fit(text)
        pieces: list[str] = []
        counters, begin = self._llm.llm_engine.counters, time.monotonic()
        first, num_before = begin, counters.output_tokens
        try:
            with streamed_text() as write:
                for piece in self._llm.stream(None, self._params, token_ids):
                    first = first if pieces else time.monotonic()
                    pieces.append(piece)
                    write(piece)
                write("\n")
        finally:
            if pieces:
                self.turns.append((text, "".join(pieces)))
                num_tokens = counters.output_tokens - num_before
                rate = (num_tokens - 1) / max(time.monotonic() - first, 1e-9)
                cut = num_tokens == self._params.max_tokens
                _note(
                    f"{counted(num_tokens, 'token')}, {rate:.1f} tokens/s, the first after "
                    f"{first - begin:.2f} s; {counted(len(token_ids), 'token')} before it"
                    + (f"; cut at --max-tokens {num_tokens}" if cut else "")
                )

    def _fit(self, text: str) -> list[int]:
        """Returns the ids of the conversation with a new message, without its oldest turns if it is
        too long for the model."""
        alone = self._token_ids([], text)
        if len(alone) >= self._max_len:
            raise InvalidPromptError(
                f"the message has {len(alone)} tokens with its template, and message and answer "
                f"must fit into max_model_len = {self._max_len}; send a shorter one"
            )
        room = min(self._params.max_tokens or self._max_len, self._max_len // 4)
        num_dropped = 0
        while self.turns:
            token_ids = self._token_ids(self.turns, text)
            if len(token_ids) + room <= self._max_len:
                break
            del self.turns[0]
            num_dropped += 1
        else:
            token_ids = alone
        if num_dropped:
            _note(
                f"the conversation is longer than the model's {self._max_len} tokens: forgot "
                f"{counted(num_dropped, 'turn')}, the oldest first"
            )
        return token_ids

    def _token_ids(self, turns: list[tuple[str, str]], text: str) -> list[int]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return self._llm.chat_token_ids([*messages, {"role": "user", "content": text}])


def _note(text: str) -> None:
    """Prints a remark that is no part of the conversation: dim at a terminal."""
    dim, normal = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{normal}", file=sys.stderr, flush=True)


def _messages(must_end: Callable[[], bool]) -> Iterator[str]:
    """Yields the messages of standard input that are not blank. At a terminal lines can be edited.

    Raises:
        KeyboardInterrupt: on a second Ctrl-C without a message in between.
    """
    if sys.stdin is None:  # it was closed when Python started
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused with their message alone
    lines = (
        _typed_lines(must_end) if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin)
    )
    for line in lines:
        text = line
        if text.lstrip().startswith('"""'):
            text = text.lstrip().removeprefix('"""')
            while not text.rstrip().endswith('"""') and (more := next(lines, None)) is not None:
                text += f"\n{more}"
            text = " " + text.rstrip().removesuffix('"""')
        if text.strip():
            yield text


def _typed_lines(must_end: Callable[[], bool]) -> Iterator[str]:
    with contextlib.suppress(ImportError):  # `input` uses it; not every Python has it
        importlib.import_module("readline")
    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or must_end():
                raise
            was_interrupted = True
            _note("Ctrl-C once more, or /exit, ends the chat")
            continue
        was_interrupted = False
        yield line
