"""Fixtures of the server's tests."""

from __future__ import annotations

from support.servers import llm, server, tight  # noqa: F401
