"""tpengine beside llama.cpp, its fork ik_llama.cpp, OpenVINO GenAI and vLLM's CPU build: decode and
prefill, side by side.

Each engine runs in a process of its own, with two threads, and is installed into an environment of
its own in `.cache` by the first run (llama.cpp is compiled for this machine). Every run serves the
same requests in all engines in turn, with new token ids; which of them begins changes. A ratio is
the median of the ratios of the runs.

Engines are `tpengine:FORM` (bf16, int8 and int4 of the weights in 16 bits; a GGUF file by its type,
or `stored`, the file that the model came in, both by default options), `vllm:bf16`, and by the type
of a GGUF file `llama.cpp:TYPE`, `ik_llama.cpp:TYPE` and `openvino:TYPE`. A case is
`decode:STREAMS`, after prompts of 16 tokens, or `prefill:PROMPTSxTOKENS`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import third_party
from tqdm import tqdm

from benchmarks.peer_files import CACHE, ModelFiles
from tpengine.bench.harness import Workload, median_of, report_head
from tpengine.errors import ConfigError, EngineError

_PROMPT_TOKENS = 16
_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("engine_process.py")
_START_S, _ANSWER_S, _END_S = 900.0, 600.0, 10.0
_FORMS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
_OURS = "tpengine:bf16,tpengine:int8,tpengine:int4"
_DEFAULTS = {
    "llama-1.1b": (
        f"{_OURS},llama.cpp:BF16,llama.cpp:Q8_0,llama.cpp:Q4_0,ik_llama.cpp:Q8_0,ik_llama.cpp:Q4_0,"
        "vllm:bf16",
        "decode:1,decode:16",
    ),
    "smollm2": (
        f"{_OURS},tpengine:stored,llama.cpp:stored,ik_llama.cpp:stored,openvino:stored",
        "decode:1,decode:8,decode:32,prefill:1x512,prefill:1x2048,prefill:1x8000",
    ),
    "llama-124m": (
        f"{_OURS},vllm:bf16",
        "decode:1,decode:8,decode:32,prefill:4x512,prefill:4x2048",
    ),
}
"""Engines and cases by model: together the table of docs/figures.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the engines, the cases and the number of runs."""
    add = parser.add_argument
    models = "shapes of `tpengine bench`, embedded or smollm2, separated by commas"
    add("--models", default=",".join(_DEFAULTS), help=f"{models} (default: %(default)s)")
    other = "; default: those of the models above, and those of llama-124m for others"
    add("--engines", help=f"engines, separated by commas{other}")
    add("--cases", help=f"cases, separated by commas{other}")
    add("--output-tokens", type=int, default=65, help="of a stream (default: %(default)s)")
    add("--runs", type=int, default=5, help="runs of each case (default: %(default)s)")


@dataclass(frozen=True)
class Case:
    """What is measured: the decode of some streams, or the computation of some prompts."""

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, name: str, output_tokens: int) -> Case:
        """Reads a word of `--cases`.

        Raises:
            ConfigError: the text names no case.
        """
        kind, _, size = name.partition(":")
        counts = [int(word) for word in size.split("x") if word.isdecimal() and int(word) > 0]
        if kind == "decode" and len(counts) == 1:
            return cls(name, counts[0], _PROMPT_TOKENS, output_tokens)
        if kind == "prefill" and len(counts) == 2:
            return cls(name, counts[0], counts[1], 1)
        wanted = "decode:STREAMS or prefill:PROMPTSxTOKENS"
        raise ConfigError(f"--cases must name {wanted}; got {name!r}")

    def workload(self, seed: str, is_warm_up: bool = False) -> Workload:
        """Requests with token ids that the seed decides, all below 1000."""
        rng = random.Random(seed)
        output_tokens = min(4, self.output_tokens) if is_warm_up else self.output_tokens
        return [
            ([rng.randrange(5, 1000) for _ in range(self.prompt_tokens)], output_tokens)
            for _ in range(self.num_requests)
        ]

    def rate(self, answer: dict[str, float]) -> float:
        """Tokens per second: output tokens after the first of each stream, or prompt tokens."""
        if self.output_tokens == 1:
            return self.num_requests * self.prompt_tokens / answer["total_s"]
        num_tokens = answer["tokens"] - answer["first_tokens"]
        return num_tokens / (answer["total_s"] - answer["first_s"])


class EngineProcess:
    """An engine that serves workloads; see `engine_process.py`. It is stopped while it is not
    asked: an idle engine may keep its threads spinning, and take the processors from the others."""

    def __init__(self, name: str, python: str, settings: dict[str, Any]) -> None:
        self.name = name
        self._log = CACHE / "logs" / f"{name.replace(':', '-')}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-P", str(_SCRIPT), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(_ROOT) if python == sys.executable else ""},
            )
        try:
            self.facts: dict[str, Any] = self._read(_START_S)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, workload: Workload) -> dict[str, float]:
        """Serves a workload; returns the answer.

        Raises:
            EngineError: the engine has ended, or does not answer.
        """
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: see `_read`
            self._process.stdin.write(json.dumps(workload).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(_ANSWER_S)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the process and all that it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait(_END_S)

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, patience_s: float) -> dict[str, Any]:
        pipe = self._process.stdout
        ready, _, _ = select.select([pipe], [], [], patience_s)
        line = pipe.readline() if ready else b""
        if not line:
            tail = self._log.read_text(errors="replace")[-600:]
            problem = "has ended" if ready else f"gave no answer for {patience_s:g} s"
            raise EngineError(f"{self.name} {problem}; its log {self._log} ends: {tail}")
        return json.loads(line)


def start_engine(name: str, files: ModelFiles) -> EngineProcess:
    """Installs an engine where it is not yet, and starts it.

    Raises:
        ConfigError: there is no such engine.
        EngineError: it cannot be installed, or does not start.
    """
    engine, _, form = name.partition(":")
    if engine not in _STARTS or not form:
        raise ConfigError(f"--engines must name {', '.join(_STARTS)} and a form; got {name!r}")
    try:
        python, model, options = _STARTS[engine](files, form)
    except pytest.skip.Exception as reason:
        raise EngineError(f"{name} is not here: {reason}") from reason
    return EngineProcess(name, python, {"engine": engine, "model": model, "options": options})


def _start_ours(files: ModelFiles, form: str) -> tuple[str, str, dict[str, Any]]:
    model = files.whole() if form in _FORMS else files.gguf(form)
    return sys.executable, str(model), dict(_FORMS.get(form, {}))


def _start_vllm(files: ModelFiles, form: str) -> tuple[str, str, dict[str, Any]]:
    if form != "bf16":
        raise ConfigError(f"vLLM's CPU build runs bf16 here; got {form!r}")
    return third_party.vllm_python(), str(files.whole()), {"dtype": "bfloat16"}


_STARTS: dict[str, Callable[[ModelFiles, str], tuple[str, str, dict[str, Any]]]] = {
    "tpengine": _start_ours,
    "llama.cpp": lambda files, form: (third_party.llama_cpp_python(), str(files.gguf(form)), {}),
    "ik_llama.cpp": lambda files, form: (third_party.ik_python(), str(files.gguf(form)), {}),
    "openvino": lambda files, form: (third_party.openvino_python(), str(files.gguf(form)), {}),
    "vllm": _start_vllm,
}
"""By engine: what gives its Python, its model and its options for a form."""


@contextlib.contextmanager
def started(names: Sequence[str], files: ModelFiles) -> Iterator[list[EngineProcess]]:
    """The engines that start; prints which do not, and why. Ends them."""
    with contextlib.ExitStack() as stack:
        engines = []
        for name in tqdm(names, desc="engines", unit="engine"):
            try:
                engine = start_engine(name, files)
            except EngineError as error:
                print(f"NOT MEASURED: {error}")
                continue
            stack.callback(engine.close)
            engines.append(engine)
        yield engines


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table per case."""
    print(report_head(None), flush=True)
    for model in args.models.split(","):
        engines, cases = _DEFAULTS.get(model, _DEFAULTS["llama-124m"])
        parsed = [Case.parse(word, args.output_tokens) for word in (args.cases or cases).split(",")]
        _run_model(model, (args.engines or engines).split(","), parsed, args.runs)
    return 0


def _run_model(model: str, names: list[str], cases: list[Case], runs: int) -> None:
    with started(names, ModelFiles(model)) as engines:
        versions = {engine.name.split(":")[0]: str(engine.facts["version"]) for engine in engines}
        print(f"\n{model}: {', '.join(f'{name} {it}' for name, it in versions.items())}")
        for case in cases if engines else []:
            rates = measure(case, engines, runs)
            print(f"\n{model} {case.name}, tokens/s")
            for name, measured in rates.items():
                print(f"{name:<18} {median_of(measured, _ratios(name, rates), 1)}", flush=True)


def measure(case: Case, engines: list[EngineProcess], runs: int) -> dict[str, list[float]]:
    """The rates of every run by engine. Prints which engine failed, and leaves it out."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in tqdm(range(-1, runs), desc=case.name, unit="run"):  # -1: the warm-up
        workload = case.workload(f"{case.name}:{number}", is_warm_up=number < 0)
        turn = number % len(engines)
        for engine in engines[turn:] + engines[:turn]:
            if engine.name in rates:
                try:
                    rate = case.rate(engine.ask(workload))
                except EngineError as error:
                    print(f"NOT MEASURED in {case.name}: {error}")
                    del rates[engine.name]
                else:
                    rates[engine.name] += [rate] if number >= 0 else []
    return rates


def _ratios(name: str, rates: dict[str, list[float]]) -> str:
    """What to print behind a rate: for each engine of ours the median of its ratios to this."""
    own = [n for n in rates if n.startswith("tpengine") and n != name]
    medians = [f"{n.split(':')[1]} {_median_ratio(rates[n], rates[name]):.2f} x" for n in own]
    return f"; tpengine: {', '.join(medians)} that" if medians else ""


def _median_ratio(upper: list[float], lower: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))
