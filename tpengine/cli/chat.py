"""Holds a conversation in the terminal, with the model in this process."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tpengine.cli.generate import load_llm, sampling_of
from tpengine.cli.parser import SamplingOptions
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineDeadError, InvalidPromptError, TPEngineError, counted
from tpengine.host import sigterm_as_interrupt, streamed_text

if TYPE_CHECKING:
    from tpengine.llm import LLM
    from tpengine.sampling_params import SamplingParams

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

The first line of a chat says which sampling parameters hold, and whose they are.

Examples:
  tpengine chat --model FOLDER --system 'Answer in one sentence.'
  tpengine chat 'What is the capital of France?'      one answer, then the end
  tpengine chat --temperature 0 < questions.txt       each line is a message
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    text = "words of one message; default: each line of stdin is one"
    parser.add_argument("message", nargs="*", metavar="WORD", help=text)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    SamplingOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Answers message after message; returns the exit code, 1 if a message was refused."""
    options = SamplingOptions.from_cli_args(args)
    options.given()  # checks them before the model is loaded
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    failed = 0
    with (
        sigterm_as_interrupt() as must_end,
        load_llm(engine_args, "tpengine: interrupted") as llm,
    ):
        params, words = sampling_of(llm, options, _MAX_TOKENS)
        conversation = Conversation(llm, params, args.system)
        _note(f"{engine_args.served_names[0]}, {conversation.max_len} tokens; {words}; try /help")
        for text in [" ".join(args.message)] if args.message else _messages(must_end):
            if not args.message and re.match(r"/[a-z?]+( |$)", text):
                if _obey(conversation, text):
                    break
                continue
            try:
                conversation.answer(text.strip())
            except KeyboardInterrupt:
                if must_end() or not sys.stdin.isatty():
                    raise
            except EngineDeadError:
                raise
            except TPEngineError as error:
                print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
                failed += 1
    return 1 if failed else 0


def _obey(conversation: Conversation, text: str) -> bool:
    """Does what a command says; returns whether it ends the chat."""
    name, _, rest = text.strip().partition(" ")
    name = _OTHER_NAMES.get(name, name)
    if name == "/system":
        conversation.system = rest.strip() or None
        _note("system message set" if conversation.system else "system message removed")
    elif name == "/reset":
        conversation.turns.clear()
        _note("conversation forgotten")
    elif name == "/help":
        print(_COMMANDS)
    elif name != "/exit":
        _note(f"unknown command {name}: /help lists them; a space before it sends it as a message")
    return name == "/exit"


class Conversation:
    """What was said, and the model that answers.

    Attributes:
        max_len: most tokens of the model, prompt and answer together.
        system: the system message; the next answer follows it.
        turns: message and answer, in their order.

    Raises:
        InvalidPromptError: the model has no chat template, or it refuses the system message.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self.max_len = llm.llm_engine.get_model_config().max_model_len
        self.system = system
        self.turns: list[tuple[str, str]] = []
        self._token_ids("Hello")

    def answer(self, text: str) -> None:
        """Prints the answer as it is generated, and remembers message and answer.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after what was generated is remembered.
            RequestError: the message is too long, or the chat template refuses it.
        """
        token_ids = self._fit(text)
        answer, counters = "", self._llm.llm_engine.counters
        begin = first = time.monotonic()
        num_before = counters.output_tokens
        try:
            with streamed_text() as write:
                for piece in self._llm.stream(None, self._params, token_ids):
                    first = first if answer else time.monotonic()
                    answer += piece
                    write(piece)
                write("\n")
        finally:
            if answer:
                self.turns.append((text, answer))
            num_tokens = counters.output_tokens - num_before
            rate = (num_tokens - 1) / max(time.monotonic() - first, 1e-9)
            cut = ", cut at --max-tokens" if num_tokens == self._params.max_tokens else ""
            if len(token_ids) + num_tokens == self.max_len:
                cut = f", cut at the model's {self.max_len} tokens"
            if not answer:
                cut += ", an empty one, which is not remembered"
            _note(
                f"{counted(len(token_ids), 'prompt token')}, {num_tokens} of the answer{cut}; "
                f"the first after {first - begin:.2f} s, then {max(rate, 0.0):.1f} tokens/s"
            )

    def _fit(self, text: str) -> list[int]:
        """Returns the ids of the conversation with a new message; forgets the oldest turns while it
        leaves too little room for the answer."""
        alone = len(self._token_ids(text))
        if alone >= self.max_len:
            raise InvalidPromptError(
                f"the message has {alone} tokens with its template, and message and answer must "
                f"fit into max_model_len = {self.max_len}; send a shorter one"
            )
        room = min(self._params.max_tokens or self.max_len, self.max_len // 4)
        num_turns = len(self.turns)
        token_ids = self._token_ids(text, self.turns)
        while self.turns and len(token_ids) + room > self.max_len:
            del self.turns[0]
            token_ids = self._token_ids(text, self.turns)
        if len(self.turns) < num_turns:
            forgotten = counted(num_turns - len(self.turns), "turn")
            _note(f"more than max_model_len = {self.max_len} tokens: forgot the oldest {forgotten}")
        return token_ids

    def _token_ids(self, text: str, turns: Iterable[tuple[str, str]] = ()) -> list[int]:
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
    """Yields the messages of standard input that are not blank. One of several lines begins with a
    space, so that it is no command.

    Raises:
        KeyboardInterrupt: on a second Ctrl-C without a message in between.
    """
    lines = _typed_lines(must_end) if sys.stdin and sys.stdin.isatty() else iter(sys.stdin or ())
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused with their message alone
    for text in lines:
        if text.startswith('"""'):
            while text.count('"""') < 2 and (more := next(lines, "")):
                text += more
            text = " " + text.replace('"""', "")
        if text.strip():
            yield text


def _typed_lines(must_end: Callable[[], bool]) -> Iterator[str]:
    """Yields typed lines, and a block of several lines at once; Ctrl-C drops an open block."""
    with contextlib.suppress(ImportError):  # not every Python has it; `input` edits lines with it
        importlib.import_module("readline")
    was_interrupted, block = False, ""
    while True:
        try:
            block += input("... " if block else "> ") + "\n"
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or must_end():
                raise
            was_interrupted, block = not block, ""
            if was_interrupted:
                _note("Ctrl-C once more, or /exit, ends the chat")
        else:
            was_interrupted = False
            if not block.startswith('"""') or block.count('"""') > 1:
                yield block
                block = ""
