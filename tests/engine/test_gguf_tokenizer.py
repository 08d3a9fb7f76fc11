"""Tokenizers from the vocabularies of GGUF files, against those of transformers."""

from __future__ import annotations

import io
import json
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from support.small_tokenizers import load
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tpengine.engine.tokenizer import tokenizer_archive
from tpengine.errors import ConfigError, InvalidPromptError, ModelLoadError

TEXTS = [
    "Hello  world, it's 1234567 o'clock!\n\n  Don't WAIT\tnow.",
    "def f(x):\n    return x ** 2  # 平方 été Straße 🙂\r\n",
    "<|im_start|>user\nHi<|im_end|>  <|im_start|>",
    " leading and trailing ",
    "",
]
CONTROLS = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def write(path: Path, kind: str, pre: str, tokens: list[str], **fields: Any) -> Path:
    """A file with a vocabulary, whose first tokens are `CONTROLS`, and no tensors."""
    writer = GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(fields.pop("types", [3] * len(CONTROLS) + [1] * (len(tokens) - 3)))
    writer.add_bos_token_id(fields.pop("bos", 1))
    writer.add_eos_token_id(fields.pop("eos", 2))
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(splits: pre_tokenizers.PreTokenizer) -> tuple[Backend, list[str], list[str]]:
    """A byte-level tokenizer, its tokens and its merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = splits
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=CONTROLS, show_progress=False
    )
    backend.train_from_iterator([*TEXTS * 3, Path(__file__).read_text()], trainer)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return backend, [str(backend.id_to_token(i)) for i in range(backend.get_vocab_size())], merges


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "gpt-4o"])
def test_byte_level_ids(pre: str, tmp_path: Path) -> None:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    splits = {"smollm": pre_tokenizers.Sequence([digits, to_bytes])}.get(pre, to_bytes)
    backend, tokens, merges = trained(splits)
    chat = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    path = write(tmp_path / "v.gguf", "gpt2", pre, tokens, token_merges=merges, chat_template=chat)
    tokenizer: Any = load(path)
    expected = backend
    if pre not in ("gpt-2", "smollm"):
        expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="v.gguf").backend_tokenizer
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.byte_table is not None
    assert tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])[0] == 1
    assert (tokenizer.encode("Hello")[:1] == [1]) == (pre in ("llama-bpe", "tekken"))


def sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Merges the neighbours whose token has the best score, the leftmost first."""
    parts = list(text)
    while pairs := [
        (-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
    ]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    pieces = [[part] if part in ids else [f"<0x{b:02X}>" for b in part.encode()] for part in parts]
    return [ids[piece] for several in pieces for piece in several]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_ids(prefixed: bool, tmp_path: Path) -> None:
    _, tokens, _ = trained(pre_tokenizers.Metaspace(prepend_scheme="never"))
    words = [token for token in tokens[3:] if len(token) > 1]
    letters = sorted(set("".join(TEXTS).replace(" ", "\u2581")) - set("平方"))  # bytes instead
    tokens = [*CONTROLS, *(f"<0x{i:02X}>" for i in range(256)), *letters, *words]
    tokens = list(dict.fromkeys(tokens))
    types = [3] * 3 + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    fields = {"types": types, "token_scores": scores, "add_space_prefix": prefixed}
    path = write(tmp_path / "v.gguf", "llama", "default", tokens, **fields)
    tokenizer = load(path)
    numbers = {token: i for i, token in enumerate(tokens)}
    for text in ("Hello world", "été 平方", "it's  two", "\n", *TEXTS[:2]):
        shown = ("\u2581" if prefixed else "") + text.replace(" ", "\u2581")
        # A vocabulary of this kind begins with bos unless it says otherwise.
        assert tokenizer.encode(text) == [1, *sentencepiece(shown, numbers, scores)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.byte_table is not None
    with pytest.raises(ConfigError, match="has no slow tokenizer"):
        load(path, "slow")


def test_tokens_of_phi3_strip_what_follows_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|end|>", "\u2581", "\n", "H", "i"]
    fields = {"types": [2, 3, 3, 3, 4, 1, 1, 1, 1], "token_scores": [0.0] * len(tokens)}
    for architecture, kept in (("phi3", []), ("llama", [6])):
        fields |= {"architecture": architecture, "add_space_prefix": False}
        path = write(tmp_path / f"{architecture}.gguf", "llama", "default", tokens, **fields)
        tokenizer = load(path)
        ids = tokenizer.encode("<|user|>\nHi<|end|>\n<s>\n", add_special_tokens=False)
        assert ids == [3, *kept, 7, 8, 4, *kept, 1, 6]
        assert tokenizer.decode(ids) == "Hi\n" if not kept else "\nHi\n\n"
        assert {1, 2, 3, 4} <= tokenizer.special_token_ids  # <|end|> is user-defined here


def test_a_file_that_says_no_pattern(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(write(tmp_path / "v.gguf", "gpt2", "", [*CONTROLS, "a"], token_merges=[]))
    assert "split as GPT-2 splits them" in caplog.text


@pytest.mark.parametrize(
    ("kind", "pre", "problem"),
    [
        ("rwkv", "default", "tokenizer.ggml.model = 'rwkv' .* supported: gpt2, llama"),
        ("gpt2", "new", "tokenizer.ggml.pre = 'new' .* supported: default, gpt-2"),
        ("llama", "default", r"cannot be loaded \(KeyError: 'scores'\)"),
    ],
)
def test_other_vocabularies_are_refused(kind: str, pre: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", kind, pre, [*CONTROLS, "a"])
    with pytest.raises(ModelLoadError, match=problem):
        load(path)


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert load(write(tmp_path / "v.gguf", "none", "default", [*CONTROLS, "a"])) is None


def test_templates_have_names(tmp_path: Path) -> None:
    """As in a folder: tools choose `tool_use`, and a caller any of them."""
    named = [{"name": name, "template": f"{{{{ '{name}' }}}}"} for name in ("tool_use", "rag")]
    plain = {"name": "default", "template": "{{ 'plain' }}{{ bos_token }}"}
    path = write(tmp_path / "v.gguf", "gpt2", "gpt-2", CONTROLS, chat_template=[*named, plain])
    tokenizer = load(path)
    talk = [{"role": "user", "content": "Hello"}]
    assert tokenizer.render_chat(talk) == "plain<|im_start|>"
    assert tokenizer.render_chat(talk, tools=[{"type": "function"}]) == "tool_use"
    assert tokenizer.render_chat(talk, chat_template="rag") == "rag"
    assert tokenizer.render_chat(talk, chat_template="{{ 1 + 1 }}") == "2"
    for name in ("rags", "", "default.jinja"):
        with pytest.raises(InvalidPromptError, match=r"chat_template .*\(default, rag, tool_use\)"):
            tokenizer.render_chat(talk, chat_template=name)
    archive = zipfile.ZipFile(io.BytesIO(tokenizer_archive(tokenizer, str(path))))
    assert "additional_chat_templates/rag.jinja" in archive.namelist()


@pytest.mark.parametrize("name", ["bos", "eos", "unk_token_id", "mask_token_id", "sep_token_id"])
def test_a_special_token_is_one_of_the_tokens(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", "gpt2", "gpt-2", CONTROLS, pad_token_id=9, **{name: 3})
    with pytest.raises(ModelLoadError, match=r"_token_id = 3 in .* the id of one of its 3 tokens"):
        load(path)
    path = write(tmp_path / "w.gguf", "gpt2", "gpt-2", CONTROLS, pad_token_id=9, **{name: 2})
    assert load(path) is not None
