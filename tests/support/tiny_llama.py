"""Small random Llamas in Hugging Face layout, in which every part of the model matters.

With the usual initializer a random model repeats one id whatever the prompt, and a comparison of
greedy ids cannot fail. These have large weights, norms that are not one, and biases that are not
zero.
"""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

INITIALIZER_RANGE = 0.2
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class TinyLlama:
    """One random model, fixed by these values.

    Attributes:
        rope: scaling without its theta; empty: none.
        old_rope_key: None writes `rope_parameters` as transformers 5 does; `type` or `rope_type`
            writes `rope_theta` and `rope_scaling` with that key, as earlier ones did.
        max_shard_size: above it the weights are cut into several files with an index.
    """

    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_size: int = 128
    intermediate_size: int = 192
    num_layers: int = 2
    vocab_size: int = 512
    max_positions: int = 640
    tied: bool = False
    bias: bool = False
    rope_theta: float = 10000.0
    rope: tuple[tuple[str, Any], ...] = ()
    old_rope_key: str | None = None
    max_shard_size: str = "1GB"
    seed: int = 0
    end_token_ids: tuple[int, ...] = field(default=(2,))

    def config(self) -> transformers.LlamaConfig:
        """The configuration as transformers wants it."""
        rope = {"rope_type": "default", **dict(self.rope), "rope_theta": self.rope_theta}
        return transformers.LlamaConfig(
            head_dim=self.head_dim,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=self.tied,
            attention_bias=self.bias,
            mlp_bias=self.bias,
            rope_parameters=rope,
            initializer_range=INITIALIZER_RANGE,
            bos_token_id=1,
            eos_token_id=list(self.end_token_ids),
            rms_norm_eps=1e-5,
        )

    def write(self, folder: Path) -> None:
        """Builds the model and writes its folder; no tokenizer."""
        model = random_model(lambda: transformers.LlamaForCausalLM(self.config()), self.seed)
        model.float().save_pretrained(folder, max_shard_size=self.max_shard_size)
        if (key := self.old_rope_key) is not None:
            edit_json(folder / "config.json", lambda config: spell_old(config, key))


def random_model(
    make: Callable[[], Any],
    seed: int = 0,
    bias_std: float = INITIALIZER_RANGE,
    scales: Mapping[str, float] | None = None,
) -> Any:
    """What `make` makes of random numbers, with biases that are not zero and norms that are not
    one; tables of sines stay.

    Args:
        scales: by what weights are multiplied whose names have such a part.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, bias_std)
            elif "norm" in name.lower() or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.requires_grad:
                own = (scale for part, scale in (scales or {}).items() if part in name)
                parameter.mul_(math.prod(own))
    return model


def spell_old(config: dict[str, Any], key: str) -> None:
    """Writes the rope fields as transformers 4 did, the kind under `key`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["transformers_version"] = "4.44.0"


def edit_json(path: Path, change: Any) -> None:
    """Lets `change` edit the object in a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2))


def byte_level_backend(
    words: Sequence[str],
    merges: Sequence[tuple[str, str]] = (),
    specials: Sequence[str] = ("<pad>", "<s>", "</s>"),
    added: Sequence[AddedToken] = (),
) -> Tokenizer:
    """Byte-level BPE. Its first ids are the special tokens; then come the 256 bytes, the words, and
    the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet, *words])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.add_tokens(list(added))
    return backend


def byte_level_tokenizer(*words: Any, **options: Any) -> transformers.PreTrainedTokenizerFast:
    """With the backend of `byte_level_backend`."""
    backend = byte_level_backend(*words, **options)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def write_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer with two-letter words up to `vocab_size`, and a chat template."""
    specials = ["<pad>", "<s>", "</s>", "<|user|>"]
    pairs = itertools.product(string.ascii_lowercase, repeat=2)
    merges = list(itertools.islice(pairs, vocab_size - len(specials) - 256))
    tokenizer = byte_level_tokenizer(["".join(pair) for pair in merges], merges, specials)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|user|>' + m['role'] + ':' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
