"""Tokenizers as an engine loads them, and what their streams give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tpengine.checkpoint.model_files import ModelFields
from tpengine.config import ModelConfig
from tpengine.engine.detokenizer import Detokenizer
from tpengine.engine.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["he", "ll", "hell", "hello", "wo", "wor", "word", "\u0120word", "\u2581word", "12"]


def bpe(alphabet: list[str], **options: Any) -> Backend:
    """A backend with these tokens and `WORDS`."""
    vocab, merges = {token: i for i, token in enumerate(alphabet)}, []
    for word in WORDS:
        for cut in range(1, len(word)):
            if word not in vocab and word[:cut] in vocab and word[cut:] in vocab:
                vocab[word] = len(vocab)
                merges.append((word[:cut], word[cut:]))
    return Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", **options))


def metaspace(byte_tokens: bool = True) -> Backend:
    """A backend as of Llama 2; without tokens for bytes one as of older models."""
    letters = [*"abcdefghijklmnopqrstuvwxyz12 ", "\u2581"]
    if not byte_tokens:
        backend = bpe([*SPECIALS, *letters])
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return backend
    backend = bpe([*SPECIALS, *BYTE_TOKENS, *letters], byte_fallback=True, fuse_unk=True)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


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
