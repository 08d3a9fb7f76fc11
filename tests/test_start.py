"""What a start imports, and that a tokenizer loaded by its class is the one of `AutoTokenizer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import write_embedded_gguf
from support.programs import python
from support.small_tokenizers import bpe, load, metaspace
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HEAVY = """grpc huggingface_hub.inference IPython matplotlib pandas ray scipy sympy torch._dynamo
    torch._inductor torch.distributed.fsdp torch.distributed.tensor
    transformers.configuration_utils transformers.generation transformers.modeling_utils
    transformers.models.auto"""
"""Modules, each a tenth of a second or more, that a model with a table and a fast tokenizer does
not need."""
COMMAND = """
import sys
from tpengine.cli.main import main
code = main(sys.argv[1:])
print(*sys.modules, sep="\\n", file=sys.stderr)
sys.exit(code)
"""
SMALL = ["--cpu-kv-cache-space", "0.05", "--max-model-len", "512", "--max-tokens", "2"]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model in one file."""
    return str(write_embedded_gguf(tmp_path_factory.mktemp("gguf")))


@pytest.mark.parametrize(
    ("words", "is_gguf"),
    [
        (["chat", "Hello"], True),
        pytest.param(["generate", "Once"], False, marks=pytest.mark.soak),
        pytest.param(["generate", "Once"], True, marks=pytest.mark.soak),
        pytest.param(["chat", "Hello"], False, marks=pytest.mark.soak),
    ],
)
def test_modules_of_a_start(words: list[str], is_gguf: bool, gguf_file: str) -> None:
    model = ["--model", gguf_file] if is_gguf else []
    imported = set(python("-c", COMMAND, *words, *SMALL, *model).stderr.splitlines())
    assert "torch" in imported
    assert "transformers" in imported
    assert [name for name in HEAVY.split() if name in imported] == []


CHAT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello  word 12"}, {"role": "assistant", "content": "wo"}]
TEXTS = ["hello word 12", " hello  word\n", "</s><s>hello", "h\u00e9llo \U0001f600", ""]


def byte_level(digits: bool = False) -> Backend:
    """A backend as of GPT-2; SmolLM2's also cuts digits apart."""
    backend = bpe(["<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    backend.decoder = decoders.ByteLevel()
    return _with_specials(backend)


def of_llama2() -> Backend:
    return _with_specials(metaspace())


def _with_specials(backend: Backend) -> Backend:
    backend.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    return backend


@pytest.mark.parametrize(
    ("model_type", "kind", "backend", "options"),
    [
        ("llama", "PreTrainedTokenizerFast", byte_level(True), {}),
        ("llama", "TokenizersBackend", byte_level(), {"add_bos_token": False}),
        ("llama", "GPT2Tokenizer", byte_level(True), {"add_prefix_space": True}),
        ("llama", "LlamaTokenizer", of_llama2(), {"add_bos_token": False}),
        ("llama", "LlamaTokenizerFast", of_llama2(), {"legacy": True, "add_eos_token": True}),
        ("llama", "LlamaTokenizer", byte_level(), {}),
        ("mistral", "LlamaTokenizer", of_llama2(), {}),
        ("mistral", "PreTrainedTokenizerFast", of_llama2(), {}),
        ("opt", "GPT2Tokenizer", byte_level(), {"add_bos_token": True}),
        ("bloom", "PreTrainedTokenizerFast", byte_level(), {}),
        ("bloom", "BloomTokenizerFast", byte_level(), {}),
        ("gpt2", "GPT2TokenizerFast", byte_level(), {"add_prefix_space": True}),
        ("qwen2", "Qwen2Tokenizer", byte_level(), {}),
        ("qwen2", "PreTrainedTokenizerFast", byte_level(), {}),
        ("qwen3", "Qwen2TokenizerFast", byte_level(), {}),
        ("gemma2", "GemmaTokenizer", of_llama2(), {}),
        ("phi3", "LlamaTokenizer", of_llama2(), {}),
    ],
)
def test_a_tokenizer_is_that_of_auto_tokenizer(
    model_type: str, kind: str, backend: Backend, options: dict[str, Any], tmp_path: Path
) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    hf.chat_template = CHAT
    hf.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"tokenizer_class": kind, **options}
    path.write_text(json.dumps(written))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer.hf) is type(expected)
    assert tokenizer.hf.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert tokenizer.hf.special_tokens_map == expected.special_tokens_map
    for text in TEXTS:
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, special) == ids
            assert tokenizer.decode(ids, special) == expected.decode(ids, special)
    shown = expected.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == shown
