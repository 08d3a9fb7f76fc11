"""Measurements of tpengine's own parts and of other engines: `python tests/benchmarks NAME
[options]`, from the repository's root, with the project installed or with `PYTHONPATH=.`.
`tpengine bench` has those that users run."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from tpengine.errors import TPEngineError

BENCHMARKS = {
    "engines": "decode and prefill beside llama.cpp, ik_llama.cpp, OpenVINO GenAI and vLLM on CPU",
    "kernels": "the kernels of CPU or GPU: bytes and operations per second",
    "peers": "output tokens/s beside transformers' continuous batching, on the same requests",
    "recovery": "kills of ranks: found, ready, longest gap on a stream; Ray also with spares",
    "transport": "a step without a model, driver to ranks and back, against Ray's own calls",
    "visit": "all checks and measurements that need a GPU, in less than ten minutes",
}
MODULES = {"kernels": "kernel_times", "recovery": "lost_ranks"}
"""A module's name, if it is not the benchmark's: Python puts this folder into `sys.path`, where
`kernels` would stand for a package that transformers looks for, and the others for tests."""


def build_parser(words: list[str]) -> argparse.ArgumentParser:
    """The parser for a command line. Only the benchmark that it names is imported."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__)
    commands = parser.add_subparsers(metavar="NAME", required=True)
    for name, help_text in BENCHMARKS.items():
        command = commands.add_parser(name, help=help_text)
        if words[:1] == [name]:
            module = importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(words: list[str]) -> int:
    """Runs one benchmark; returns its exit code."""
    args = build_parser(words).parse_args(words)
    try:
        return int(args.run(args))
    except TPEngineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # contexts end what they have started
    sys.exit(main(sys.argv[1:]))
