"""Commands that run in this process and ask for the same engine get the same one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tpengine import LLM


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    """By their arguments."""
    engines: dict[str, LLM] = {}
    yield engines
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(autouse=True)
def _shared_engines(engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_for(**args: Any) -> LLM:
        key = repr(args)
        if key not in engines:
            engines[key] = LLM(**args)
        return engines[key]

    def leave(engine: LLM, *error: object) -> None:
        """What an error has left is of no use to others."""
        if any(error):
            del engines[next(key for key, kept in engines.items() if kept is engine)]
            engine.shutdown()

    monkeypatch.setattr("tpengine.llm.LLM", engine_for)
    monkeypatch.setattr(LLM, "__exit__", leave)
