"""Fixtures of the tests of the OpenAI routes."""

from __future__ import annotations

import pytest
from support.server_process import ServerProcess

from server.http.openai_door import Door


@pytest.fixture(scope="session")
def door(server: ServerProcess) -> Door:
    return Door(server.http_address)
