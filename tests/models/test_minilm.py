"""A real model, all-MiniLM-L6-v2: vectors equal to those of transformers on the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import third_party
from support.engines import open_llm
from support.pooling_models import hidden_states, normalized
from support.tables import read_table

from tpengine.inputs import PoolingParams

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]
PROMPTS = read_table("prompts")
TEXTS = [*PROMPTS["questions"], *PROMPTS["texts"]]
LOST = {"int8": 3e-3, "int4": 0.06}
"""Most that a quantization takes from a cosine of 1."""


@pytest.fixture(name="folder", scope="module")
def folder_fixture() -> Path:
    return third_party.minilm()


@pytest.fixture(scope="module")
def vectors(folder: Path) -> torch.Tensor:
    """By transformers: the mean of the hidden states of as many tokens as the model takes."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, truncation=True, max_length=256).input_ids for text in TEXTS]
    return torch.stack([normalized(hidden_states(model, own).mean(0)) for own in ids])


def least_cosine(folder: Path, vectors: torch.Tensor, **options: Any) -> float:
    """Of our vector of a text and that of transformers."""
    with open_llm(folder, num_device_blocks_override=None, **options) as llm:
        params = PoolingParams(truncate_prompt_tokens=-1)
        outputs = llm.embed(TEXTS, pooling_params=params, use_tqdm=False)
    ours = torch.tensor([output.outputs.embedding for output in outputs])
    assert ours.shape == (len(TEXTS), 384)
    return float(torch.cosine_similarity(ours.double(), vectors.double()).min())


def test_vectors_and_their_order(folder: Path, vectors: torch.Tensor) -> None:
    assert least_cosine(folder, vectors) > 1 - 1e-5
    with open_llm(folder, num_device_blocks_override=None) as llm:
        scores = llm.score(TEXTS[0], TEXTS, truncate_prompt_tokens=-1, use_tqdm=False)
    expected = vectors @ vectors[0]
    ours = torch.tensor([output.outputs.score for output in scores])
    assert float((ours - expected).abs().max()) < 1e-4
    assert ours.argsort().tolist() == expected.argsort().tolist()


@pytest.mark.parametrize(("form", "lost"), LOST.items())
def test_what_a_quantization_loses(
    folder: Path, vectors: torch.Tensor, form: str, lost: float
) -> None:
    assert 1e-7 < 1 - least_cosine(folder, vectors, quantization=form) < lost
