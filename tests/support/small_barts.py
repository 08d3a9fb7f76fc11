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
PAD = VOCAB_SIZE - 1
"""The last id, as in Marian's files: it begins each output there, and no output has it."""
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
}
_CONFIG = SIZES | {
    "max_position_embeddings": MAX_POSITIONS,
    "init_std": 0.4,
    "forced_eos_token_id": None,
    "decoder_start_token_id": START,
}


FAMILIES: dict[str, dict[str, Any]] = {
    "Bart": {},
    "MBart": {"scale_embedding": True, "forced_bos_token_id": 7},
    "Marian": {
        "scale_embedding": True,
        "activation_function": "swish",
        "init_std": 0.15,
        "pad_token_id": PAD,
        "decoder_start_token_id": PAD,
        "eos_token_id": START,
    },
    "Pegasus": {
        "scale_embedding": True,
        "activation_function": "relu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": START,
    },
}
"""Of each family what sets its files apart."""


def write_bart(folder: Path, family: str = "Bart", **config: Any) -> Path:
    """Writes a model in which biases are not zero and norms are not one; returns its folder."""
    config = FAMILIES[family] | config
    fields = getattr(transformers, f"{family}Config")(**{**_CONFIG, **config})
    head = "MTModel" if family == "Marian" else "ForConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}{head}")(fields)
        with torch.no_grad():
            model.final_logits_bias.normal_(0.0, 0.5)
            randomize(model, ("positions", "out_proj", "fc2"))
            if family in ("MBart", "Pegasus"):  # a norm before the head
                model.model.shared.weight.mul_(0.1)
                model.final_logits_bias.mul_(0.1)
    if family == "Marian":
        model.final_logits_bias[0, PAD] = 3.0
        model.generation_config.bad_words_ids = [[PAD]]
    model.generation_config.forced_bos_token_id = config.get("forced_bos_token_id")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def randomize(model: Any, grown: Sequence[str]) -> None:
    """Makes biases that are not zero, norms that are not one, and larger weights where a name has a
    part of `grown`, so that not only the last token decides. Tables of sines stay."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(0.0, 0.1)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.requires_grad and any(part in name for part in grown):
            parameter.mul_(3.0)


@functools.cache
def transformers_bart(folder: Path) -> Any:
    """The model in a folder, in float32."""
    kind = transformers.AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def encoder_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random ids of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, PAD) for _ in range(length)] for length in lengths]


def logits_after(
    model: Any, decoder_ids: Sequence[int], output: Sequence[int], **encoder: torch.Tensor
) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` from which each token of an output is chosen.

    Args:
        encoder: what its encoder reads, as transformers names it.
    """
    decoder = torch.tensor([[*decoder_ids, *output]])
    with torch.inference_mode():
        logits = model(decoder_input_ids=decoder, **encoder).logits[0]
    return logits[len(decoder_ids) - 1 : -1].clone()


def assert_right(model: Any, outputs: Sequence[Any], is_greedy: bool = True) -> None:
    """Makes sure that `RequestOutput`s have the probabilities of transformers, and the likeliest
    tokens, but for rounding."""
    for output in outputs:
        assert output.error is None
        for completion in output.outputs:
            ids = completion.token_ids
            encoder = torch.tensor([output.encoder_prompt_token_ids])
            logits = logits_after(model, output.prompt_token_ids, ids, input_ids=encoder)
            chosen = logits.gather(1, torch.tensor([ids]).t())[:, 0]
            logprobs = chosen - logits.logsumexp(dim=1)
            for (token_id,) in model.generation_config.bad_words_ids or []:
                logits[:, token_id] = -torch.inf
            lead = float((logits.amax(dim=1) - chosen).max())
            assert lead < MIN_MARGIN or not is_greedy, ids
            assert abs(completion.cumulative_logprob - float(logprobs.sum())) < 1e-3 * len(ids)
    assert len({output.outputs[0].token_ids for output in outputs}) > len(outputs) // 3
