"""Folder, oracle and prompts of each variant, made once per session."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.oracle import MIN_MARGIN, Oracle

from families.variants import VOCAB_SIZE, Variant

PROMPT_LENGTHS = (300, 70, 19, 1)
"""The longest prompt comes first, so that it has to share a small cache."""
NUM_CANDIDATES = 4


@dataclass(frozen=True)
class Subject:
    """A variant on disk, with its oracle and prompts whose answers do not depend on rounding."""

    variant: Variant
    folder: Path
    oracle: Oracle
    prompts: list[list[int]]


class Subjects:
    """Subjects by variant."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._subjects: dict[str, Subject] = {}

    def folder(self, variant: Variant) -> Path:
        """Folder of the variant; tests must not change it."""
        folder = self._root / variant.name
        if not folder.exists():
            variant.write(folder)
        return folder

    def __call__(self, variant: Variant) -> Subject:
        if variant.name not in self._subjects:
            folder = self.folder(variant)
            oracle = Oracle(folder)
            rng = random.Random(1)
            prompts = [_clear_prompt(oracle, length, rng) for length in PROMPT_LENGTHS]
            self._subjects[variant.name] = Subject(variant, folder, oracle, prompts)
        return self._subjects[variant.name]


def _clear_prompt(oracle: Oracle, length: int, rng: random.Random) -> list[int]:
    """Returns the first random prompt whose answer has no near-tie. All are computed as one batch,
    which is as fast as one prompt."""
    for _ in range(5):
        candidates = [
            [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for _ in range(NUM_CANDIDATES)
        ]
        for candidate, answer in zip(candidates, oracle.answers(candidates), strict=True):
            if answer.margin >= MIN_MARGIN:
                return candidate
    raise AssertionError(f"no prompt of {length} tokens without a near-tie")


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return Subjects(tmp_path_factory.mktemp("families"))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses one thread: threads that wait for each other make small models ten times slower."""
    monkeypatch.setenv("TPENGINE_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
