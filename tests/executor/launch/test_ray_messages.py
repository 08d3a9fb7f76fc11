"""What of Ray's own messages reaches the log and the standard output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from tpengine.executor.launch import ray_messages


def test_deaths(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of known ranks none is told; of those that Ray could not start, the first one."""
    printed: list[Any] = []
    now = [0.0]
    monkeypatch.setattr(ray_messages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ray_messages, "_hidden", {("ab12", 7)})
    write = ray_messages._quieter(printed.append)
    for pid in (7, 8, 9, 10):
        text = f"A worker died or was killed while Node ID: ab12 Worker PID: {pid} Worker exit"
        write({"lines": [text], "pid": "raylet", "is_err": False})
        now[0] += 35.0
    write({"lines": ["a node died\nof old age"], "pid": "gcs_server", "is_err": False})
    write({"lines": ["mine"], "pid": 4711, "is_err": False})
    assert [message.split()[-4:] for message in caplog.messages] == [
        ["PID:", "8", "Worker", "exit"],
        ["says:", "a", "node", "died"],
    ]
    assert [data["lines"] for data in printed] == [["mine"]]
