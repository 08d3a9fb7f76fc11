"""A small random Llama with a byte-level tokenizer, and engines on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from support import engines
from support.engines import serve
from support.small_llamas import SHAPES
from support.tiny_llama import byte_level_tokenizer
from tpengine import LLMEngine, RequestOutput, SamplingParams

VOCAB_SIZE = 288
END_TOKEN_ID = 2


def write(path: Path) -> Path:
    """A random Llama and its tokenizer."""
    replace(SHAPES["grouped"], vocab_size=VOCAB_SIZE, seed=15).write(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path, *added: AddedToken, chat_template: str | None = None) -> None:
    """Byte-level BPE that knows "ab" and, apart from it, " ab"; and added tokens."""
    words, merges = ["ab", "Ġab"], [("a", "b"), ("Ġ", "ab")]
    tokenizer = byte_level_tokenizer(words, merges, added=added)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def make_engine(folder: Path, **kwargs: Any) -> LLMEngine:
    """An engine in float32 with room for little."""
    room = {"num_device_blocks_override": None, "cpu_kv_cache_space": 0.01}
    if "num_device_blocks_override" in kwargs:
        room = {}
    kwargs = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "device": "cpu", **room, **kwargs}
    return engines.make_engine(folder, **kwargs)


def run(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Runs requests together; the last output of each."""
    prompts, params = zip(*requests, strict=True)
    return serve(engine, prompts, params)
