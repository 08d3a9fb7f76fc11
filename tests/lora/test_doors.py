"""Adapters over HTTP and gRPC, chosen as `model`, with PEFT's ids; loaded and unloaded there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.calls import TIMEOUT_S, long_request, token_files
from server.calls import ids as token_ids
from server.http.openai_door import Door
from support.adapters import Adapters
from support.server_process import ServerProcess, serving

from tpengine import EngineArgs
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import ConfigError
from tpengine.server.server_args import ServerArgs

ADMIN = "an-admin-token-of-24-ch."
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    configs = {"first": {"r": 4}, "second": {"r": 16}, "wide": {"r": 17}}
    root = tmp_path_factory.mktemp("adapters")
    return Adapters(Path(EMBEDDED_MODEL), root, configs, num_tokens=64)


@pytest.fixture(scope="module")
def server(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose one slot serves `first` from the start; its folder has the other adapters."""
    root = tmp_path_factory.mktemp("server")
    first = adapters.requests["first"].lora_path
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--http-port", "0"]
    options += ["--enable-lora", "--lora-modules", f"first={first}", "--max-model-len", "256"]
    options += ["--lora-folder", str(Path(first).parent), *token_files(root, admin=ADMIN)]
    with serving(root, *options) as process:
        yield process


def call(
    server: ServerProcess, path: str, body: Any = None, token: str = ""
) -> tuple[int, dict[str, Any]]:
    """Status and answer of a call over HTTP; without a body it is a GET."""
    with Door(server.http_address, token).open(path, body) as answer:
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else {}


def over_http(
    server: ServerProcess, model: str, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> tuple[str, tuple[int, ...]]:
    """The name in the answer, and its ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = Door(server.http_address).whole("completions", body)
    return answer["model"], tuple(answer["choices"][0]["token_ids"])


def over_grpc(
    server: ServerProcess, model: str, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> tuple[int, ...]:
    message = long_request(num_tokens, model=model, prompt_token_ids=token_ids(*prompt))
    return tuple(server.stub.Generate(message, timeout=TIMEOUT_S).outputs[0].token_ids)


def names(server: ServerProcess) -> dict[str, str | None]:
    """The served names, and of which model each is an adapter."""
    _, answer = call(server, "/v1/models")
    return {model["id"]: model.get("parent") for model in answer["data"]}


def test_a_name_is_an_adapter(server: ServerProcess, adapters: Adapters) -> None:
    """Adapters with the base's own name in turn, over both doors, with one slot."""
    assert names(server) == {"embedded": None, "first": "embedded"}
    jobs = adapters.jobs([None, "first"], [40, 7])
    for (name, prompt), answer in zip(jobs, adapters.answers(jobs), strict=True):
        model = name or "embedded"
        expected = answer.token_ids[:NUM_TOKENS]
        assert over_http(server, model, prompt) == (model, expected)
        assert over_grpc(server, model, prompt) == expected
    status, answer = call(server, "/v1/completions", {"model": "second", "prompt": "a"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(grpc.RpcError, match="second"):
        over_grpc(server, "second", [5])
    assert call(server, "/tokenize", {"model": "first", "prompt": "a"})[0] == 200


def test_an_adapter_is_loaded_and_unloaded(server: ServerProcess, adapters: Adapters) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    folder = Path(adapters.requests["second"].lora_path).parent
    (folder / "link").symlink_to(EMBEDDED_MODEL)
    (folder / "loop").symlink_to("loop")
    body = {"lora_name": "second", "lora_path": "second"}
    assert call(server, load, body)[0] == 403
    assert call(server, unload, {"lora_name": "first"})[0] == 403
    for change, words in (
        ({"lora_path": "../second"}, "not in the folder"),
        ({"lora_path": EMBEDDED_MODEL}, "not in the folder"),
        ({"lora_path": "."}, "not in the folder"),
        ({"lora_path": "link"}, "not in the folder"),
        ({"lora_path": "loop"}, "not in the folder"),
        ({"lora_path": "\0"}, "not in the folder"),
        ({"lora_path": "third"}, "adapter_config.json"),
        ({"lora_path": "wide"}, "is 17, and must be from 1 to max_lora_rank = 16"),
        ({"lora_name": "first"}, "empty or taken"),
        ({"lora_name": "embedded"}, "empty or taken"),
        ({"lora_name": ""}, "empty or taken"),
        ({"lora_name": 5}, "must be a text"),
        ({"other": 1}, "not a field"),
    ):
        status, answer = call(server, load, {**body, **change}, ADMIN)
        assert (status, words in str(answer)) == (400, True), answer
    assert call(server, load, body, ADMIN)[0] == 200
    assert names(server) == {"embedded": None, "first": "embedded", "second": "embedded"}
    jobs = adapters.jobs(["second", "first"], [30])
    for (name, prompt), answer in zip(jobs, adapters.answers(jobs), strict=True):
        assert over_http(server, name, prompt) == (name, answer.token_ids[:NUM_TOKENS])
    (_, prompt), _ = jobs
    message = long_request(64, model="second", prompt_token_ids=token_ids(*prompt))
    stream = server.stub.GenerateStream(message, timeout=TIMEOUT_S)
    ids = list(next(stream).outputs[0].token_ids)
    assert call(server, unload, {"lora_name": "second"}, ADMIN)[0] == 200
    for output in stream:  # it keeps its adapter
        ids += output.outputs[0].token_ids
    assert tuple(ids) == adapters.answers(jobs)[0].token_ids
    assert call(server, unload, {"lora_name": "second"}, ADMIN)[0] == 404
    assert names(server) == {"embedded": None, "first": "embedded"}


def test_what_a_server_refuses_at_its_start(adapters: Adapters, tmp_path: Path) -> None:
    for modules in (["a"], ["a="], ["=b"], ["a=b", "a=c"]):
        with pytest.raises(ConfigError, match="lora_modules must be NAME=PATH, each name once"):
            ServerArgs(lora_modules=modules).check()
    assert [adapter.lora_name for adapter in ServerArgs(lora_modules="a=b=c").adapters()] == ["a"]
    for args, words in (
        ({"lora_folder": str(tmp_path)}, "lora_folder needs http_port"),
        ({"lora_folder": f"{tmp_path}/a", "http_port": 0}, "is no folder; make it first"),
    ):
        with pytest.raises(ConfigError, match=words):
            ServerArgs(**args).check()  # type: ignore[arg-type]
    named = ServerArgs(lora_modules="embedded=a")
    for enable_lora, words in ((False, "lora_modules needs enable_lora"), (True, "own name")):
        with pytest.raises(ConfigError, match=words):
            named.check_adapters(EngineArgs(enable_lora=enable_lora))
    with pytest.raises(ConfigError, match="max_cpu_loras = 2 is less than max_loras = 3"):
        EngineArgs(enable_lora=True, max_loras=3, max_cpu_loras=2).create_engine_config("cpu")
    folder = shutil.copytree(adapters.requests["first"].lora_path, tmp_path / "broken")
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(AssertionError, match=r"cannot start: InvalidAdapterError: .*damaged"):
        ServerProcess("--enable-lora", "--lora-modules", f"a={folder}", log=tmp_path / "log")
