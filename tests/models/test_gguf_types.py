"""GGUF files of llama.cpp's own converter and quantizer: types x architectures.

`pytest -m "check or soak" -s tests/models/test_gguf_types.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import llama_cpp_tools, third_party
from support.oracle import Oracle
from support.subjects import BY_NAME, Subject, assert_equal_to_oracle, generate

from models.test_gguf import MODELS, make_model
from tpengine.checkpoint.gguf_weights import read_tensors

pytestmark = pytest.mark.timeout(3000)
WIDE = {
    "vocab_size": 320,
    "intermediate_size": 512,
    "n_inner": 1024,
    "n_embd": 256,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    "hidden_size": 256,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 448),
}
"""Rows of K types have blocks of 256 values."""
SCRIPT = str(llama_cpp_tools.__file__)
PROMPT_LENGTHS = (100, 30, 7)


CHECKED = {"llama": llama_cpp_tools.FILE_TYPES, "qwen3": ["Q8_0", "Q4_K", "Q6_K"]}
"""What most files have: of these two families every type on one, and three on the other."""


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [pytest.param(*case, marks=pytest.mark.check) for case in CHECKED.items()]
    + [
        pytest.param(model_type, llama_cpp_tools.FILE_TYPES, marks=pytest.mark.soak)
        for model_type in MODELS
        if CHECKED.get(model_type) is not llama_cpp_tools.FILE_TYPES
    ],
)
def test_types(model_type: str, kinds: Iterable[str], tmp_path: Path) -> None:
    packages = third_party.gguf_packages()
    wide = dict(WIDE)
    if model_type in ("bloom", "gpt2"):
        wide["intermediate_size"] = None
    if "head_dim" in MODELS[model_type]:
        wide["head_dim"] = 128
    folder = make_model(model_type, tmp_path / "hf", **wide)
    vocab = {str(i): i for i in range(320)}  # Gemma's converter counts it
    vocabulary = json.dumps({"model": {"vocab": vocab}, "added_tokens": []})
    (folder / "tokenizer.json").write_text(vocabulary)
    whole = tmp_path / "F32.gguf"
    source = third_party.converter()
    run([sys.executable, SCRIPT, "convert", source, str(folder), str(whole)], packages)
    paths = [whole, *(tmp_path / f"{kind}.gguf" for kind in kinds)]
    quantize = [third_party.quantizer(), "--pure"]
    for path in paths[1:]:
        number = llama_cpp_tools.FILE_TYPES[path.stem]
        run([*quantize, str(whole), str(path), str(number), "1"])
    run([sys.executable, SCRIPT, "read", str(folder), *map(str, paths)], packages)
    cells: dict[str, list[str]] = {}
    for path in paths:
        cells.setdefault(compare(path, folder), []).append(path.stem)
    row = "; ".join(f"{', '.join(kinds)}: {says}" for says, kinds in cells.items())
    print(f"\n| {model_type} | {row} |")


def run(command: list[str], packages: str = "") -> None:
    options = {"check": False, "timeout": 300, "capture_output": True, "text": True}
    done = subprocess.run(command, env={"PYTHONPATH": packages}, **options)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(path: Path, folder: Path) -> str:
    """Compares a file with transformers; returns what the table says."""
    state = load_file(folder / "model.safetensors")
    values = {name: source[:] for _, name, source in read_tensors(str(path), state)}
    assert values.keys() == state.keys()
    if path.stem == "F32":
        for name, tensor in state.items():
            torch.testing.assert_close(values[name], tensor, atol=1e-6, rtol=0, msg=name)
    says = "own weights"  # transformers lacks the architecture, or the type
    if path.with_suffix(".theirs").exists():
        theirs = load_file(path.with_suffix(".theirs"))
        both = values.keys() & theirs.keys()
        for name in both:
            torch.testing.assert_close(values[name], theirs[name], atol=1e-6, rtol=0, msg=name)
        says = "weights" if both == values.keys() else f"{len(both)} of {len(values)} weights"
    target = path.with_suffix("")
    target.mkdir()
    save_file({k: v.contiguous() for k, v in values.items()}, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    oracle = Oracle(target)
    prompts = oracle.prompts(PROMPT_LENGTHS, seed=1)
    subject = Subject(BY_NAME["llama-biases"], path, oracle, prompts)
    outputs = generate(subject, logprobs=1)
    assert_equal_to_oracle(subject, outputs)
    for answer, output in zip(oracle.answers(prompts), outputs, strict=True):
        ids = torch.tensor(answer.token_ids)[:, None]
        expected = float(answer.logprobs.gather(1, ids).mean())
        mean = output.cumulative_logprob / len(answer.token_ids)
        assert abs(math.exp(mean - expected) - 1) < 1e-3, "perplexity"
    return says
