"""Embeddings, scores and classes of encoders, served as users do, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
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
from support.tiny_llama import edit_json

from tpengine.checkpoint import model_files
from tpengine.cli.main import main
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, RequestError
from tpengine.layers import gpu_attention

CLASSES = transformers.AutoModelForSequenceClassification
CLOSE = 1e-5
"""Most difference of an element of a vector of length 1, or of a probability."""
LENGTHS = (1, 40, 2, MAX_POSITIONS, 17, 1, 33, 50, 3, 23)
STEP = {"max_num_batched_tokens": 100}
"""So that prompts need several steps, and some steps have prompts of one token beside others."""
CLEAR = 0.05
"""Least effect of what a test looks at, on the largest element of hidden states."""
PAIRS = [("cat", "dog cat"), ("cat", "a dog"), ("a dog cat a", "b")]
PROMPTS = random_prompts(LENGTHS)


def states(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[torch.Tensor]:
    """What transformers computes of each."""
    return [hidden_states(model, prompt) for prompt in prompts]


def distance(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def pooled(model: Any, pooling: str = "mean") -> torch.Tensor:
    return torch.stack([normalized(POOLINGS[pooling](each)) for each in states(model)])


def embed(folder: Path, ranks: int = 1, **options: Any) -> torch.Tensor:
    with open_engine(folder, ranks, pooling_type="mean", **STEP, **options) as engine:
        return embed_ids(engine, PROMPTS)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings(name: str, tmp_path: Path) -> None:
    """A prompt gives the same bits alone as in a crowd."""
    pooling = list(POOLINGS)[list(ENCODERS).index(name) % len(POOLINGS)]
    model = write_encoder(tmp_path, name)
    with open_engine(tmp_path, pooling_type=pooling, **STEP) as engine:
        vectors = embed_ids(engine, PROMPTS)
        alone = [embed_ids(engine, [prompt])[0] for prompt in PROMPTS]
    assert torch.equal(torch.stack(alone), vectors)
    assert distance(vectors, pooled(model, pooling)) < CLOSE


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ENCODERS)
def test_ranks(name: str, ranks: int, stages: int, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name)
    vectors = embed(tmp_path, ranks, pipeline_parallel_size=stages)
    assert distance(vectors, pooled(model)) < CLOSE


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3_text"])
def test_on_a_gpus_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts in slices."""
    model, walk = write_encoder(tmp_path, name), walk_the_gpus_way(monkeypatch)
    monkeypatch.setattr(gpu_attention, "MASK_ELEMENTS", 400)
    assert distance(embed(tmp_path), pooled(model)) < CLOSE
    assert walk.prefills > 0
    assert walk.gathers == 0


@pytest.mark.parametrize("name", ENCODERS)
def test_oracle_could_tell(name: str, tmp_path: Path) -> None:
    """A wrong model cannot pass: the oracle's states depend on later tokens, on positions and on
    each token at the border of a window."""
    model = write_encoder(tmp_path / "model", name)
    long = [prompt for prompt in PROMPTS if len(prompt) > 1]
    changed = states(model, [[*prompt[:-1], 6 + (prompt[-1] - 5) % 313] for prompt in long])
    firsts = [[each[0] for each in lists] for lists in (changed, states(model, long))]
    assert distance(*firsts) > CLEAR
    same = hidden_states(model, [7] * 17)
    if not any(word in name for word in ("modernbert", "gemma")):  # rotary positions are relative
        assert distance(same[1:], same[:-1]) > CLEAR
    for field in ("local_attention", "sliding_window"):
        if field in ENCODERS[name]:
            other = write_encoder(tmp_path / field, name, **{field: ENCODERS[name][field] + 2})
            assert distance(states(other), states(model)) > CLEAR


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3_text"])
@pytest.mark.parametrize(("form", "loss"), [("int8", 0.15), ("int4", 0.7)])
def test_quantized(name: str, form: str, loss: float, tmp_path: Path) -> None:
    expected = pooled(write_encoder(tmp_path, name))
    error = float((embed(tmp_path, quantization=form) - expected).norm() / expected.norm())
    assert loss / 20 < error < loss


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_checkpoints_of_pretraining(name: str, tmp_path: Path) -> None:
    """Models with a head that predicts tokens, and names and buffers of early files."""
    model = write_encoder(tmp_path, name, transformers.AutoModelForMaskedLM)
    expected = pooled(model.base_model)
    assert distance(embed(tmp_path), expected) < CLOSE
    tensors = load_file(tmp_path / "model.safetensors")
    names = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
    old = {key.replace(*names[0]).replace(*names[1]): x for key, x in tensors.items()}
    if name != "modernbert":
        old[f"{name}.embeddings.position_ids"] = torch.arange(8)[None]
        old[f"{name}.pooler.dense.weight"] = torch.zeros(64, 64)
        old[f"{name}.pooler.dense.bias"] = torch.zeros(64)
    torch.save(old, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert distance(embed(tmp_path), expected) < CLOSE


def test_modernbert_in_fields_of_transformers_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_encoder(tmp_path, "modernbert")
    old = model_files.read_hf_config(str(tmp_path), trust_remote_code=False)
    for field, kind in (("global", "full"), ("local", "sliding")):
        theta = old["rope_parameters"][f"{kind}_attention"]["rope_theta"]
        old[f"{field}_rope_theta"] = theta
    old["global_attn_every_n_layers"] = 2
    del old["rope_parameters"], old["layer_types"]
    monkeypatch.setattr(model_files, "read_hf_config", lambda *args: old)
    assert distance(embed(tmp_path), pooled(model)) < CLOSE


def test_positions_after_padding(tmp_path: Path) -> None:
    write_encoder(tmp_path, "xlm-roberta")
    args = EngineArgs(str(tmp_path), device="cpu")
    assert args.create_engine_config("cpu").model.max_model_len == MAX_POSITIONS
    with pytest.raises(ConfigError, match=f"the {MAX_POSITIONS} positions"):
        replace(args, max_model_len=MAX_POSITIONS + 1).create_engine_config("cpu")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("roberta", "pad_token_id", None),
        ("modernbert", "local_attention", 0),
    ],
)
def test_refused(name: str, field: str, value: object, tmp_path: Path) -> None:
    write_encoder(tmp_path, name)
    edit_json(tmp_path / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(ConfigError, match=field):
        embed(tmp_path)


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
