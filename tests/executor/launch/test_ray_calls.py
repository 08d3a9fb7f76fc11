"""Calls of Ray's that do not return."""

from __future__ import annotations

import threading

import pytest
from support.waiting import PATIENCE_S, wait_until

pytest.importorskip("ray")
from tpengine.errors import is_temporary
from tpengine.executor.launch import ray_calls
from tpengine.executor.launch.ray_calls import RaySilentError, bounded


def test_a_call_that_does_not_return_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is made until it returns, so that no threads pile up; what it brings is undone."""
    monkeypatch.setattr(ray_calls, "RAY_CALL_S", 0.2)
    monkeypatch.setattr(ray_calls, "_RETURN_S", 0.1)
    answers, made = threading.Event(), []

    def make() -> str:
        assert answers.wait(PATIENCE_S)
        return "a placement group"

    with pytest.raises(
        RaySilentError, match=r"within 0\.2 s, when asked for room.*gcs_server"
    ) as e:
        bounded(make, "room", made.append)
    assert is_temporary(e.value)
    for _ in range(3):
        with pytest.raises(RaySilentError, match="not asked for its nodes: it still"):
            bounded(lambda: made.append("never"), "its nodes")
    assert [t.name for t in threading.enumerate()].count("tpengine-ray-call") == 1
    answers.set()
    wait_until(lambda: made == ["a placement group"])
    assert bounded(lambda: 7, "a number") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, "a quotient")
