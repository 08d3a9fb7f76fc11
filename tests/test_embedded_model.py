"""The embedded model as it ships, the grammar behind it, and the script that trains it."""

import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from oracle.test_greedy import PROMPTS
from support.oracle import Oracle
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tpengine" / "assets" / "embedded"
MAX_FOLDER_BYTES = 12_000_000
FILES = {"config.json", "generation_config.json", "tokenizer_config.json"}
FILES |= {"model.safetensors", "tokenizer.json"}
MIN_MARGIN = 0.3
"""Lead of every greedy token over the second best logit, far above what rounding moves."""


@pytest.fixture(scope="module")
def examples() -> Iterator[None]:
    """Makes the training code importable, as running the script from its folder does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield


@pytest.fixture(scope="module")
def documents(examples: None) -> ModuleType:
    return importlib.import_module("embedded_model.documents")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def words(texts: Iterable[str]) -> set[str]:
    return {word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)}


def test_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == FILES
    assert sum(sizes.values()) <= MAX_FOLDER_BYTES


def test_model_has_five_million_parameters_that_ranks_can_share(embedded_oracle: Oracle) -> None:
    model = embedded_oracle.model
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert 4.5e6 < sum(p.numel() for p in model.parameters()) < 5.5e6
    assert config.head_dim == 64
    assert config.num_key_value_heads < config.num_attention_heads
    heads = config.num_attention_heads, config.num_key_value_heads
    assert not any(size % 4 for size in (*heads, config.intermediate_size, config.vocab_size))
    assert config.vocab_size % 64 == 0
    assert config.max_position_embeddings == 2048


def test_tokenizer_and_chat_template(tokenizer: Any, embedded_oracle: Oracle) -> None:
    model = embedded_oracle.model
    assert len(tokenizer) == model.config.vocab_size
    text = 'Grüße, 12 + 7 = 19.\n  "日本" 🙂'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2, 3]
    assert set(special) == set(tokenizer.all_special_tokens)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == [0, 3]
    chat = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|user|>\nHello!<|end|>\n<|assistant|>\nHi.<|end|>\n<|user|>\nBye.<|end|>\n<|assistant|>\n"
    )
    assert tokenizer(rendered).input_ids.count(3) == 3


def test_prompts_continue_with_different_readable_text(
    embedded_oracle: Oracle, tokenizer: Any, documents: ModuleType
) -> None:
    vocabulary = words(re.sub(r"\{[^{}]*\}", " ", t) for t in documents.GRAMMAR.templates())
    openings = set()
    for answer in embedded_oracle.answers([tokenizer(prompt).input_ids for prompt in PROMPTS[:4]]):
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert text.isascii()
        assert len(words([text])) > 20
        assert words([text]) <= vocabulary | words(["s sums for the morning last number"])
        assert answer.margin > MIN_MARGIN, text
        openings.add(" ".join(text.split()[:4]))
    assert len(openings) == 4


@pytest.mark.soak
def test_reproducible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module("train_embedded_model")
    outputs = []
    for name in ("first", "second"):
        script.main(["--out", str(tmp_path / name), "--steps", "3", "--seed", "5"])
        outputs.append(capsys.readouterr().out)
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES
    assert "final loss" in outputs[0]
    assert outputs[0] == outputs[1]
    for name in FILES:
        first, second = (tmp_path / run / name for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name
