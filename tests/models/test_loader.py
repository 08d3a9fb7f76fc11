"""Forms of checkpoints: pickled files, bare models, tied weights that are stored twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import refused, said
from support.subjects import BY_NAME, Subjects, assert_equal_to_oracle, generate, load
from support.tiny_llama import edit_json

from tpengine.checkpoint.loader import checkpoint_files
from tpengine.errors import ModelLoadError

State = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"


@pytest.fixture
def copied(subjects: Subjects, tmp_path: Path) -> Callable[[str], tuple[Path, State]]:
    """A copy of a variant's folder without its weights, and the weights."""

    def copy(name: str) -> tuple[Path, State]:
        folder = shutil.copytree(subjects.folder(BY_NAME[name]), tmp_path / name)
        state = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        return folder, state

    return copy


Copied = Callable[[str], tuple[Path, State]]


def generates_as_before(subjects: Subjects, name: str, folder: Path, **args: Any) -> None:
    subject = subjects(BY_NAME[name])
    moved = type(subject)(subject.variant, folder, subject.oracle, subject.prompts)
    assert_equal_to_oracle(moved, generate(moved, **args))


@pytest.mark.parametrize("is_zip", [True, False], ids=["today", "old torch"])
def test_pickled_weights(subjects: Subjects, copied: Copied, is_zip: bool) -> None:
    folder, state = copied("opt-before")
    torch.save(state, folder / PICKLED, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors files.*load_format='auto'"):
        load(folder, load_format="safetensors")
    generates_as_before(subjects, "opt-before", folder, load_format="pt")
    generates_as_before(subjects, "opt-before", folder)
    save_file({}, folder / WEIGHTS)
    with pytest.raises(ModelLoadError, match="missing: "):  # safetensors are preferred
        load(folder)


def test_pickled_shards_by_their_index(subjects: Subjects, copied: Copied) -> None:
    folder, state = copied("bloom-8-heads")
    weight_map = {}
    for number, part in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / f"{PICKLED}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    generates_as_before(subjects, "bloom-8-heads", folder, load_format="pt")
    weight_map["lm_head.weight"] = "../pytorch_model-0.bin"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"\.\./pytorch_model-0\.bin.*outside"):
        load(folder, load_format="pt")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("content", ["code", "list", "garbage"])
def test_pickle_of_other_than_tensors(content: str, copied: Copied, tmp_path: Path) -> None:
    folder, state = copied("opt-before")
    file = tmp_path / "victim"
    if content == "garbage":
        (folder / PICKLED).write_bytes(b"\x80\x02garbage")
    else:
        torch.save([1] if content == "list" else {**state, "x": Malicious(file)}, folder / PICKLED)
    with pytest.raises(ModelLoadError, match=PICKLED):
        load(folder, load_format="pt")
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("opt-before", "model."), ("bloom-8-heads", "transformer."), ("gpt2-8-heads", "transformer.")],
)
def test_names_of_a_bare_model(name: str, prefix: str, subjects: Subjects, copied: Copied) -> None:
    folder, state = copied(name)
    bare = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    if name.startswith("gpt2"):  # the masks that its published checkpoints hold
        bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    assert bare.keys() != state.keys()
    save_file(bare, folder / WEIGHTS, metadata={"format": "pt"})
    generates_as_before(subjects, name, folder)


def test_tied_head_may_be_there_twice_but_not_differ(subjects: Subjects, copied: Copied) -> None:
    name = "llama-tied-6-to-1"
    folder, state = copied(name)
    assert "lm_head.weight" not in state
    head = state["model.embed_tokens.weight"].clone()
    save_file({**state, "lm_head.weight": head}, folder / WEIGHTS, metadata={"format": "pt"})
    generates_as_before(subjects, name, folder)
    head[-1, -1] += 1
    save_file({**state, "lm_head.weight": head}, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    load(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bloom-8-heads", "transformer.h.0.self_attention.query_key_value.weight"),
        ("phi3-window", "model.layers.0.self_attn.qkv_proj.weight"),
        ("gpt2-8-heads", "transformer.h.0.attn.c_attn.weight"),
    ],
)
def test_fused_projection_of_another_shape(name: str, tensor: str, copied: Copied) -> None:
    folder, state = copied(name)
    whole = state.pop(tensor)
    cut = whole[:-1].contiguous()
    wrong = f"{list(cut.shape)}, the model needs {list(whole.shape)}"
    for tensors, words in (({tensor: cut}, wrong), ({}, f"missing: {tensor}")):
        save_file(state | tensors, folder / WEIGHTS, metadata={"format": "pt"})
        with refused(ModelLoadError, words):
            load(folder)


def test_dummy_weights_of_every_family(subjects: Subjects) -> None:
    names = ("llama-biases", "qwen3-head-dim", "opt-after-projected", "bloom-8-heads")
    for name in (*names, "phi3-partial", "gpt2-8-heads"):
        load(subjects.folder(BY_NAME[name]), load_format="dummy")


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_the_head_of_gpt_neox_has_two_names(subjects: Subjects, copied: Copied, head: str) -> None:
    folder, state = copied("gpt_neox-odd")
    (name,) = [name for name in ("embed_out.weight", "lm_head.weight") if name in state]
    state[f"{head}.weight"] = state.pop(name)
    save_file(state, folder / WEIGHTS)
    generates_as_before(subjects, "gpt_neox-odd", folder)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("has_shards", [True, False])
def test_the_file_of_the_whole_model_is_read_alone(
    ending: str, has_shards: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An index and shards beside it are of another save."""
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    whole, shard = tmp_path / f"{stem}.{ending}", tmp_path / f"{stem}-00001-of-00001.{ending}"
    index = tmp_path / f"{whole.name}.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard.name}}))
    whole.touch()
    if has_shards:
        shard.touch()
    with said(caplog) as messages:
        assert checkpoint_files(tmp_path, "auto") == [whole]
    unread = f"{index.name}, {shard.name}" if has_shards else index.name
    assert messages == [f"weights: {whole} alone, without {unread}"]
    whole.unlink()
    if has_shards:
        assert checkpoint_files(tmp_path, "auto") == [shard]


TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
ON_TRANSFORMERS = ("llama-tied-6-to-1", "gpt2-8-heads")


@pytest.mark.parametrize(
    "name",
    [
        *("llama-tied-6-to-1", "gemma2-caps", "phi3-longrope-long", "gpt2-8-heads"),
        *("gpt_neox-odd", "opt-before", "bloom-8-heads"),
    ],
)
def test_tied_weights_under_the_name_of_the_head(
    name: str, subjects: Subjects, copied: Copied
) -> None:
    """As `save_model` of the library safetensors writes them."""
    folder, state = copied(name)
    [table] = [tensor for tensor in state if tensor.endswith(TABLES)]
    others = {key: state[key] for key in state if key not in (table, *HEADS)}
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    save_file({**others, "lm_head.weight": state[table]}, folder / WEIGHTS)
    for model_impl in ("tpengine", "transformers")[: 2 if name in ON_TRANSFORMERS else 1]:
        load(folder, model_impl=model_impl)
    if name == "llama-tied-6-to-1":
        generates_as_before(subjects, name, folder)
    for wrong, problem in (({}, "missing"), ({"lm_head.weight": state[table][1:]}, "misshapen")):
        save_file(others | wrong, folder / WEIGHTS)
        with refused(ModelLoadError, f"{problem}: "):
            load(folder)
