"""A server in this process that stands in for the hub of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from support.subjects import BY_NAME, Subjects
from support.web import Answer, web_server

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


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

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        status, headers, body = hub.answer(handler.command, handler.path)
        return status, {**headers, "Content-Length": str(len(body))}, [body]

    with web_server(answer) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.fixture
def opt(subjects: Subjects, tmp_path: Path) -> dict[str, bytes]:
    """A random OPT as its first models lie on the hub: weights in one pickled file."""
    source = subjects.folder(BY_NAME["opt-before"])
    pickled = tmp_path / "pytorch_model.bin"
    torch.save(load_file(source / "model.safetensors"), pickled)
    files = {path.name: path.read_bytes() for path in (*source.glob("*.json"), pickled)}
    pickled.unlink()
    return files
