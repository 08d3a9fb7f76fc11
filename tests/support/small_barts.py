"""Small random models of the BART family, and what transformers makes of encoder prompts."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from support.oracle import MIN_MARGIN

START = 2
"""The id before each output, which is the end token too, as in BART's files."""
MAX_POSITIONS = 96
VOCAB_SIZE = 319
_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": MAX_POSITIONS,
    "init_std": 0.4,
    "forced_eos_token_id": None,
    "decoder_start_token_id": START,
}


def write_bart(folder: Path, **config: Any) -> Path:
    """Writes a model in which biases are not zero and norms are not one; returns its folder."""
    fields = transformers.BartConfig(**{**_CONFIG, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.BartForConditionalGeneration(fields)
        with torch.no_grad():
            model.final_logits_bias.normal_(0.0, 0.5)
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif "positions" in name or "out_proj" in name or "fc2" in name:
                    parameter.mul_(3.0)  # so that not only the last token decides
    model.generation_config.forced_bos_token_id = config.get("forced_bos_token_id")
    model.save_pretrained(folder)
    return folder


@functools.cache
def transformers_bart(folder: Path) -> Any:
    """The model in a folder, in float32."""
    kind = transformers.BartForConditionalGeneration
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def encoder_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def logits_after(
    model: Any, encoder_ids: Sequence[int], decoder_ids: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` from which each token of an output is chosen."""
    decoder = torch.tensor([[*decoder_ids, *output]])
    with torch.inference_mode():
        encoder = torch.tensor([list(encoder_ids)])
        logits: torch.Tensor = model(input_ids=encoder, decoder_input_ids=decoder).logits[0]
    return logits[len(decoder_ids) - 1 : -1]


def assert_right(model: Any, outputs: Sequence[Any], is_greedy: bool = True) -> None:
    """Makes sure that `RequestOutput`s have the probabilities of transformers, and the likeliest
    tokens, but for rounding."""
    for output in outputs:
        assert output.error is None
        for completion in output.outputs:
            ids = completion.token_ids
            both = output.encoder_prompt_token_ids, output.prompt_token_ids, ids
            logits = logits_after(model, *both)
            chosen = logits.gather(1, torch.tensor([ids]).t())[:, 0]
            lead = float((logits.amax(dim=1) - chosen).max())
            assert lead < MIN_MARGIN or not is_greedy, ids
            logprobs = chosen - logits.logsumexp(dim=1)
            assert abs(completion.cumulative_logprob - float(logprobs.sum())) < 1e-3 * len(ids)
    assert len({output.outputs[0].token_ids for output in outputs}) > len(outputs) // 3
