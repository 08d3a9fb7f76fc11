"""What is fetched of a model of the hub. A server in this process stands in for the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import complete, greedy, make_engine
from support.hub import Hub
from support.models import ModelShop
from support.programs import python
from support.subjects import BY_NAME, Subjects
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN

from tpengine import EngineArgs
from tpengine.checkpoint.model_files import ModelFiles
from tpengine.errors import ConfigError, ModelLoadError

TOKENIZER = {
    "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "vocab.bpe",
    "tokenizer.model", "source.spm", "qwen.tiktoken", "chat_template.jinja",
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

ALL = TOKENIZER | SAFETENSORS | PICKLES | INDICES | CODE | NEVER


@pytest.mark.parametrize(
    ("load_format", "trust", "unwanted", "extra", "revision"),
    [
        ("auto", False, [], SAFETENSORS, None),
        ("safetensors", True, [], SAFETENSORS | CODE, "v2"),
        ("pt", False, [], PICKLES, "v2"),
        ("pt", True, [], PICKLES | CODE, None),
        ("auto", False, ["*.safetensors"], PICKLES, None),
        ("auto", False, ["*.safetensors", "pytorch*"], set(), "v2"),
        ("dummy", False, [], set(), None),
        ("dummy", True, [], CODE, "v2"),
    ],
)
def test_only_what_is_read_is_fetched(
    hub: Hub,
    tmp_path: Path,
    load_format: str,
    trust: bool,
    unwanted: list[str],
    extra: set[str],
    revision: str | None,
) -> None:
    hub.models["some/model"] = dict.fromkeys(ALL, b"{}")
    files = ModelFiles("some/model", str(tmp_path), revision, trust)
    folder = Path(files.find())
    assert hub.of("some/model", revision or "main") == TOKENIZER | INDICES | (CODE & extra)
    files.fetch_weights(str(folder), load_format, unwanted)
    assert hub.of("some/model", revision or "main") == TOKENIZER | INDICES | extra
    assert {path.name for path in folder.iterdir()} == TOKENIZER | INDICES | extra
    assert len(hub.fetched) == 1, "one commit"


def test_a_name_that_cannot_be_fetched(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)some/model.*RepositoryNotFoundError.*network"):
        ModelFiles("some/model", str(tmp_path)).find()


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("opt", "T5ForConditionalGeneration", "neither tpengine nor"),
        ("mamba", "MambaForCausalLM", "keeps a state beside K and V"),
        ("falcon", "FalconForCausalLM", "attention does not go .*; docs/models.md lists what runs"),
        ("minimax", "MiniMaxForCausalLM", "layers of type linear_attention"),
    ],
)
def test_architecture_is_checked_before_weights_are_fetched(
    hub: Hub, tmp_path: Path, opt: dict[str, bytes], kind: str, architecture: str, words: str
) -> None:
    other = {"model_type": kind, "architectures": [architecture]}
    hub.models["some/model"] = {**opt, "config.json": json.dumps(other).encode()}
    with pytest.raises(ConfigError, match=f"'{architecture}'.*not supported: .*{words}"):
        EngineArgs("some/model", download_dir=str(tmp_path)).create_engine_config()
    assert hub.of("some/model") == {name for name in opt if name.endswith(".json")}


@pytest.mark.parametrize("load_format", ["auto", "dummy", "pt"])
def test_engine_of_hub_name(hub: Hub, models: ModelShop, tmp_path: Path, load_format: str) -> None:
    """The engine asks for its own format; of a tokenizer of another name it wants no weights."""
    hub.add("some/model", models.folder(PLAIN, tokenizer=True))
    hub.add("some/tokenizer", models.folder(TinyLlama(seed=9), tokenizer=True))
    args: dict[str, Any] = {
        "tokenizer": "some/tokenizer", "tokenizer_revision": "v2", "load_format": load_format,
        "download_dir": str(tmp_path),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        if load_format == "pt":
            with pytest.raises(ModelLoadError, match=r"some--model.*'pt'.*load_format='auto'"):
                make_engine("some/model", **args)
        else:
            make_engine("some/model", **args).shutdown()
    assert ("model.safetensors" in hub.of("some/model")) == (load_format == "auto")
    assert "tokenizer.json" in hub.of("some/tokenizer", "v2")
    assert "model.safetensors" not in hub.of("some/tokenizer", "v2")
    assert not hub.of("some/tokenizer")


def test_a_revision_of_the_tokenizer_alone(hub: Hub, tmp_path: Path, opt: dict[str, bytes]) -> None:
    hub.models["some/model"] = {**opt, "tokenizer.json": b"{}"}
    args = EngineArgs("some/model", tokenizer_revision="v2", download_dir=str(tmp_path))
    assert str(args.create_engine_config().model.tokenizer).endswith("b" * 40)
    assert "pytorch_model.bin" in hub.of("some/model")
    assert hub.of("some/model", "v2") == {*opt, "tokenizer.json"} - {"pytorch_model.bin"}


FIRST_LINES = """
from tpengine import LLM, SamplingParams
llm = LLM(model="facebook/opt-125m")
params = SamplingParams(temperature=0, ignore_eos=True)
outputs = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
print(*outputs[0].outputs[0].token_ids)
"""


@pytest.mark.check
def test_the_first_lines_of_a_tutorial(
    hub: Hub, subjects: Subjects, tmp_path: Path, opt: dict[str, bytes]
) -> None:
    hub.models["facebook/opt-125m"] = opt
    done = python("-c", FIRST_LINES, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    with make_engine(subjects.folder(BY_NAME["opt-before"]), dtype="auto") as engine:
        expected = complete(engine, [5, 6, 7], greedy(16)).token_ids
    assert done.stdout.split() == [str(token_id) for token_id in expected]
    assert hub.of("facebook/opt-125m") == set(opt)
