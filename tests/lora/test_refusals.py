"""What an adapter may not be: its request fails alone, and the message says what does not fit."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import NUM_TOKENS, Adapters, open_engine, write_adapter
from support.engines import greedy, run
from support.messages import refused
from support.models import ModelShop
from support.tiny_llama import TinyLlama, edit_json

from tpengine import LLMEngine, LoRARequest
from tpengine.checkpoint import adapter_files
from tpengine.errors import InvalidAdapterError, InvalidPromptError, InvalidSamplingParamsError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def engine(eight: Adapters) -> Iterator[LLMEngine]:
    with open_engine(eight.base, tp_size=2, max_lora_rank=16, max_loras=1) as engine:
        yield engine


@pytest.fixture
def folder(eight: Adapters, tmp_path: Path) -> Path:
    """A copy of an adapter of rank 8."""
    return shutil.copytree(eight.requests["rank8"].lora_path, tmp_path / "adapter")


def refusal(engine: LLMEngine, folder: Path) -> str:
    request = LoRARequest("bad", 9, str(folder))
    with pytest.raises(InvalidAdapterError) as raised:
        engine.add_request("bad", None, lora_request=request, prompt_token_ids=[5])
    assert not engine.has_unfinished_requests()
    assert str(folder) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "all"), ("modules_to_save", ["lm_head"]), ("use_dora", True), ("lora_bias", True),
        ("target_parameters", ["mlp.experts.gate_up_proj"]), ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]), ("alora_invocation_tokens", [5]), ("use_qalora", True),
        ("arrow_config", {"top_k": 1}), ("megatron_config", {"tp": 2}), ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "loftq"),
        ("a_key_of_tomorrow", 1),
    ],
)  # fmt: skip
def test_field_that_changes_forward(engine: LLMEngine, folder: Path, key: str, value: Any) -> None:
    edit_json(folder / CONFIG, lambda config: config.update({key: value}))
    words = f"cannot be served: {key} = {value!r} in adapter_config.json is not served"
    assert refusal(engine, folder).endswith(words)


def test_fields_that_change_nothing(engine: LLMEngine, folder: Path) -> None:
    harmless = {
        "lora_dropout": 0.5,
        "fan_in_fan_out": True,
        "init_lora_weights": "gaussian",
        "loftq_config": {"loftq_bits": 4},
        "a_key_of_tomorrow": None,
        "another": [],
    }
    edit_json(folder / CONFIG, lambda config: config.update(harmless))
    assert engine.add_lora(LoRARequest("good", 1, str(folder)))


TENSORS: list[tuple[str, torch.Tensor | None, str]] = [
    (f"{Q}.lora_B.weight", None, "lora_B of .*q_proj is missing, and must be"),
    (f"{Q}.lora_A.weight", torch.zeros(7, 128), r"is \[7, 128\], and must be \[8, 128\]"),
    (f"{Q}.lora_B.weight", torch.zeros(255, 8), r"is \[255, 8\], and must be \[256, 8\]"),
    (f"{Q}.lora_A.weight", torch.full((8, 128), math.nan), "has NaN or infinite numbers$"),
    (f"{Q}.lora_B.weight", torch.full((256, 8), math.inf).half(), "has NaN or infinite numbers$"),
    (f"{Q}.lora_B.weight", torch.ones(256, 8).to(torch.int8), "is I8, and must be F32, F16, BF16$"),
    (f"{Q}.lora_magnitude_vector", torch.ones(256), "is of no linear layer"),
    (f"{Q.replace('.0.', '.7.')}.lora_A.weight", torch.zeros(8, 128), "is of no linear layer"),
    ("base_model.model.lm_head.lora_A.weight", torch.zeros(8, 128), "is of no linear layer"),
    ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(8), "of no linear layer"),
]
"""Tensors that an adapter has instead of its own, or None: it lacks them."""


@pytest.mark.parametrize(("name", "value", "words"), TENSORS)
def test_tensors_that_do_not_fit(
    engine: LLMEngine, folder: Path, name: str, value: torch.Tensor | None, words: str
) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), folder / WEIGHTS)
    shown = name.removeprefix("base_model.model.") if "of no" in words else "(?=.*q_proj)"
    with pytest.raises(InvalidAdapterError, match=f"(?s){shown}.*{words}"):
        engine.add_lora(LoRARequest("bad", 9, str(folder)))


def test_other_base(engine: LLMEngine, models: ModelShop, tmp_path: Path, eight: Adapters) -> None:
    write_adapter(models.folder(TinyLlama(hidden_size=96)), tmp_path / "other", 1)
    text = refusal(engine, tmp_path / "other")
    assert "lora_A of model.layers.0.self_attn.q_proj is [8, 96], and must be [8, 128]" in text
    assert text.endswith("more")  # there are more than a message names
    write_adapter(models.folder(TinyLlama(num_layers=3)), tmp_path / "deeper", 1)
    assert "layers.2.mlp.down_proj.lora_A.weight is of no" in refusal(engine, tmp_path / "deeper")
    wide = Path(eight.requests["rank64"].lora_path)
    assert "is 64, and must be from 1 to max_lora_rank = 16" in refusal(engine, wide)


def test_fields_and_tensors_that_contradict_each_other(engine: LLMEngine, folder: Path) -> None:
    path = folder / CONFIG
    edit_json(path, lambda config: config.update(target_modules=["k_proj", "v_proj"]))
    assert "q_proj has tensors, but the fields of adapter_config.json" in refusal(engine, folder)
    edit_json(path, lambda config: config.update(target_modules=["nothing"]))
    save_file({}, folder / WEIGHTS)
    assert "it has no layer of this model" in refusal(engine, folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (CONFIG, None, "No such file"),
        (WEIGHTS, None, "No such file"),
        (CONFIG, b"{", "JSONDecodeError"),
        (CONFIG, b"[]", "damaged, or a field has a wrong type"),
        (CONFIG, b'{"r": "x", "target_modules": "all-linear"}', "damaged"),
        (CONFIG, b'{"r": 8, "lora_alpha": 8, "target_modules": "("}', "damaged"),
        (
            CONFIG,
            b'{"r": 8.5, "lora_alpha": 8, "target_modules": "all-linear"}',
            "cannot be interpreted as an integer",
        ),
        (
            CONFIG,
            b'{"r": 8, "lora_alpha": 1e999, "target_modules": "all-linear"}',
            "the scaling of model.layers.0.self_attn.q_proj is inf; lora_alpha must be finite",
        ),
        (CONFIG, b"[" * 100_000, "RecursionError"),
        (WEIGHTS, b"", "SafetensorError"),
        (WEIGHTS, b"\xff" * 64, "damaged"),
    ],
)
def test_damaged_files(
    engine: LLMEngine, folder: Path, file: str, content: bytes | None, words: str
) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert words in refusal(engine, folder)


def test_files_of_other_kinds(engine: LLMEngine, folder: Path) -> None:
    """Half a file, a pickle, a pipe."""
    tensors = folder / WEIGHTS
    tensors.write_bytes(tensors.read_bytes()[:-4])
    assert "file not fully covered" in refusal(engine, folder)
    tensors.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, a pickle, which can run code" in refusal(engine, folder)
    os.mkfifo(tensors)
    assert "no regular file" in refusal(engine, folder)


@pytest.mark.parametrize(
    ("place", "values", "words"),
    [
        (0, ("", None, 5), "lora_name must be a text"),
        (1, (0, "1", 1.0, True, None), "lora_int_id must be a"),
        (2, ("", None, 5, b"/a", ["/a"]), "lora_path of 'a' must name its folder"),
        (4, (4096,), "long_lora_max_len"),
    ],
)
def test_fields_of_a_request_for_an_adapter(place: int, values: Any, words: str) -> None:
    for value in values:
        fields = ["a", 1, "/a", None, None]
        fields[place] = value
        with refused((InvalidPromptError, InvalidSamplingParamsError), words):
            LoRARequest(*fields)


def test_what_is_no_request_for_an_adapter(engine: LLMEngine, folder: Path) -> None:
    for bad in ("name", ["name"], 5):
        with pytest.raises(InvalidAdapterError, match="must be a LoRARequest"):
            engine.add_request("bad", None, lora_request=bad, prompt_token_ids=[5])  # type: ignore[arg-type]
    request = LoRARequest("a", 1, folder)  # type: ignore[arg-type]
    assert (request.lora_path, engine.add_lora(request)) == (str(folder), True)
    for path in ("/\0", "/\ud800", None):  # as a script may change it later
        request.lora_path = path  # type: ignore[assignment]
        with pytest.raises(InvalidAdapterError, match="cannot be read"):
            engine.add_lora(request)


def test_a_rank_that_cannot_load_an_adapter(
    engine: LLMEngine, folder: Path, eight: Adapters
) -> None:
    """It was checked, and then its files change: its requests end alone, and those that run go on;
    with the old files back it is served."""
    path, request = folder / CONFIG, LoRARequest("late", 5, str(folder))
    jobs = eight.jobs(["rank8", None], [20])
    expected = [answer.token_ids for answer in eight.answers(jobs)]
    (_, prompt), (_, other) = jobs
    for changes in (True, False):
        engine.add_request(
            "late", None, greedy(NUM_TOKENS), lora_request=request, prompt_token_ids=prompt
        )
        engine.add_request("bare", None, greedy(NUM_TOKENS), prompt_token_ids=other)
        text = path.read_text()
        if changes:
            path.write_text(json.dumps(json.loads(text) | {"lora_alpha": 1}))
        done = {output.request_id: output for output in run(engine) if output.finished}
        path.write_text(text)
        assert done["bare"].outputs[0].token_ids == expected[1]
        assert (done["late"].outputs[0].finish_reason == "error") == changes
        assert ("have changed" in (done["late"].error or "")) == changes
    assert done["late"].outputs[0].token_ids == expected[0]
    assert done["late"].num_cached_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"(\w|\.|[a-z])*[!?]"},
        {"exclude_modules": r"(.|\w)*(.|\w)*[!?]"},
        {"rank_pattern": {r"((\w|.)(\w|.))*[!?]": 8}},
        {"layers_to_transform": [0], "layers_pattern": r"(\w|\.|[a-z])*[!?]"},
    ],
    ids=str,
)
def test_patterns_that_match_for_ever(
    engine: LLMEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(adapter_files, "_PATTERNS_S", 0.05)
    edit_json(folder / CONFIG, lambda config: config.update(fields))
    words = "takes more than 0.05 s of a processor; write a simpler pattern, or list the layers"
    assert refusal(engine, folder).endswith(words)
