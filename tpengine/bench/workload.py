"""Seeded work to measure with: model shapes and mixed lengths."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MU, _SIGMA = 4.2, 0.9  # of the logarithm: a median of 67 tokens
_MIN_TOKENS, _MAX_TOKENS = 4, 512
_FIRST_ORDINARY_ID = 5

Workload = list[tuple[list[int], int]]
"""(prompt ids, number of output tokens) of each request."""


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPES = {
    "llama-124m": _llama(768, 12, 12, 4, 2048, 32000, False),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, True),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, True),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, False) | {"max_position_embeddings": 8192},
}
"""Configurations to run with dummy weights, by name."""


@contextmanager
def shape_folder(name: str, max_positions: int | None = None) -> Iterator[str]:
    """A temporary model folder with nothing but the configuration of `SHAPES[name]`, perhaps for
    another longest length."""
    config = dict(SHAPES[name])
    if max_positions is not None:
        config["max_position_embeddings"] = max_positions
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def mixed_requests(
    num_requests: int, vocab_size: int, seed: int, longest: int, run: int = 0
) -> Workload:
    """Requests of mixed lengths.

    Prompt and output lengths are lognormal (median 67, sigma 0.9, 4 to 512, and at most half of
    `longest`), ids uniform. `seed` fixes the lengths; ids differ from run to run, so that no run
    finds its prompts in the cache of the one before.
    """
    first_run, later_runs = random.Random(seed), random.Random(f"{seed}:{run}")
    cap = min(_MAX_TOKENS, longest // 2)

    def length() -> int:
        return max(_MIN_TOKENS, min(cap, int(first_run.lognormvariate(_MU, _SIGMA))))

    def ids(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(_FIRST_ORDINARY_ID, vocab_size) for _ in range(count)]

    requests = []
    for _ in range(num_requests):
        prompt = ids(first_run, length())  # drawn for every run: the lengths that follow hang on it
        requests.append((ids(later_runs, len(prompt)) if run else prompt, length()))
    return requests
