"""What is fetched of a model of the hub. A server in this process stands in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from support.engines import complete, greedy, make_engine
from support.models import ModelShop
from support.subjects import BY_NAME, Subjects
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN

from tpengine import EngineArgs
from tpengine.config import ModelFiles
from tpengine.errors import ConfigError, ModelLoadError

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
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
TIMEOUT_S = 120


@dataclass
class Hub:
    """Stands in for the hub.

    Attributes:
        models: files of each model by their names.
        fetched: names of the files that were fetched, by model and commit.
    """

    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fetched: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, name: str, folder: Path) -> None:
        """Offers the files of a folder."""
        self.models[name] = {path.name: path.read_bytes() for path in folder.iterdir()}

    def of(self, name: str, revision: str = "main") -> set[str]:
        """What was fetched of a model."""
        return self.fetched.get((name, COMMITS[revision]), set())

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request."""
        words = path.partition("?")[0].strip("/").split("/")
        if words[0] == "api":
            name = "/".join(words[2:4])
            if name not in self.models:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            if words[4] == "tree":
                files = self.models[name].items()
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": "0" * 40}
                    for file, data in files
                ]
                return 200, {}, json.dumps(tree).encode()
            files = [{"rfilename": file} for file in self.models[name]]
            commit = COMMITS.get(words[5], words[5])
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": files}).encode()
        name, commit, file = "/".join(words[:2]), words[3], "/".join(words[4:])
        data = self.models[name][file]
        if method == "GET":
            self.fetched.setdefault((name, commit), set()).add(file)
        return 200, {"ETag": f'"{commit}-{file}"', "X-Repo-Commit": commit}, data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


@pytest.fixture
def opt(subjects: Subjects, tmp_path: Path) -> dict[str, bytes]:
    """A random OPT as its first models lie on the hub: weights in one pickled file."""
    source = subjects.folder(BY_NAME["opt-before"])
    pickled = tmp_path / "pytorch_model.bin"
    torch.save(load_file(source / "model.safetensors"), pickled)
    files = {path.name: path.read_bytes() for path in (*source.glob("*.json"), pickled)}
    pickled.unlink()
    return files


ALL = TOKENIZER | SAFETENSORS | PICKLES | INDICES | CODE | NEVER


@pytest.mark.parametrize(
    ("load_format", "trust", "unwanted", "extra"),
    [
        ("auto", False, [], SAFETENSORS),
        ("safetensors", True, [], SAFETENSORS | CODE),
        ("pt", False, [], PICKLES),
        ("pt", True, [], PICKLES | CODE),
        ("auto", False, ["*.safetensors"], PICKLES),
        ("auto", False, ["*.safetensors", "pytorch*"], set()),
        ("dummy", False, [], set()),
        ("dummy", True, [], CODE),
    ],
)
@pytest.mark.parametrize("revision", [None, "v2"])
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


def test_architecture_is_checked_before_weights_are_fetched(
    hub: Hub, tmp_path: Path, opt: dict[str, bytes]
) -> None:
    other = {**json.loads(opt["config.json"]), "architectures": ["GPT2LMHeadModel"]}
    hub.models["some/model"] = {**opt, "config.json": json.dumps(other).encode()}
    with pytest.raises(ConfigError, match=r"'GPT2LMHeadModel'.*not supported.*OPTForCausalLM"):
        EngineArgs("some/model", download_dir=str(tmp_path)).create_engine_config()
    assert hub.of("some/model") == {name for name in opt if name.endswith(".json")}


@pytest.mark.parametrize("load_format", ["auto", "dummy", "pt"])
def test_engine_of_a_hub_name(
    hub: Hub, models: ModelShop, tmp_path: Path, load_format: str
) -> None:
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


FIRST_LINES = """
from tpengine import LLM, SamplingParams
llm = LLM(model="facebook/opt-125m")
params = SamplingParams(temperature=0, ignore_eos=True)
outputs = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
print(*outputs[0].outputs[0].token_ids)
"""


def test_the_first_lines_of_a_tutorial(
    hub: Hub, subjects: Subjects, tmp_path: Path, opt: dict[str, bytes]
) -> None:
    hub.models["facebook/opt-125m"] = opt
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINES],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    with make_engine(subjects.folder(BY_NAME["opt-before"]), dtype="auto") as engine:
        expected = complete(engine, [5, 6, 7], greedy(16)).token_ids
    assert done.stdout.split() == [str(token_id) for token_id in expected]
    assert hub.of("facebook/opt-125m") == set(opt)
