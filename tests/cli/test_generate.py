"""`tpengine generate`: prompts of each source, text on stdout, errors on stderr, signals."""

from __future__ import annotations

import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patches import fail_at
from support.programs import Cli, err_of_interrupted
from support.small_llavas import PNG, write_llava

from tpengine import LLM, LLMEngine, SamplingParams
from tpengine.errors import EngineDeadError

SMALL = ["--cpu-kv-cache-space", "0.05", "--max-model-len", "512"]
GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32", *SMALL]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def completion(llm: LLM) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a terminal at which nothing is typed."""
    stdin = io.StringIO()
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.mark.parametrize(
    ("words", "num_shown"),
    [
        ([PROMPT], 1),
        # After an option of one or more numbers.
        (["--cpu-kv-cache-space", "0.05", PROMPT, PROMPT], 2),
        (["--file", "prompts.txt"], 2),
        (["--file", "-"], 1),
        ([], 1),
    ],
    ids=str,
)
def test_where_prompts_come_from(
    words: list[str], num_shown: int, completion: str, tmp_path: Path, monkeypatch: Any, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text(f"{PROMPT}\n\n{PROMPT}\n")
    shown = cli("generate", *GREEDY, *words, typed=None if PROMPT in words else f"{PROMPT}\n")
    assert shown.out == f"{PROMPT}{completion}\n\n" * num_shown


def test_without_a_prompt_there_is_an_example(cli: Cli) -> None:
    assert cli("generate", *GREEDY).out.startswith("Hello, my name is")


def test_sampling_options(cli: Cli) -> None:
    def show(*options: str) -> str:
        return cli("generate", PROMPT, "--max-tokens", "24", *options, *SMALL).out

    hot = ["--temperature", "3"]
    first, again, other = (show(*hot, "--sampling-seed", seed) for seed in "112")
    assert first == again != other
    greedy = show("--temperature", "0")
    assert show(*hot, "--top-k", "1") == greedy
    assert show(*hot, "--top-p", "1e-9", "--min-p", "1") == greedy
    stop = greedy[len(PROMPT) + 8 : len(PROMPT) + 13]
    cut = show("--temperature", "0", "--stop", stop)
    assert cut.strip() == greedy[: greedy.index(stop, len(PROMPT))].strip()
    assert show(*hot, "--structured-outputs", '{"choice": [" yes"]}').strip() == f"{PROMPT} yes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], ("ModelLoadError", "/nowhere")),
        (["--temperature", "nan"], ("InvalidSamplingParamsError", "temperature", "nan")),
        (["--fully_sharded_loras"], ("ConfigError", "fully_sharded_loras", "divide the layer")),
        (["--max-num-seqs", "0"], ("ConfigError", "max_num_seqs", "at least 1")),
        (["--cpu-kv-cache-space", "1,2"], ("ConfigError", "one per rank", "got 2 numbers")),
        (["--file", "/nowhere/at.all"], ("/nowhere/at.all", "cannot be read")),
        # Refused before the weights are looked for, which this model does not have.
        (["--skip-tokenizer-init", "--load-format", "pt"], ("ModelLoadError", "no tokenizer")),
    ],
)
def test_errors_go_to_stderr(arguments: list[str], words: tuple[str, ...], cli: Cli) -> None:
    shown = cli("generate", PROMPT, *SMALL, *arguments, code=1)
    assert shown.out == ""
    (line,) = (line for line in shown.err.splitlines() if line.startswith("tpengine: "))
    assert all(word in line for word in words)
    assert "Traceback" not in shown.err


def test_one_bad_prompt_does_not_stop_the_others(completion: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "prompts").write_bytes(b"no text: \xff\n" + b"a " * 600 + b"\n" + PROMPT.encode())
    shown = cli("generate", "--file", str(tmp_path / "prompts"), *GREEDY, code=1)
    assert shown.out.endswith(f"{PROMPT}{completion}\n\n")
    assert "line 1 of" in shown.err
    assert "is not UTF-8" in shown.err
    assert "max_model_len = 512" in shown.err


def test_the_death_of_the_engine_ends_the_line(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    fail_at(monkeypatch, LLMEngine, "step", 4, EngineDeadError("gone"))
    shown = cli("generate", PROMPT, *GREEDY, code=1).out
    assert len(shown) > len(PROMPT) + 1
    assert shown.endswith("\n")


def test_an_interrupt_prints_how_many_prompts_are_finished(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    fail_at(monkeypatch, LLM, "stream", 4, KeyboardInterrupt())
    shown = cli("generate", PROMPT, "a " * 600, *[PROMPT] * 3, *GREEDY, code=130)
    assert shown.err.endswith("\ntpengine: interrupted; 2 of 5 prompts finished, 1 failed\n")
    assert shown.out.endswith("\n")


@pytest.mark.parametrize(
    ("sent", "interrupt"),
    [
        (signal.SIGTERM, signal.SIG_IGN),
        pytest.param(signal.SIGINT, signal.default_int_handler, marks=pytest.mark.soak),
    ],
)
def test_signals_end_the_command_in_order(sent: signal.Signals, interrupt: Any) -> None:
    """A shell's background jobs ignore Ctrl-C, but must end on SIGTERM."""
    endless = ["generate", *201 * [PROMPT], *SMALL, "--max-tokens", "9999", "--ignore-eos"]
    err = err_of_interrupted(endless, PROMPT, sent, interrupt)
    assert re.search(r"\ntpengine: interrupted; \d+ of 201 prompts finished\n$", err)


def test_pictures_of_prompts(tmp_path: Path, cli: Cli) -> None:
    folder, file = write_llava(tmp_path), tmp_path / "cat.png"
    file.write_bytes(PNG)
    model = ["--model", str(folder), *GREEDY, "--max-model-len", "128"]
    shown = cli("generate", "ab <image> ab", "ab", "--image", str(file), *model).out
    shown += cli("generate", "ab", "--chat", "--image", str(file), *model).out
    params, data = SamplingParams(temperature=0.0, max_tokens=12), {"image": [PNG]}
    texts = "ab <image> ab", "<image>ab"
    prompts: Any = [{"prompt": text, "multi_modal_data": data} for text in texts]
    content = [{"type": "image", "image": PNG}, {"type": "text", "text": "ab"}]
    with LLM(folder, dtype="float32", cpu_kv_cache_space=0.05, max_model_len=128) as llm:
        outputs = llm.generate(prompts, params)
        outputs += llm.chat([{"role": "user", "content": content}], params)
    first, second, third = (output.outputs[0].text for output in outputs)
    parts = f"ab <image> ab{first}", f"ab{second}", f"> ab\n{third}"
    assert shown == "".join(f"{part}\n\n" for part in parts)
    refused = cli("generate", "ab", "--image", str(tmp_path), *model, code=1).err
    assert f"the picture '{tmp_path}' cannot be read: " in refused
