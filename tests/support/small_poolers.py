"""Small random models that embed, score and classify, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Qwen3Model

from support.byte_llama import VOCAB_SIZE, write_tokenizer
from support.pooling_models import write_modules
from support.tiny_llama import write_word_tokenizer

SIZE, LENGTH, MOST_TOKENS = 64, 256, 4096
LABELS = ["calm", "angry", "glad"]
PROMPTS = {"query": "ab? ", "document": "ab: "}
_SHAPE: dict[str, Any] = {
    "hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}  # fmt: skip
_TASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "embed": (Qwen3Model, {}),
    "score": (Qwen3ForSequenceClassification, {"num_labels": 1}),
    "classify": (Qwen3ForSequenceClassification, {"id2label": dict(enumerate(LABELS))}),
}


def write_embedder(folder: Path, task: str = "embed") -> Path:
    """Writes a model for a task that has words, a chat template and room for long prompts."""
    write_word_tokenizer(folder, 512)
    _write_model(folder, task, vocab_size=512, max_position_embeddings=MOST_TOKENS)
    return folder


def _write_model(folder: Path, task: str, **others: Any) -> None:
    kind, fields = _TASKS[task]
    torch.manual_seed(5)
    kind(Qwen3Config(**{**_SHAPE, **fields, **others})).save_pretrained(folder)


def write_pooler(folder: Path, task: str) -> Path:
    """Writes a model for a task; the one that embeds has the files of sentence-transformers, with
    `PROMPTS`."""
    write_tokenizer(folder)
    _write_model(folder, task, vocab_size=VOCAB_SIZE)
    if task == "embed":
        write_modules(folder, "last", prompts=PROMPTS)
    return folder
