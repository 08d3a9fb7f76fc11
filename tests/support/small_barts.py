"""Small random models of the BART family, and what transformers makes of encoder prompts."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from support.engines import open_llm, preemptions
from support.oracle import MIN_MARGIN
from support.step_log import log_steps
from support.tiny_llama import random_model

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
"""Whisper's too."""
_CONFIG = SIZES | {
    "max_position_embeddings": MAX_POSITIONS,
    "init_std": 0.4,
    "forced_eos_token_id": None,
    "decoder_start_token_id": START,
}


GROWN = {"out_proj": 3.0, "fc2": 3.0}
"""Weights that are larger, so that not only the last token decides."""
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
    share = 0.1 if family in ("MBart", "Pegasus") else 1.0  # a norm before the head

    def make() -> Any:
        model = getattr(transformers, f"{family}{head}")(fields)
        model.final_logits_bias.normal_(0.0, 0.5 * share)
        return model

    model = random_model(make, 0, 0.1, GROWN | {"positions": 3.0, "shared": share})
    if family == "Marian":
        model.final_logits_bias[0, PAD] = 3.0
        model.generation_config.bad_words_ids = [[PAD]]
    model.generation_config.forced_bos_token_id = config.get("forced_bos_token_id")
    model.save_pretrained(folder)
    return folder


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


def distance(model: Any, output: Any, **encoder: torch.Tensor) -> float:
    """Of the mean log probability of an output's tokens from that of transformers, the largest of
    all sequences. `encoder`: see `logits_after`."""
    distances = []
    for completion in output.outputs:
        ids = completion.token_ids
        logits = logits_after(model, output.prompt_token_ids, ids, **encoder)
        chosen = logits.log_softmax(1).gather(1, torch.tensor([ids]).t())
        distances.append(abs(completion.cumulative_logprob - float(chosen.sum())) / len(ids))
    return max(distances)


def serve_preempted(
    folder: Path, prompts: Sequence[Any], params: Any, mode: str, **options: Any
) -> list[Any]:
    """The outputs of a cache for few requests, where the encoder's blocks are swapped, or filled
    again: they are those of a cache for all."""
    with open_llm(folder) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    options |= {"block_size": 8, "num_device_blocks_override": 24, "preemption_mode": mode}
    with log_steps() as log, open_llm(folder, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.num_free_blocks == llm.llm_engine.num_total_blocks
    assert preemptions(outputs) > 0
    log.assert_only(mode)
    for output, other in zip(outputs, expected, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in other.outputs]
    return outputs


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
