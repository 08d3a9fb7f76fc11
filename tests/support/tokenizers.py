"""Tokenizers as an engine loads them, and what their streams give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpengine.checkpoint.model_files import ModelFields
from tpengine.config import ModelConfig
from tpengine.engine.detokenizer import Detokenizer
from tpengine.engine.tokenizer import Tokenizer, load_tokenizer


def load(path: Path, mode: str = "auto") -> Tokenizer | None:
    """The tokenizer of a folder or file; None: it has none."""
    model = str(path)
    return load_tokenizer(
        ModelConfig(model, model, mode, False, ModelFields(), "auto", 512, 0, "auto", frozenset())
    )


def stream_all(
    detokenizer: Detokenizer, token_ids: Sequence[int]
) -> tuple[str, list[str], str | None]:
    """The final text, the deltas, and the stop."""
    deltas = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.take_delta())
        assert "".join(deltas) == detokenizer.text
        if stop is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text, deltas, detokenizer.stopped_by
