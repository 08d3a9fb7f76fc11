"""Fixtures of the tests of the OpenAI routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server_process import ServerProcess
from support.servers import MODEL_LENGTH

from server.http.openai_door import Door


@pytest.fixture(scope="session")
def openai_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("openai") / "log"
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--http-port", "0"]
    with ServerProcess(*options, "--max-model-len", str(MODEL_LENGTH), log=log) as process:
        yield process
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def door(openai_server: ServerProcess) -> Door:
    return Door(openai_server.http_address)
