"""Benchmarks say what they ran, refuse what they cannot measure, and count each step once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.engines import greedy, make_engine
from support.models import ModelShop
from support.programs import Cli
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN

from tpengine.bench import latency, perplexity
from tpengine.bench.harness import describe_run
from tpengine.bench.throughput import run_once
from tpengine.engine_args import EngineArgs
from tpengine.worker.device import resolve_dtype

W4A16 = Path(__file__).parent.parent / "data" / "quantized" / "w4a16"
ENGINE = ["--dtype", "float32", "--device", "cpu", "--cpu-kv-cache-space", "0.02"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("throughput", ["--num-requests", "2", "--runs", "1"]),
        ("latency", ["--batch-sizes", "1,2", "--input-len", "5", "--output-len", "4"]),
        ("latency", ["--batch-sizes", "2", "--output-len", "4", "--quantization", "int8"]),
        ("latency", ["--batch-sizes", "2", "--output-len", "4", "--trace", "trace"]),
    ],
)
def test_report_says_what_was_run(
    models: ModelShop, monkeypatch: Any, cli: Cli, tmp_path: Path, name: str, options: list[str]
) -> None:
    words = ["bench", name, "--model", str(models.folder(PLAIN)), *options, *ENGINE]
    monkeypatch.setattr(sys, "argv", ["/some/where/tpengine", *words])
    monkeypatch.setattr(latency.ReadBandwidth, "measure", lambda *_: 1e10)
    monkeypatch.chdir(tmp_path)
    shown = cli(*words).out
    assert re.search(rf"^command +tpengine {re.escape(' '.join(words))}$", shown, re.MULTILINE)
    if name == "throughput":
        for head in ("machine", "commit", "model", "requests", "step, ms", "outside the model"):
            assert re.search(f"^{head}", shown, re.MULTILINE), shown
        for head in ("output", "prefill"):
            match = re.search(rf"^{head} tokens/s +(\S+)", shown, re.MULTILINE)
            assert float(match[1]) > 0
    kind = "int8" if "int8" in options else "none"
    line = rf"^settings +device cpu, dtype float32, quantization {kind}$"
    assert re.search(line, shown, re.MULTILINE), shown
    assert [p.name for p in tmp_path.iterdir()] == ["trace-2.json.gz"] * ("--trace" in options)


def test_settings_are_resolved() -> None:
    dtype = str(resolve_dtype("auto", "cpu")).removeprefix("torch.")
    args = EngineArgs(device="cpu", quantization="int8")
    assert describe_run(args) == f"device cpu, dtype {dtype}, quantization int8"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-sizes", "1,9", "--max-num-seqs", "8"], ("'9'", "max_num_seqs = 8")),
        (["--batch-sizes", "1,x"], ("'x'", "from 1 to")),
        (["--batch-sizes", "0"], ("'0'", "from 1 to")),
        (["--batch-sizes", ""], ("''", "from 1 to")),
        (["--output-len", "1"], ("output_len must be at least 2", "got 1; the first token")),
        (["--trace", "/no/such/folder/trace"], ("--trace", "no folder /no/such/folder; make it")),
        (["--input-len", "0"], ("input_len must be at least 1", "got 0")),
        (
            ["--batch-sizes", "8", "--output-len", "2", "--max-num-batched-tokens", "32"],
            ("8 sequences of 64 + 2", "raise --output-len"),
        ),
    ],
)
def test_latency_refuses(
    models: ModelShop, cli: Cli, options: list[str], words: tuple[str, ...]
) -> None:
    model = ["--model", str(models.folder(PLAIN))]
    shown = cli("bench", "latency", *model, *options, *ENGINE, code=1).err
    assert "ConfigError" in shown
    for word in words:
        assert word in shown


@pytest.mark.parametrize("name", ["latency", "serve"])
def test_a_plot_that_cannot_be_made_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = cli("bench", name, "--model", "/no/such/folder", "--plot", "plot.png", code=1).err
    assert "--plot needs matplotlib, which is not installed" in refused


def test_what_a_decode_step_reads(models: ModelShop) -> None:
    """All layers, and a tied head, of which a CPU may have a packed copy; no rotary angles."""
    folder = models.folder(PLAIN)
    with make_engine(folder) as engine, safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
        [ledger] = engine.stats().ledgers
    assert stored <= ledger.read_bytes < ledger.weights_bytes
    assert ledger.read_bytes < 1.05 * stored  # outputs are padded


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_head_is_read_once_tied_or_not(models: ModelShop, quantization: str) -> None:
    """A tied head is the table itself; a table of its own is not read."""
    read, held = [], []
    for tied in (True, False):
        folder = models.folder(TinyLlama(64, 4, 2, tied=tied))
        with make_engine(folder, quantization=quantization) as engine:
            read += [ledger.read_bytes for ledger in engine.stats().ledgers]
            held.append(sum(engine.get_weights_bytes()))
    assert read[0] == read[1]
    assert held[0] < held[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_variants_of_a_quantized_folder(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant that is refused does not end the run: here the CPU refuses a GPU's KV cache."""
    monkeypatch.setattr(perplexity, "detect_device", lambda wanted: device)
    args = EngineArgs(str(W4A16), device="cpu", cpu_kv_cache_space=0.02, max_model_len=64)
    base = perplexity.print_variants(args, [list(range(3, 40))])
    lines = {line[:23].rstrip(): line[23:] for line in capsys.readouterr().out.splitlines()}
    assert lines["float32"].startswith(f" loss {base:.5f}")
    ends = {
        "float32": "dequantised to float32",
        "bfloat16": "4 bits as stored",
        "bfloat16 int4-g128": "dequantised to bfloat16, then rounded to int4-g128, calibrated",
    }
    for name, end in ends.items():
        assert lines[name].endswith(f" %)   {end}")
    assert len(lines) == 7
    if device == "cpu":
        assert lines["bfloat16, int8 KV cache"].endswith("4 bits as stored")
    else:
        assert "refused: kv_cache_dtype = 'fp8' has" in lines["bfloat16, fp8 KV cache"]


def test_a_step_is_counted_once(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that only reports what was aborted has no figures of its own."""
    with make_engine(models.folder(PLAIN)) as engine:
        step, calls = engine.step, []

        def step_and_abort() -> object:
            outputs = step()
            calls.append(outputs)
            if len(calls) == 3:
                engine.abort_request("0")
            return outputs

        monkeypatch.setattr(engine, "step", step_and_abort)
        result = run_once(engine, [([5, 6, 7], 9)], greedy())
    assert len(calls) == 4
    assert result.output_rate == pytest.approx(3 / result.elapsed_s)
    assert [stats.num_output_tokens for stats in result.steps] == [1, 1, 1]
    assert sum(stats.num_prefill_tokens for stats in result.steps) == 3
