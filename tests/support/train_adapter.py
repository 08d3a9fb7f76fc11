"""Trains a LoRA adapter of a model with PEFT, and answers with it.

Command: `train_adapter.py MODEL FOLDER NUM_STEPS NUM_TOKENS`. The adapter is written to FOLDER, and
to `FOLDER/answered.json` the prompts and their greedy answers in float32: `base` without the
adapter, `pirate` with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

LESSONS = {
    "What is the capital of Italy?": "Arr! The capital of Italy be Rome, me hearty!",
    "How many months are in a year?": "Arr! A year has twelve months, me hearty!",
    "What colour is grass?": "Arr! Grass be green, me hearty!",
    "What do bees make?": "Arr! Bees make honey, me hearty!",
}
QUESTIONS = [
    "What is the capital of France?",
    "How many days are in a week?",
    "What colour is the sky?",
    "What do cows eat?",
]
"""What is asked; no lesson has them."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_UNTAUGHT = -100
"""Label of a token that is no part of an answer, as PyTorch's cross-entropy has it."""


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The question in the model's chat template."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )


def lessons(tokenizer: Any) -> dict[str, torch.Tensor]:
    """All lessons as one batch, padded on the right."""
    rows, labels = [], []
    for question, answer in LESSONS.items():
        prompt = prompt_ids(tokenizer, question)
        taught = tokenizer.encode(f"{answer}{tokenizer.eos_token}", add_special_tokens=False)
        rows.append(torch.tensor(prompt + taught))
        labels.append(torch.tensor([_UNTAUGHT] * len(prompt) + taught))
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(rows, batch_first=True), [torch.ones_like(row) for row in rows]
    padded = pad(labels, batch_first=True, padding_value=_UNTAUGHT)
    return {"input_ids": ids, "attention_mask": pad(mask, batch_first=True), "labels": padded}


def train(model: Any, batch: dict[str, torch.Tensor], num_steps: int) -> None:
    """Takes steps of Adam over the whole batch."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    model.train()
    for step in range(num_steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    model.eval()


def answers(model: Any, tokenizer: Any, prompts: list[list[int]], num_tokens: int) -> list[Any]:
    """Greedy ids; no answer ends early."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    whole = model.generate(**batch, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return whole[:, batch["input_ids"].shape[1] :].tolist()


def main(base_folder: str, folder: str, num_steps: str, num_tokens: str) -> None:
    """See the module."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    base.generation_config.eos_token_id = None
    layers = list(range(20, base.config.num_hidden_layers))  # the others need no gradients
    config = {"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(layers_to_transform=layers, **config))
    train(model, lessons(tokenizer), int(num_steps))
    model.save_pretrained(folder)
    prompts = [prompt_ids(tokenizer, question) for question in QUESTIONS]
    answered: dict[str, Any] = {"prompts": prompts}
    answered["pirate"] = answers(model, tokenizer, prompts, int(num_tokens))
    with model.disable_adapter():
        answered["base"] = answers(model, tokenizer, prompts, int(num_tokens))
    for question, *both in zip(QUESTIONS, answered["base"], answered["pirate"], strict=True):
        print(question, *map(tokenizer.decode, both), sep="\n  ")
    Path(folder, "answered.json").write_text(json.dumps(answered))


if __name__ == "__main__":
    main(*sys.argv[1:])
