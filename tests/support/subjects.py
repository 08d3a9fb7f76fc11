"""Each variant on disk with its oracle and prompts, and short ways to load it and to serve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engines import greedy, open_engine, serve
from support.foretold import foretell
from support.oracle import Oracle
from support.variants import VARIANTS, Variant
from support.workers import loaded_worker
from tpengine import LLMEngine

PROMPT_LENGTHS = (300, 70, 19, 1)
"""The longest prompt comes first, so that it has to share a small cache."""
BLOCK_SIZE = 16
NUM_TOKENS = 32
"""Of an answer: two blocks."""
LONGEST = max(PROMPT_LENGTHS) + NUM_TOKENS
BY_NAME = {variant.name: variant for variant in VARIANTS}


@dataclass(frozen=True)
class Subject:
    """A variant on disk, with its oracle and random prompts."""

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
            oracle = Oracle(folder, NUM_TOKENS)
            prompts = oracle.random_prompts(PROMPT_LENGTHS, seed=1)
            self._subjects[variant.name] = Subject(variant, folder, oracle, prompts)
        return self._subjects[variant.name]


def load(folder: Path, **args: Any) -> None:
    """Builds and fills the model like an engine."""
    loaded_worker(folder, **{"device": "cpu", "max_model_len": LONGEST, **args}).shutdown()


def generate(
    subject: Subject,
    tp_size: int = 1,
    logprobs: int | None = None,
    look: Callable[[LLMEngine], object] = lambda engine: None,
    **args: Any,
) -> list[Any]:
    """Answers to all prompts in one batch, from a new engine; `look` sees it at the end. If it
    looks ahead, it drafts from the answers of transformers."""
    cache = {} if "num_device_blocks_override" in args else {"cpu_kv_cache_space": 0.05}
    args = {"max_model_len": LONGEST, "block_size": BLOCK_SIZE, **cache, **args}
    params = greedy(subject.oracle.num_tokens, logprobs=logprobs)
    with open_engine(subject.folder, tp_size, **args) as engine:
        if engine.get_scheduler_config().lookahead is not None:
            texts = zip(subject.prompts, subject.oracle.answers(subject.prompts), strict=True)
            foretell(engine, {tuple(prompt): [answer.token_ids] for prompt, answer in texts})
        outputs = serve(engine, subject.prompts, params)
        look(engine)
    return [output.outputs[0] for output in outputs]


def assert_equal_to_oracle(subject: Subject, outputs: list[Any]) -> None:
    subject.oracle.assert_greedy(subject.prompts, [output.token_ids for output in outputs])
