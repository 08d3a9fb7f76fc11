"""Which paths serve which models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpengine.server.http.error_answers import HttpError
from tpengine.server.state import ServerState

PATHS: Mapping[str, Sequence[str]] = {
    "completions": ("/v1/completions", "/v1/chat/completions"),
    "transcriptions": ("/v1/audio/transcriptions",),
    "translations": ("/v1/audio/translations",),
    "embeddings": ("/v1/embeddings",),
    "rerank": ("/v1/rerank", "/rerank", "/v2/rerank"),
    "score": ("/v1/score", "/score"),
    "classify": ("/v1/classify", "/classify"),
}
"""The paths of each kind of call to a model, the usual one first."""
_CALLS = {
    # task of the model, or transcribe for an encoder of sound: what it does, its calls
    "generate": ("generates text", ("completions",)),
    "transcribe": ("writes down speech", ("transcriptions", "translations")),
    "embed": ("embeds texts", ("embeddings", "rerank", "score")),
    "score": ("scores pairs of texts", ("rerank", "score")),
    "classify": ("classifies texts", ("classify",)),
}


def check_task(state: ServerState, kind: str, path: str) -> None:
    """Checks that the model serves a kind of call.

    Args:
        kind: of the call, one of `PATHS`.
        path: of the call.

    Raises:
        HttpError: the model does something else.
        EngineLoadingError: it is not loaded yet.
    """
    config = state.loaded_engine().model_config
    task = "transcribe" if config.sound else config.task
    does, calls = _CALLS[task]
    if kind in calls:
        return
    own = " or ".join(each for call in calls for each in PATHS[call] if each.startswith("/v1/"))
    text = f"{path} is not for the model {state.model!r}, which {does}; use {own}"
    if task == "generate" and kind in _CALLS["embed"][1]:
        text = f"{text}, or start the server with --task embed"
    raise HttpError(text, 400, "wrong_endpoint")
