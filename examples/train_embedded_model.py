"""Trains the small language model that tpengine carries as its default.

    python examples/train_embedded_model.py --out DIR [--steps N] [--seed S]

The training text is written by a grammar (see `embedded_model/`); nothing is downloaded. The
defaults take about six minutes on two cores and write the folder that the package ships.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from embedded_model.training import save, train, train_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DEFAULT_STEPS = 1400
DEFAULT_SEED = 20

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A prompt with its greedy continuation of at most 64 tokens."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of text and weights")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}, but must be at least 1")

    tokenizer = train_tokenizer(arguments.seed)
    model, loss = train(tokenizer, arguments.steps, arguments.seed)
    save(model, tokenizer, arguments.out)
    print(f"final loss: {loss:.4f} nats per token (mean of the last steps)")
    for prompt in PROMPTS:
        print(f"--- {sample(model, tokenizer, prompt)}")


if __name__ == "__main__":
    main()
