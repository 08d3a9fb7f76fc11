"""A conversation in the terminal: commands, history, Ctrl-C. `tpengine chat` holds it with a model
in this process, `tpengine client chat` with that of a server."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpengine import errors
from tpengine.cli.lines import Line, content_of, is_typed, messages, read_picture
from tpengine.errors import counted
from tpengine.host import print_note, streamed_text

Content = str | list[dict[str, Any]]
"""Text, or the parts of a message with pictures."""
Messages = list[dict[str, Any]]
MAX_TOKENS = 1024
"""Of an answer, for a model that recommends none."""
_COMMANDS = """\
/system TEXT   set the system message; without TEXT: remove it
/image FILE    add a picture to the next message; several times: several
/reset         forget the conversation and its pictures; the system message stays
/help          show this
/exit          end; so does the end of input (Ctrl-D)
\"\"\"            begin and end a message of several lines
Ctrl-C         end the answer, or drop the line; twice on an empty line: end the chat"""
_OTHER_NAMES = {"/clear": "/reset", "/?": "/help", "/bye": "/exit", "/quit": "/exit"}
HELP = f"""\
In the conversation:
{_COMMANDS}

The oldest turns are forgotten when the conversation does not fit into the model's length. The first
line of a chat says which sampling parameters hold, and whose they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what a command that holds a conversation takes, and describes it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{HELP}\n\n{parser.epilog or ''}"
    text = "words of one message; default: each line of stdin is one"
    parser.add_argument("message", nargs="*", metavar="WORD", help=text)
    parser.add_argument("--system", metavar="TEXT", help="system message")


def converse(
    talk: Conversation, title: str, words: Sequence[str], must_end: Callable[[], bool] = bool
) -> int:
    """Answers message after message; returns the exit code, 1 if a message was refused.

    Args:
        title: of the first line: the model, and which sampling parameters hold.
        words: of the only message; empty: each line of standard input is one.
        must_end: whether an interrupt ends the program, also in an answer at a terminal; default:
            it does not.

    Raises:
        InvalidPromptError: the model has no chat template, or it refuses the system message.
        KeyboardInterrupt: on Ctrl-C, but at a terminal in an answer.
        TPEngineError: the model can answer no more.
    """
    talk.prompt_ids("Hello")
    print_note(f"{title}; try /help")
    failed = 0
    lines = [Line(1, " ".join(words), "the message")]
    for line in lines if words else messages(must_end):
        try:
            if not words and re.match(r"/[a-z?]+( |$)", line.text):
                if _obey(talk, line.checked()):
                    break
            else:
                talk.answer(line.checked().strip())
        except KeyboardInterrupt:
            if must_end() or not is_typed():
                raise
        except (errors.RequestError, errors.ServerError) as error:
            if isinstance(error, errors.ServerError) and not is_typed():
                raise
            print(f"tpengine: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def _obey(conversation: Conversation, text: str) -> bool:
    """Does what a command says; returns whether it ends the chat.

    Raises:
        RequestError, ServerError: see `Conversation.add_picture`.
    """
    name, _, rest = text.strip().partition(" ")
    name = _OTHER_NAMES.get(name, name)
    if name == "/system":
        conversation.system = rest.strip() or None
        print_note("system message set" if conversation.system else "system message removed")
    elif name == "/image":
        conversation.add_picture(rest.strip())
        print_note(f"the next message has {counted(len(conversation.pictures), 'picture')}")
    elif name == "/reset":
        conversation.turns.clear()
        conversation.pictures.clear()
        print_note("conversation forgotten")
    elif name == "/help":
        print(_COMMANDS)
    elif name != "/exit":
        print_note(f"unknown command {name}: /help lists them; to send it, begin with a space")
    return name == "/exit"


@dataclass
class Conversation:
    """What was said, and the model that answers.

    Attributes:
        max_len: most tokens of prompt and answer together.
        max_tokens: most tokens of an answer; None: no limit of its own.
        token_ids: returns the ids of messages by the model's chat template.
        generate: generates the answer to messages, and writes its text as it grows.
        num_tokens: returns the number of tokens of all answers so far.
        system: the system message; the next answer follows it.
        turns: content of a message, and answer, in their order.
        pictures: files of those of the next message.
    """

    max_len: int
    max_tokens: int | None
    token_ids: Callable[[Messages], list[int]]
    generate: Callable[[Messages, Callable[[str], None]], None]
    num_tokens: Callable[[], int]
    system: str | None
    turns: list[tuple[Content, str]] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)

    def add_picture(self, path: str) -> None:
        """Adds a picture to the next message, unless the model would refuse it.

        Raises:
            InvalidPictureError: it is no picture, one too many, or the model reads text alone.
            RequestError, ServerError: the model cannot say so now.
        """
        if not path:
            raise errors.InvalidPictureError("/image needs a FILE, as in: /image cat.jpg")
        pictures = [*self.pictures, read_picture(path)]
        self.prompt_ids(content_of("", pictures), self.turns)
        self.pictures = pictures

    def answer(self, text: str) -> None:
        """Prints the answer as it is generated, and remembers message and answer.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after what was generated is remembered.
            RequestError: the message is too long, or the chat template refuses it. Its pictures
                stay for the next one.
            RequestFailedError: the model cannot see one of its pictures; they are forgotten.
        """
        content = content_of(text, self.pictures)
        token_ids = self._fit(content)
        answer, num_before = "", self.num_tokens()
        begin = first = time.monotonic()
        try:
            with streamed_text() as write:

                def add(piece: str) -> None:
                    nonlocal answer, first
                    first = first if answer else time.monotonic()
                    answer += piece
                    write(piece)

                self.generate(self._messages(content, self.turns), add)
                write("\n")
        except errors.RequestFailedError:
            self.pictures.clear()
            raise
        finally:
            if answer:
                self.turns.append((content, answer))
                self.pictures.clear()
            num_tokens = self.num_tokens() - num_before
            rate = (num_tokens - 1) / max(time.monotonic() - first, 1e-9)
            cut = ", cut at --max-tokens" if num_tokens == self.max_tokens else ""
            if len(token_ids) + num_tokens == self.max_len:
                cut = f", cut at the model's {self.max_len} tokens"
            if not answer:
                cut += ", an empty one, which is not remembered"
            print_note(
                f"{counted(len(token_ids), 'prompt token')}, {num_tokens} of the answer{cut}; "
                f"the first after {first - begin:.2f} s, then {max(rate, 0.0):.1f} tokens/s"
            )

    def _fit(self, content: Content) -> list[int]:
        """Returns the ids of the conversation with a new message; forgets the oldest turns while it
        leaves too little room for the answer."""
        room = min(self.max_tokens or self.max_len, self.max_len // 4)
        num_turns = len(self.turns)
        token_ids = self.prompt_ids(content, self.turns)
        if len(token_ids) + room > self.max_len:
            alone = len(self.prompt_ids(content))
            if alone >= self.max_len:
                raise errors.InvalidPromptError(
                    f"the message has {alone} tokens with its template, and message and answer "
                    f"must fit into max_model_len = {self.max_len}; send a shorter one"
                )
        while self.turns and len(token_ids) + room > self.max_len:
            del self.turns[0]
            token_ids = self.prompt_ids(content, self.turns)
        if len(self.turns) < num_turns:
            forgotten = counted(num_turns - len(self.turns), "turn")
            most = self.max_len
            print_note(f"more than max_model_len = {most} tokens: forgot the oldest {forgotten}")
        return token_ids

    def prompt_ids(self, content: Content, turns: Iterable[tuple[Content, str]] = ()) -> list[int]:
        """Returns the ids of a prompt: the system message, some turns and a new message.

        Raises:
            InvalidPromptError: the model has no chat template, or it refuses one of them.
        """
        return self.token_ids(self._messages(content, turns))

    def _messages(self, content: Content, turns: Iterable[tuple[Content, str]]) -> Messages:
        messages: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": content}]
