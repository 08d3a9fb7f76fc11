"""Random models and their oracles, made once per test run.

Which small model a test takes: `tiny_llama` describes the Llamas that `ModelShop` writes (`zoo`
names some, `small_llamas` has engines on them); `variants` has every family, `subjects` their
folders; `byte_llama` has a tokenizer of bytes, `tool_models` chat templates with tools;
`bare_model` is a model without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.oracle import Oracle
from support.tiny_llama import TinyLlama, write_word_tokenizer


class ModelShop:
    """Random models and their oracles, each made once per test run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[tuple[TinyLlama, bool], Path] = {}
        self._oracles: dict[Path, Oracle] = {}

    def folder(self, spec: TinyLlama, tokenizer: bool = False) -> Path:
        """The folder of a model; tests must not change it (copy it first)."""
        key = (spec, tokenizer)
        if key not in self._folders:
            folder = self._root / f"model-{len(self._folders)}"
            folder.mkdir()
            spec.write(folder)
            if tokenizer:
                write_word_tokenizer(folder, spec.vocab_size)
            self._folders[key] = folder
        return self._folders[key]

    def oracle(self, folder: Path | str) -> Oracle:
        """The oracle of the model in a folder."""
        folder = Path(folder)
        if folder not in self._oracles:
            self._oracles[folder] = Oracle(folder)
        return self._oracles[folder]

    def problem(
        self, spec: TinyLlama, lengths: Sequence[int], seed: int
    ) -> tuple[Path, Oracle, list[list[int]]]:
        """A model's folder, its oracle, and random prompts, for `Oracle.assert_greedy`."""
        folder = self.folder(spec)
        oracle = self.oracle(folder)
        return folder, oracle, oracle.random_prompts(lengths, seed)

    def clear_problem(
        self, spec: TinyLlama, lengths: Sequence[int], seed: int
    ) -> tuple[Path, Oracle, list[list[int]]]:
        """Likewise with prompts of clear choices, whose answers show that an engine is wrong."""
        folder, oracle, _ = self.problem(spec, (), seed)
        prompts = oracle.prompts(lengths, seed)
        oracle.assert_discerning(prompts)
        return folder, oracle, prompts
