"""Small random Llamas whose tokenizers and chat templates know tools, in the known forms."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from support.byte_llama import write_tokenizer
from support.tables import FOLDER
from support.tiny_llama import TinyLlama


def _template(name: str) -> str:
    return (FOLDER / "tool_templates" / f"{name}.jinja").read_text().rstrip()


_HERMES = _template("hermes")
_QWEN3 = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATES = {
    # name: template, its special tokens, and other added tokens
    "hermes": (_HERMES, (), ("<tool_call>", "</tool_call>")),
    "hermes in text": (_HERMES, (), ()),
    "llama3": (_template("llama3"), ("<|python_tag|>",), ()),
    "mistral": (_template("mistral"), ("[TOOL_CALLS]", "[TOOL_RESULTS]"), ()),
    "mistral 2025": (_template("mistral_2025"), ("[TOOL_CALLS]", "[ARGS]"), ()),
    "thinking": (_HERMES.replace("A: {% endif", "A: <think>\n{% endif"), (), _QWEN3),
}


def write(folder: Path, name: str) -> Path:
    """A model of one of the templates, with its tokenizer."""
    template, special, plain = TEMPLATES[name]
    added = [AddedToken(text, special=True) for text in special]
    added += [AddedToken(text, special=False) for text in plain]
    TinyLlama(vocab_size=288, max_positions=4096).write(folder)
    write_tokenizer(folder, *added, chat_template=template)
    return folder
