"""GGUF files of llama.cpp's own converter and quantizer: types x architectures.

`pytest -m check -s tests/models/test_gguf_types.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import llama_cpp_tools, third_party
from support.oracle import Oracle
from support.subjects import BY_NAME, Subject, assert_equal_to_oracle, generate

from models.test_gguf import MODELS, make_model
from tpengine.config import ARCHITECTURES, architecture_of
from tpengine.model_files import read_hf_config
from tpengine.models.gguf import read_tensors

pytestmark = [pytest.mark.check, pytest.mark.timeout(3000)]
WIDE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "n_embd": 256,
    "n_inner": 1024,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 448),
}
"""Rows of K types have blocks of 256 values."""
SCRIPT = str(llama_cpp_tools.__file__)
PROMPT_LENGTHS = (100, 30, 7)


@pytest.fixture(name="tools", scope="module")
def tools_fixture() -> tuple[str, str, str]:
    return third_party.llama_cpp()


@pytest.mark.parametrize("model_type", MODELS)
def test_types(model_type: str, tools: tuple[str, str, str], tmp_path: Path) -> None:
    python, source, packages = tools
    wide = {**WIDE, "intermediate_size": None} if model_type in ("bloom", "gpt2") else WIDE
    folder = make_model(model_type, tmp_path / "hf", **wide)
    vocab = {str(i): i for i in range(320)}  # Gemma's converter counts it
    vocabulary = json.dumps({"model": {"vocab": vocab}, "added_tokens": []})
    (folder / "tokenizer.json").write_text(vocabulary)
    whole = tmp_path / "model.gguf"
    subprocess.run(
        [sys.executable, SCRIPT, "convert", source, str(folder), str(whole)],
        env={"PYTHONPATH": packages},
        check=True,
        timeout=300,
        capture_output=True,
    )
    subprocess.run(
        [python, SCRIPT, "quantize", str(whole)], check=True, timeout=300, capture_output=True
    )
    cells = []
    for kind in ("F32", *llama_cpp_tools.FILE_TYPES):
        path = whole if kind == "F32" else whole.with_suffix(f".{kind}.gguf")
        cells.append(f"{kind} {compare(path, folder, tmp_path / kind, packages)}")
    print(f"\n| {model_type} | {' | '.join(cells)} |")


def compare(path: Path, folder: Path, target: Path, packages: str) -> str:
    """Compares a file with transformers; returns what the table says."""
    state = load_file(folder / "model.safetensors")
    found = {name: source[:] for _, name, source in read_tensors(str(path), state)}
    assert found.keys() == state.keys()
    if target.name == "F32":
        for name, tensor in state.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0, msg=name)
    target.mkdir()
    save_file({k: v.contiguous() for k, v in found.items()}, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    oracle = Oracle(target)
    read = subprocess.run(
        [sys.executable, SCRIPT, "read", str(path), str(target / "theirs")],
        env={"PYTHONPATH": packages},
        check=False,
        timeout=300,
        capture_output=True,
    )
    says = "own weights"  # transformers lacks the architecture, or the type
    if read.returncode == 0:
        says = "weights"
        theirs = load_file(target / "theirs")
        for name in found.keys() & theirs.keys():
            torch.testing.assert_close(found[name], theirs[name], atol=1e-6, rtol=0, msg=name)
    if architecture_of(read_hf_config(str(path), False)) not in ARCHITECTURES:
        return says
    prompts = oracle.prompts(PROMPT_LENGTHS, seed=1)
    subject = Subject(BY_NAME["llama-biases"], path, oracle, prompts)
    outputs = generate(subject, logprobs=1)
    assert_equal_to_oracle(subject, outputs)
    for answer, output in zip(oracle.answers(prompts), outputs, strict=True):
        ids = torch.tensor(answer.token_ids)[:, None]
        expected = float(answer.logprobs.gather(1, ids).mean())
        found = output.cumulative_logprob / len(answer.token_ids)
        assert abs(math.exp(found - expected) - 1) < 1e-3, "perplexity"
    return f"{says}, ids"
