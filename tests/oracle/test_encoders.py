"""Embeddings, scores and classes of encoders, served as users do, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.engines import open_engine, open_llm
from support.gpu_walk import walk_the_gpus_way
from support.pooling_models import POOLINGS, embed_ids, hidden_states, normalized, write_modules
from support.small_encoders import (
    CLASSIFIERS,
    ENCODERS,
    MAX_POSITIONS,
    class_logits,
    random_prompts,
    write_encoder,
    write_pair_tokenizer,
)

from tpengine.cli.main import main
from tpengine.errors import ConfigError, RequestError
from tpengine.layers import gpu_attention

CLASSES = transformers.AutoModelForSequenceClassification
CLOSE = 1e-5
"""Most difference of an element of a vector of length 1, or of a probability."""
LENGTHS = (1, 40, 2, MAX_POSITIONS, 17, 1, 33, 50, 3, 23)
STEP = {"max_num_batched_tokens": 100}
"""So that prompts need several steps, and some steps have prompts of one token beside others."""
PAIRS = [("cat", "dog cat"), ("cat", "a dog"), ("a dog cat a", "b")]


PROMPTS = random_prompts(LENGTHS)


def pooled(model: Any, pooling: str) -> torch.Tensor:
    states = (hidden_states(model, prompt) for prompt in PROMPTS)
    return torch.stack([normalized(POOLINGS[pooling](each)) for each in states])


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings(name: str, tmp_path: Path) -> None:
    """A prompt gives the same bits alone as in a crowd."""
    pooling = list(POOLINGS)[list(ENCODERS).index(name) % len(POOLINGS)]
    model = write_encoder(tmp_path, name)
    with open_engine(tmp_path, pooling_type=pooling, **STEP) as engine:
        vectors = embed_ids(engine, PROMPTS)
        alone = [embed_ids(engine, [prompt])[0] for prompt in PROMPTS]
    assert torch.equal(torch.stack(alone), vectors)
    assert (vectors - pooled(model, pooling)).abs().max() < CLOSE


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["roberta", "modernbert", "gemma3_text"])
def test_ranks(name: str, ranks: int, stages: int, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name)
    options = {"pipeline_parallel_size": stages, "pooling_type": "mean", **STEP}
    with open_engine(tmp_path, ranks, **options) as engine:
        vectors = embed_ids(engine, PROMPTS)
    assert (vectors - pooled(model, "mean")).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3_text"])
def test_on_a_gpus_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts in slices."""
    model, walk = write_encoder(tmp_path, name), walk_the_gpus_way(monkeypatch)
    monkeypatch.setattr(gpu_attention, "MASK_ELEMENTS", 400)
    with open_engine(tmp_path, pooling_type="mean", **STEP) as engine:
        vectors = embed_ids(engine, PROMPTS)
    assert (vectors - pooled(model, "mean")).abs().max() < CLOSE
    assert walk.prefills > 0
    assert walk.gathers == 0


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes(name: str, tmp_path: Path) -> None:
    """ModernBERT's head may take the mean of all tokens."""
    fields = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    model = write_encoder(tmp_path, name, CLASSES, **fields)
    with open_llm(tmp_path, **STEP) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = class_logits(model, prompt).softmax(0)
        assert (torch.tensor(output.outputs.probs) - expected).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_pairs(name: str, tmp_path: Path) -> None:
    """A cross-encoder reads both texts; with BERT the tokens of the second have another type."""
    has_types = name == "bert"
    model = write_encoder(tmp_path, name, CLASSES, id2label={0: "score"})
    tokenizer = write_pair_tokenizer(tmp_path, has_types)
    with open_llm(tmp_path, **STEP) as llm:
        outputs = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)
    logits = []
    for pair, output in zip(PAIRS, outputs, strict=True):
        inputs = tokenizer(*pair)
        assert output.prompt_token_ids == inputs["input_ids"]
        types = inputs["token_type_ids"] if has_types else None
        logits.append(class_logits(model, inputs["input_ids"], types))
        assert abs(output.outputs.score - float(logits[-1].sigmoid())) < CLOSE
        plain = class_logits(model, inputs["input_ids"])
        assert not has_types or abs(float(plain.sigmoid()) - output.outputs.score) > 100 * CLOSE


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """The mean of all tokens, special ones included; pairs are compared by their cosine."""
    model = write_encoder(tmp_path, "bert")
    tokenizer = write_pair_tokenizer(tmp_path, has_types=True)
    write_modules(tmp_path, "mean")
    texts = ["cat", "dog cat a", "a"]
    with open_llm(tmp_path) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        score = llm.score("cat", "dog cat a", use_tqdm=False)[0].outputs.score
    vectors = [normalized(hidden_states(model, tokenizer.encode(text)).mean(0)) for text in texts]
    for vector, output in zip(vectors, outputs, strict=True):
        assert (torch.tensor(output.outputs.embedding) - vector).abs().max() < CLOSE
    assert abs(score - float(vectors[0] @ vectors[1])) < CLOSE


def test_what_an_encoder_does_not_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bert", "gemma3_text"):
        write_encoder(tmp_path / name, name)
        with pytest.raises(ConfigError, match=r"task = 'generate' does not fit .* do 'embed'"):
            open_llm(tmp_path / name, task="generate")
    with open_llm(tmp_path / "bert") as llm, pytest.raises(RequestError, match="makes no tokens"):
        llm.generate(PROMPTS, use_tqdm=False)
    (tmp_path / "bert" / "model.safetensors").unlink()  # it is refused before they are read
    for command in (["generate", "a"], ["bench", "latency"]):
        assert main([*command, "--model", str(tmp_path / "bert")]) != 0
        assert "makes no tokens" in capsys.readouterr().err
