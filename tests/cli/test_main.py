"""The `tpengine` command: help, wrong usage, `bench throughput`, signals during the start."""

from __future__ import annotations

import argparse
import re
import signal
from typing import Any

import pytest
from support.programs import Cli, python

from tpengine.cli.main import BENCHMARKS, build_parser, main
from tpengine.config import EMBEDDED_MODEL

PROMPT = "The capital of France is"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--help", "generate bench Begin"),
        ("generate --help", "Examples"),
        ("serve --help", "readiness RESOURCE_EXHAUSTED SIGTERM --drain-timeout --max-num-seqs"),
        ("chat --help", "/reset /system Ctrl-C generation_config.json"),
        ("client chat --help", "/reset /system Ctrl-C --target"),
        ("--version", "tpengine"),
    ],
)
def test_help(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in words.split():
        assert word in shown


COMMANDS = [
    *([name] for name in ("generate", "chat", "serve")),
    *(["client", name] for name in ("generate", "chat", "health", "load")),
    *(["bench", name] for name in BENCHMARKS),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_says_what_each_option_is_and_its_default(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no name is broken in two
    parser: Any = build_parser(words)
    for word in words:
        (choices,) = (a.choices for a in parser.actions if a.nargs == argparse.PARSER)
        parser = choices[word]
    assert parser.description
    usage, _, text = parser.format_help().partition("\n\n")
    named, known = (set(re.findall(r"--[a-z][a-z-]+", part)) for part in (text, usage))
    assert named <= known | {"--help"}, "the help names an option that does not exist"
    shown = [action for action in parser.actions if action.help != argparse.SUPPRESS]
    for action in shown:
        text = parser._get_formatter()._expand_help(action)
        assert re.sub(r"\W*\(?default: .*", "", text), f"{action.dest}: what it is"
        assert "default: None" not in text, action.dest
        takes_value = bool(action.option_strings) and action.nargs != 0
        if takes_value and action.default not in (None, "", []):
            assert "default: " in text, action.dest
        if isinstance(action, argparse.BooleanOptionalAction) and action.default is not None:
            assert text.endswith(f"(default: {'on' if action.default else 'off'})"), action.dest


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ([], []),
        ([], ["fly"]),
        (["generate"], ["--cpu-kv-cache-space", "1,x"]),
        *((command, ["--no-such-option"]) for command in COMMANDS),
    ],
)
def test_misuse(command: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, *wrong])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(" ".join(["usage: tpengine", *command, "["]))
    assert all(word in error for word in wrong[:1])


def test_a_model_without_its_option(capsys: pytest.CaptureFixture[str], cli: Cli) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "some/model"])
    assert capsys.readouterr().err.endswith("some/model; the model is given by --model\n")
    for command, model in (("chat", "some/model.gguf"), ("generate", EMBEDDED_MODEL)):
        assert f"{model!r} is a model, and stands" in cli(command, model, code=1).err


def test_all_mistyped_options_are_named_below_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--temprature=2", "-max-tokens", "3", "--like-none", "--stopp", "."]
    with pytest.raises(SystemExit) as ended:
        main(["generate", PROMPT, *wrong])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == (
        "usage: tpengine generate [OPTION ...] [PROMPT ...]  (more: tpengine generate --help)"
    )
    assert error == (
        f"tpengine generate: error: unrecognized arguments: {' '.join(wrong)}; did you mean "
        "--temperature for --temprature, --max-tokens for -max-tokens, --stop for --stopp?"
    )


INTERRUPTED_IMPORT = """
import signal, sys
class SwallowingFinder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            try:
                signal.raise_signal(int(sys.argv[2]))
            except BaseException:
                print("the exception was swallowed", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, SwallowingFinder())
from tpengine.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("module", "sent"), [("torch", signal.SIGTERM), ("transformers", signal.SIGINT)]
)
def test_a_signal_while_modules_are_imported(module: str, sent: signal.Signals) -> None:
    """Some modules swallow an exception while they are imported, and stay half initialised."""
    command = ["generate", PROMPT, PROMPT, "--cpu-kv-cache-space", "0.05"]
    done = python("-c", INTERRUPTED_IMPORT, module, int(sent), *command, code=128 + sent)
    assert done.stdout == ""
    assert done.stderr.endswith("tpengine: interrupted; 0 of 2 prompts finished\n")
