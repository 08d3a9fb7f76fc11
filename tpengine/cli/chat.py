"""Holds a conversation in the terminal, with the model in this process.

Examples:
  tpengine chat --model FOLDER --system 'Answer in one sentence.'
  tpengine chat 'What is the capital of France?'      one answer, then the end
  tpengine chat --temperature 0 < questions.txt       each line is a message
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tpengine.cli import conversation
from tpengine.cli.generate import check_words, load_llm
from tpengine.cli.parser import add_sampling_options, given_sampling
from tpengine.engine_args import EngineArgs
from tpengine.host import sigterm_as_interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    conversation.add_arguments(parser)
    add_sampling_options(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Answers message after message; returns the exit code, 1 if a message was refused."""
    check_words(args.message)
    options = given_sampling(args)
    engine_args = EngineArgs.from_cli_args(args)
    with sigterm_as_interrupt() as must_end:
        limit, last_words = conversation.MAX_TOKENS, "tpengine: interrupted"
        llm, params, sampling = load_llm(engine_args, options, limit, last_words)
        engine = llm.llm_engine
        max_len, counters = engine.get_model_config().max_model_len, engine.counters

        def generate(messages: conversation.Messages, write: Callable[[str], None]) -> None:
            for piece in llm.stream(None, params, messages=messages):
                write(piece)

        talk = conversation.Conversation(
            max_len,
            params.max_tokens,
            llm.chat_token_ids,
            generate,
            lambda: counters.output_tokens,
            args.system,
        )
        title = f"{engine_args.served_names[0]}, {max_len} tokens; {sampling}"
        with llm:
            return conversation.converse(talk, title, args.message, must_end)
