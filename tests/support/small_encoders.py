"""Small random encoders of every family, and what transformers computes of them.

Weights are large, norms are not one and biases are not zero, so that every part matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from support.tiny_llama import INITIALIZER_RANGE, random_model

LABELS = {0: "no", 1: "perhaps", 2: "yes"}
MAX_POSITIONS = 64
_COMMON = {
    "vocab_size": 319, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": INITIALIZER_RANGE, "id2label": LABELS,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_AFTER_PADDING = {"max_position_embeddings": MAX_POSITIONS + 2, "pad_token_id": 1}
_BOTH_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
}
_GEMMA = {
    "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 14, "query_pre_attn_scalar": 50,
    "use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"],
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **_BOTH_ROPES,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_act": "gelu", "type_vocab_size": 2},
    "bert-padded-heads": {"hidden_size": 96, "num_attention_heads": 8, "hidden_act": "gelu_new"},
    "roberta": {**_AFTER_PADDING, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": MAX_POSITIONS + 6, "pad_token_id": 5},
    "camembert": _AFTER_PADDING,
    "modernbert": {"local_attention": 14, "global_attn_every_n_layers": 2, **_BOTH_ROPES},
    "modernbert-biases": {
        "local_attention": 6, "num_hidden_layers": 4, "classifier_activation": "relu",
        "norm_bias": True, "mlp_bias": True, "attention_bias": True, "classifier_bias": True,
    },
    "gemma3_text": _GEMMA,
}  # fmt: skip
"""Fields of their configurations, in addition to the common ones; a name begins with the
`model_type`."""
CLASSIFIERS = [name for name in ENCODERS if not name.startswith("gemma")]


def write_encoder(
    folder: Path, name: str, auto: Any = transformers.AutoModel, **fields: Any
) -> Any:
    """Writes a model of `ENCODERS`, without tokenizer; returns it.

    Args:
        auto: class of transformers that builds it.
        fields: of its configuration, in addition.
    """
    model_type = name.removesuffix("-biases").removesuffix("-padded-heads")
    config = transformers.AutoConfig.for_model(
        model_type, **{**_COMMON, **ENCODERS[name], **fields}
    )

    def make() -> Any:
        model = auto.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.normal_(0.0, INITIALIZER_RANGE)
        return model

    model = random_model(make)
    model.save_pretrained(folder)
    return model


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Ids without special tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(6, 319, (n,), generator=generator).tolist() for n in lengths]


def class_logits(model: Any, prompt: list[int], token_types: Any = None) -> torch.Tensor:
    """Of each class before sigmoid or softmax, `[num_labels]`."""
    types = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    with torch.inference_mode():
        return model(torch.tensor([prompt]), **types).logits[0]


def write_pair_tokenizer(folder: Path, has_types: bool) -> transformers.PreTrainedTokenizerFast:
    """Writes a tokenizer of a few words that joins two texts as BERT's does; returns it.

    Args:
        has_types: whether tokens of the second text have another type.
    """
    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "cat", "dog"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    kind = int(has_types)
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{kind} </s>:{kind}",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", model_input_names=names
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
