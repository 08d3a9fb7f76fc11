"""What is fetched of a model that is named as on the hub; nothing here uses the network."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from support.engines import make_engine
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN

from tpengine.config import resolve_model_folder
from tpengine.errors import ModelLoadError

TOKENIZER = {
    "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "vocab.bpe",
    "tokenizer.model", "qwen.tiktoken", "chat_template.jinja",
}  # fmt: skip
SAFETENSORS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
SAFETENSORS_INDEX = {"model.safetensors.index.json"}
PICKLES = {"pytorch_model-00001-of-00001.bin"}
PICKLES_INDEX = {"pytorch_model.bin.index.json"}
INDICES = SAFETENSORS_INDEX | PICKLES_INDEX
CODE = {"modeling_x.py", "tokenization_x.py"}
NEVER = {
    "original/consolidated.00.pth", "original/params.json", "consolidated.safetensors",
    "training_args.bin", "model.gguf", "README.md", "original/tokenizer.model",
}  # fmt: skip


class Hub:
    """Stands in for the hub: one repository, and what was taken of it."""

    def __init__(self, root: Path, files: set[str]) -> None:
        self.root = root
        self.files = files
        self.fetched: list[set[str]] = []

    def snapshot_download(
        self, name: str, *, cache_dir: Any, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        taken = {
            file
            for file in self.files
            if any(fnmatch(file, pattern) for pattern in allow_patterns)
            and not any(fnmatch(file, pattern) for pattern in ignore_patterns)
        }
        self.fetched.append(taken)
        folder = self.root / name.replace("/", "--")
        for file in taken:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    files = TOKENIZER | SAFETENSORS | PICKLES | INDICES | CODE | NEVER
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("load_format", "trust", "extra"),
    [
        ("auto", False, SAFETENSORS),
        ("safetensors", True, SAFETENSORS | CODE),
        ("pt", False, PICKLES),
        ("pt", True, PICKLES | CODE),
        ("dummy", False, set()),
        ("dummy", True, CODE),
    ],
)
def test_only_what_is_read_is_fetched(
    hub: Hub, load_format: str, trust: bool, extra: set[str]
) -> None:
    folder = resolve_model_folder("some/model", None, load_format, trust)
    assert Path(folder).is_dir()
    assert hub.fetched == [TOKENIZER | INDICES | extra]


@pytest.mark.parametrize(
    ("load_format", "weights", "remedy"),
    [("auto", PICKLES, "load_format='pt'"), ("pt", SAFETENSORS, "load_format='auto'")],
)
def test_weights_in_the_other_format_only(
    hub: Hub, load_format: str, weights: set[str], remedy: str
) -> None:
    hub.files = TOKENIZER | weights
    with pytest.raises(ModelLoadError) as raised:
        resolve_model_folder("some/model", None, load_format)
    for word in ("some/model", load_format, remedy):
        assert word in str(raised.value)


def test_a_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"some/model.*ConnectionError: no route.*network"):
        resolve_model_folder("some/model", None)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_engine_of_a_hub_name(
    monkeypatch: pytest.MonkeyPatch, models: ModelShop, load_format: str
) -> None:
    """The engine asks for its own format; of a tokenizer of another name it wants no weights."""
    model = models.folder(PLAIN, tokenizer=True)
    tokenizer = models.folder(TinyLlama(seed=9), tokenizer=True)
    asked: dict[str, list[str]] = {}

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked[name] = allow_patterns
        return str(model if name == "some/model" else tokenizer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    args: dict[str, Any] = {"tokenizer": "some/tokenizer", "load_format": load_format}
    with torch.random.fork_rng(devices=[]), make_engine("some/model", **args):
        pass
    assert ("*.safetensors" in asked["some/model"]) == (load_format == "auto")
    assert "*.safetensors" not in asked["some/tokenizer"]
    assert "*.model" in asked["some/tokenizer"]
