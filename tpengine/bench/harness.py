"""What the benchmarks share: model shapes, workloads, options, the head of a report, plots."""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.pooled_outputs import check_generates
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, counted
from tpengine.ops.library import cpu_isa
from tpengine.options import Options, option
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.worker.device import detect_device, resolve_dtype

_MU, _SIGMA = 4.2, 0.9  # of the logarithm: a median of 67 tokens
_MIN_TOKENS, _MAX_TOKENS = 4, 512
_FIRST_ORDINARY_ID = 5

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
"""Parameters of a request whose `max_tokens` the benchmark sets."""
Workload = list[tuple[list[int], int]]
"""(prompt ids, number of output tokens) of each request."""


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPES = {
    "llama-124m": _llama(768, 12, 12, 4, 2048, 32000, False),
    "llama-1.1b": _llama(2048, 16, 32, 8, 8192, 32000, False),
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, True) | {"max_position_embeddings": 8192},
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, True),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, True),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, False) | {"max_position_embeddings": 8192},
}
"""Configurations to run with dummy weights, by name."""


@contextmanager
def shape_folder(name: str, max_positions: int | None = None) -> Iterator[str]:
    """A temporary model folder that holds only the configuration of `SHAPES[name]`.

    Args:
        max_positions: longest sequence, in tokens; None: that of the shape.
    """
    config = dict(SHAPES[name])
    if max_positions is not None:
        config["max_position_embeddings"] = max_positions
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def mixed_requests(
    num_requests: int, vocab_size: int, seed: int, longest: int, run: int = 0
) -> Workload:
    """Requests of mixed lengths.

    Prompt and output lengths are lognormal (median 67, sigma 0.9, 4 to 512, and at most half of
    `longest`); token ids are uniform. `seed` fixes the lengths. The ids differ from run to run, so
    that no run finds its prompts in the prefix cache of an earlier run.
    """
    first_run, later_runs = random.Random(seed), random.Random(f"{seed}:{run}")
    cap = min(_MAX_TOKENS, longest // 2)

    def length() -> int:
        return max(_MIN_TOKENS, min(cap, int(first_run.lognormvariate(_MU, _SIGMA))))

    def ids(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(_FIRST_ORDINARY_ID, vocab_size) for _ in range(count)]

    requests = []
    for _ in range(num_requests):
        prompt = ids(first_run, length())  # also in later runs: the next lengths depend on it
        requests.append((ids(later_runs, len(prompt)) if run else prompt, length()))
    return requests


class BenchOptions(Options):
    """Options of one benchmark."""

    group = "benchmark"

    @classmethod
    def parse(cls, args: argparse.Namespace) -> Self:
        """Takes and checks the fields from parsed command-line arguments.

        Raises:
            ConfigError: a value is outside its limits, the folder of a file to write does not
                exist, or matplotlib is missing for `--plot`.
        """
        options = cls.from_cli_args(args)
        options.check()
        for name in ("plot", "trace", "json"):
            path = getattr(options, name, None)
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise ConfigError(
                    f"--{name} {path}: there is no folder {Path(path).parent}; make it, or name "
                    "another"
                )
        if getattr(options, "plot", None) is not None:
            import_pyplot()
        return options


def numbers(name: str, text: str, fits: Callable[[float], bool], limits: str) -> list[float]:
    """Reads one or more numbers with commas between them.

    Args:
        name: the option.
        limits: which numbers fit, in words.

    Raises:
        ConfigError: a word is not a number that fits.
    """
    values = []
    for word in text.split(","):
        try:
            values.append(float(word))
        except ValueError:
            values.append(math.nan)
        if not fits(values[-1]):
            raise ConfigError(f"{name} must be {limits}; got {word!r}")
    return values


@dataclass
class ModelOptions(BenchOptions):
    """Options of a benchmark of one engine."""

    shape: str | None = option(None, tuple(SHAPES))
    """Run a model of this shape with random weights; default: run the model itself."""


@contextmanager
def model_args(args: argparse.Namespace) -> Iterator[EngineArgs]:
    """The engine's arguments. With `--shape` the model is a temporary folder with dummy weights."""
    engine_args = EngineArgs.from_cli_args(args)
    if args.shape is None:
        yield engine_args
        return
    with shape_folder(args.shape) as folder:
        yield replace(engine_args, model=folder, tokenizer=None, load_format="dummy")


@contextmanager
def bench_engine(args: argparse.Namespace) -> Iterator[tuple[EngineArgs, LLMEngine]]:
    """The engine's arguments, see `model_args`, and an engine with them that logs no statistics."""
    with model_args(args) as engine_args:
        check_generates(engine_args.read_model().pooling)  # before the weights are loaded
        with LLMEngine.from_engine_args(replace(engine_args, disable_log_stats=True)) as engine:
            yield engine_args, engine


def report_head(
    args: EngineArgs | None, results: Mapping[str, str] | None = None, width: int = 20
) -> str:
    """Lines that say what was measured where, and how to repeat it; then the results by name.

    Args:
        args: the engine's arguments; None: the benchmark runs no single engine.
        width: of the column of names, in characters.
    """
    lines = report_facts(args) | dict(results or {})
    return "\n".join(f"{name:<{width}s}{text}" for name, text in lines.items())


def report_facts(args: EngineArgs | None) -> dict[str, str]:
    """What was measured where and when, and how to repeat it; see `report_head`."""
    facts = {
        "machine": describe_machine(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": describe_commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    return facts if args is None else facts | {"settings": describe_run(args)}


def median_of(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """The median with its unit, and every value."""
    listed = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.median(values):.{digits}f}{unit} (all: {listed})"


def describe_run(args: EngineArgs) -> str:
    """Device, dtype and quantization of an engine with these arguments, `auto` resolved."""
    device = detect_device(args.device)
    dtype = str(resolve_dtype(args.dtype, device)).removeprefix("torch.")
    return f"device {device}, dtype {dtype}, quantization {args.quantization or 'none'}"


def describe_machine() -> str:
    """CPU (or GPU), cores, threads, instruction set and torch, in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"{_cpu_name()}, {counted(torch.get_num_threads(), 'thread')}, {cpu_isa()} kernels, "
        f"torch {torch.__version__}"
    )


def describe_commit() -> str:
    """The git commit of the code, marked if files differ from it, or 'unknown'."""
    folder = str(Path(__file__).parent)
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a git checkout)"
    return done.stdout.strip()


def _cpu_name() -> str:
    """The processor's name, with its family: a virtual machine's name says no generation."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value[0].strip() for name, *value in lines if value}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    family = f" (family {facts['cpu family']})" if "cpu family" in facts else ""
    return facts["model name"] + family


def import_pyplot() -> Any:
    """matplotlib's pyplot, set up to write files. A benchmark with `--plot` calls this before it
    measures, so that the error comes before the work.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--plot out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def plot(
    path: str, title: str, size: tuple[float, float], num_panels: int = 1
) -> Iterator[Sequence[Any]]:
    """Panels to draw on, side by side; afterwards they are written to a PNG file.

    Args:
        size: width and height in inches.
    """
    pyplot = import_pyplot()
    figure, (panels,) = pyplot.subplots(1, num_panels, figsize=size, squeeze=False)
    yield panels
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.suptitle(f"{title}, {describe_machine()}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
