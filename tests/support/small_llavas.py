"""Small random LLaVA 1.5 models, and pictures for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, processors

from support import whole_models
from support.picture_files import encoded
from support.tiny_llama import byte_level_tokenizer
from support.whole_models import PICTURES

NUM_ROWS = 4
"""Tokens of a picture."""
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: {% for p in m.content %}"
    "{{ '<image>\n' if p.type == 'image' else p.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
QUESTION = {"type": "text", "text": "What is this?"}
PNG = encoded(Image.fromarray(PICTURES[0]), "PNG")
"""File of the first picture."""


def write_llava(folder: Path, template: str = LLAVA_TEMPLATE, of_processor: bool = False) -> Path:
    """Writes a model with its processors.

    Args:
        of_processor: whether the template is in a file of its own, which only transformers'
            processors read.
    """
    image = AddedToken("<image>", special=True, normalized=False)
    tokenizer = byte_level_tokenizer([], [], added=[image])
    begin = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[begin]
    )
    if not of_processor:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if of_processor:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    whole = whole_models.write_llava(folder, tokenizer.convert_tokens_to_ids("<image>"))
    whole.processor.save_pretrained(folder)
    return folder


def teach(folder: Path, question: str, lessons: Mapping[str, Image.Image]) -> None:
    """Trains a model until it answers a question about each picture with the picture's text."""
    model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    begin = f"USER: {'<image>' * NUM_ROWS}\n{question} ASSISTANT:"
    for _ in range(150):
        for text, picture in lessons.items():
            ids, asked = (tokenizer(part)["input_ids"] for part in (f"{begin}{text}</s>", begin))
            labels = [*([-100] * len(asked)), *ids[len(asked) :]]
            tensors = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
            tensors |= processor([picture], return_tensors="pt")
            model(**tensors).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def data_url(picture: np.ndarray | bytes) -> str:
    """The URL that holds a picture, or these bytes instead."""
    data = picture if isinstance(picture, bytes) else encoded(Image.fromarray(picture), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def url_part(url: str) -> dict[str, Any]:
    """The part of a message that holds a URL, in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def user(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": list(parts)}]
