"""Fixtures of the client's tests."""

from __future__ import annotations

from support.servers import llm, server, tight  # noqa: F401
