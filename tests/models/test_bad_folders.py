"""A model's folder that is missing, incomplete or damaged is refused; the error names the file."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine
from support.messages import said
from support.models import ModelShop
from support.patches import limited
from support.small_tokenizers import load as load_tokenizer
from support.tiny_llama import TinyLlama, edit_json

from tpengine import LLM, EngineArgs, SamplingParams
from tpengine.checkpoint.gguf_file import open_gguf
from tpengine.checkpoint.loader import read_tensors
from tpengine.checkpoint.model_files import read_generation_config
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import ModelLoadError, is_shortage, is_temporary

SHARDED = TinyLlama(max_shard_size="200KB", seed=3)


@pytest.fixture
def copy(models: ModelShop, tmp_path: Path) -> Path:
    """A sharded model's folder that may be damaged."""
    folder = shutil.copytree(models.folder(SHARDED), tmp_path / "copy")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load_error(folder: Path) -> str:
    """The message with which loading is refused."""
    with pytest.raises(ModelLoadError) as raised:
        make_engine(folder)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    return str(raised.value)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        make_engine(tmp_path)
    with pytest.raises(ModelLoadError, match=r"^tokenizer '/nowhere' does not exist"):
        LLM(tokenizer="/nowhere")
    with pytest.raises(TypeError, match="'max_token'"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    with pytest.raises(ModelLoadError, match=r"does not exist.*hub name"):
        make_engine(tmp_path / "nothing here")
    file = tmp_path / "file"
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match="is no folder"):
        make_engine(file)
    with pytest.raises(ModelLoadError, match="does not exist"):
        make_engine("no-such-name")


def test_folder_without_weights(copy: Path) -> None:
    for path in [*shards(copy), copy / "model.safetensors.index.json"]:
        path.unlink()
    message = load_error(copy)
    assert "safetensors" in message
    assert "dummy" in message
    with make_engine(copy, load_format="dummy") as engine:  # the remedy that is named
        assert engine.num_total_blocks == 256


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard(copy: Path, keep: int) -> None:
    damaged = shards(copy)[1]
    damaged.write_bytes(damaged.read_bytes()[:keep])
    message = load_error(copy)
    assert damaged.name in message
    assert "damaged" in message


def test_a_file_that_goes_away_while_it_is_read(copy: Path) -> None:
    """Each tensor maps its file when values are read."""
    for path in shards(copy):
        sources = dict(read_tensors(path))
        path.unlink()
        for source in sources.values():
            with pytest.raises(ModelLoadError, match=f"{path.name} cannot be read: No such file"):
                source[:]


def test_missing_shard(copy: Path) -> None:
    gone = shards(copy)[1]
    number = len(shards(copy))
    gone.unlink()
    message = load_error(copy)
    assert gone.name in message
    assert f"1 of the {number} files" in message


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd"])
def test_index_that_leaves_the_folder(copy: Path, outside: str) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"]["model.norm.weight"] = outside

    edit_json(copy / "model.safetensors.index.json", change)
    message = load_error(copy)
    assert outside in message
    assert "outside the folder" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_index_that_is_none(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    message = load_error(copy)
    assert "model.safetensors.index.json" in message
    assert "index" in message


def test_one_error_lists_every_tensor_that_does_not_fit(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]

    def edit(name: str, change: Any) -> str:
        path = copy / index[name]
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return str(path.name)

    edit("model.norm.weight", lambda tensors: tensors.pop("model.norm.weight"))
    q_name = "model.layers.1.self_attn.q_proj.weight"
    q_file = edit(q_name, lambda tensors: tensors.update({q_name: torch.zeros(256, 100)}))
    down = "model.layers.0.mlp.down_proj.weight"
    down_file = edit(down, lambda tensors: tensors.update({down: torch.zeros(64, 192)}))
    extra = "model.layers.0.self_attn.q_norm.weight"
    extra_file = edit(down, lambda tensors: tensors.update({extra: torch.zeros(64)}))
    message = load_error(copy)
    lines = message.splitlines()
    assert "4 tensors" in lines[0]
    assert len(lines) == 5
    for kind, *words in (
        ("missing", "model.norm.weight", "[128]"),
        ("misshapen", q_name, q_file, "[256, 100]", "[256, 128]"),
        ("misshapen", down, down_file, "[64, 192]", "[128, 192]"),
        ("unexpected", extra, extra_file),
    ):
        told_by = [line for line in lines if kind in line and words[0] in line]
        assert len(told_by) == 1, f"{kind} {words[0]} in {message}"
        for word in words:
            assert word in told_by[0]


def test_damaged_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{ not json")
    assert "generation_config.json" in load_error(copy)


def test_an_empty_generation_config_recommends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("", " \n"):
        (tmp_path / "generation_config.json").write_text(content)
        with said(caplog) as messages:
            assert read_generation_config(str(tmp_path)) == {}
        assert " is empty: " in messages[0]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 93\n"
FAULTS = {
    b"": "it is empty",
    b"\xff{": "it is not valid JSON",
    b"[" * 100_000: "it is not valid JSON",
    b"null": "must hold an object",
    POINTER: "it is a pointer of Git LFS; `git lfs pull` fetches",
}


@pytest.mark.parametrize("content", FAULTS, ids=lambda content: str(content[:9]))
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"],
)
def test_a_broken_file_of_json_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    for path in Path(EMBEDDED_MODEL).glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"/{name} .*{FAULTS[content]}"):
        load_tokenizer(tmp_path) if name.startswith("tokenizer") else make_engine(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_a_pointer_to_weights_is_told_as_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=f"{name}.*git[ -]lfs"):
        open_gguf(tmp_path / name) if name == "model.gguf" else list(read_tensors(tmp_path / name))


def test_a_working_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ModelLoadError, match="working folder of this process was deleted"):
        EngineArgs(EMBEDDED_MODEL).create_engine_config("cpu")


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.gguf"])
def test_a_process_without_descriptors_may_read_later(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    words = rf"{name} cannot be read.* open files"
    with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(ModelLoadError, match=words) as full:
        open_gguf(tmp_path / name) if name == "a.gguf" else list(read_tensors(tmp_path / name))
    assert is_shortage(full.value)
    assert is_temporary(full.value)
