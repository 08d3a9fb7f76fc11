"""The client's commands at a terminal: Ctrl-C, typed and piped input, token files, help."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from server.guarded import guarded_server
from support.programs import Cli
from support.server_process import ServerProcess
from support.terminal import Terminal

from tpengine.server.auth import Authenticator

TOKEN = "a-token-of-enough-length"
SHORT = ["--max-tokens", "4", "--temperature", "0"]


def test_ctrl_c_where_a_line_is_awaited(server: ServerProcess) -> None:
    with Terminal("client", "generate", "--target", server.target, *SHORT) as terminal:
        terminal.type("Hello\n")  # with a connection open, and something to tidy up
        assert len(terminal.read_until("\r\n\r\n")) > len("Hello\r\n\r\n> ")
        assert terminal.interrupt_to_the_end() == 130


def test_keys_in_a_chat(server: ServerProcess) -> None:
    where = ["--target", server.target, "--max-tokens", "400", "--ignore-eos"]
    with Terminal("client", "chat", *where) as terminal:
        assert "max_tokens 400 (given); defaults: the server's" in terminal.read_until("> ")
        terminal.ask("Tell me a story.")
        terminal.type("\x03")  # ends the answer
        shown = terminal.read_until("\r\n> ")
        assert "tokens/s" in shown
        assert "cut at" not in shown
        terminal.type("\x04")
        assert terminal.end_status() == 0


@pytest.mark.parametrize("source", ["pipe", "file"])
def test_lines_of_standard_input(
    source: str, server: ServerProcess, tmp_path: Path, cli: Cli, monkeypatch: Any
) -> None:
    lines = b"Hello\n\n  \nGood\r\nno text: \xff\nThe last"
    file = tmp_path / "lines"
    file.write_bytes(lines)
    descriptor = os.open(file, os.O_RDONLY)
    if source == "pipe":
        os.close(descriptor)
        descriptor, end = os.pipe()
        os.write(end, lines)
        os.close(end)
    with os.fdopen(descriptor) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        shown = cli("client", "generate", "--target", server.target, *SHORT, code=1)
    matches = [re.match("Hello|Good|The last", part) for part in shown.out.strip().split("\n\n")]
    assert [match and match[0] for match in matches] == ["Hello", "Good", "The last"]
    assert shown.err.count("InvalidPromptError") == 1
    assert "line 5 of the input is not UTF-8" in shown.err


def test_bad_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "standard input cannot be read" in cli("client", "generate", code=1).err
    monkeypatch.setattr(sys, "stdin", None)  # as after `<&-`
    cli("client", "generate")


def test_values_that_are_refused(server: ServerProcess, cli: Cli) -> None:
    words = ["client", "generate", "Hello", "--target", server.target]
    endless = ["--max-tokens", "99999999999", "--stop", "."]
    assert cli(*words, *endless).out.startswith("Hello")
    shown = cli(*words, "--stop", "\udcff", code=1)
    assert shown.err.startswith("tpengine: InvalidSamplingParamsError: stop ")
    assert shown.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOKEN, "the server loads its model"),  # it knows the client
        (f"# of this machine\n\n{TOKEN}\n", "the server loads its model"),
        (f"{TOKEN}\nanother-{TOKEN}\n", "ConfigError: .* holds 2 tokens"),
        ("# nothing\n", "ConfigError: .* holds no token"),
        (f"{TOKEN} b", "ConfigError: .*the weight of a token"),
    ],
)
def test_tokens(text: str, words: str, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(text)
    with guarded_server(Authenticator([TOKEN])) as target:
        error = cli("client", "load", "--target", target, "--token-file", str(file), code=1).err
    assert re.search(words, error)
    assert TOKEN not in error


def test_a_token_of_the_environment_that_cannot_be_one(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPENGINE_CLIENT_TOKEN", f"{TOKEN}\nb")
    error = cli("client", "health", code=1).err
    assert "tpengine: ConfigError: a token must be" in error
    assert TOKEN not in error


def test_the_timeout_of_health(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        error = cli("client", "health", "--timeout", "1", "--target", target, code=1).err
    assert "DeadlineExceededError" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_refused_connection_is_told_at_once(host: str, cli: Cli) -> None:
    with socket.socket() as probe:  # bound but not listening: no server can be there
        probe.bind(("127.0.0.1", 0))
        target = f"{host}:{probe.getsockname()[1]}"
        error = cli("client", "health", "--target", target, code=1).err
    words = r"ServerUnavailableError: .*Connection refused; no server is there: start one with `"
    assert re.search(words, error)
