"""The Python client of `tpengine serve`. It imports neither the engine nor torch.

Names are imported when they are first used, so that this package can be imported without grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpengine.client.generation_client import GenerationClient
    from tpengine.client.grpc_channel import ClientTLS

__all__ = ["ClientTLS", "GenerationClient"]

_HOMES = {"ClientTLS": "grpc_channel", "GenerationClient": "generation_client"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpengine.client' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpengine.client.{_HOMES[name]}"), name)
