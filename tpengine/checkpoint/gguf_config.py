"""What a GGUF file says about its model, in the words of `config.json`.

`ARCHITECTURES` has one entry for each architecture. The fields are those of its class in
transformers, so that the families of the engine need not know which kind of file they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpengine.checkpoint.gguf_file import GGUFFile, open_gguf
from tpengine.errors import ModelLoadError, not_supported

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""By key, without the architecture before it: the usual field of `config.json`."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF, and how its converter changes tensors.

    Attributes:
        hf_class: class in transformers.
        model_type: its name in `config.json`.
        renamed: by key, fields that this class calls differently from `_FIELDS`.
        constants: fields that no file holds, because llama.cpp has them in its code.
        flags: by ending of a tensor of the first layer, the field that says whether it exists.
        permuted: whether the rows of q and k are reordered for the rotation of llama.cpp.
        norm_offset: number that is added to the weights of norms.
        transposed: endings of the tensors that are transposed.
        split_qkv: whether q, k and v of all heads follow each other where transformers has q, k and
            v of a head follow each other.
    """

    hf_class: str
    model_type: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()
    split_qkv: bool = False


_SHORT_NAMES = {
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_GPT2 = _SHORT_NAMES | {"context_length": "n_positions", "embedding_length": "n_embd"}
_CONV1D = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
_BLOOM = _SHORT_NAMES | {"context_length": "seq_length"}
_NUM_EXPERTS = {"expert_count": "num_experts"}
_ATTENTION_BIAS = {"attn_output.bias": "attention_bias"}
_EPSILON = {"attention.layer_norm_epsilon": "norm_epsilon"}
_USE_BIAS = {"attn_output.bias": "use_bias"}
_BIASES = _ATTENTION_BIAS | {"ffn_up.bias": "mlp_bias"}
ARCHITECTURES = {
    "bloom": Architecture("BloomForCausalLM", "bloom", _BLOOM, split_qkv=True),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _GPT2, transposed=_CONV1D),
    "llama": Architecture("LlamaForCausalLM", "llama", flags=_BIASES, permuted=True),
    "mixtral": Architecture("MixtralForCausalLM", "mixtral", permuted=True),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _NUM_EXPERTS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", flags=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _NUM_EXPERTS, {"norm_topk_prob": True}, _ATTENTION_BIAS
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "starcoder2", _EPSILON, flags=_USE_BIAS),
}
"""By `general.architecture`; a llama that has experts is a mixtral here."""
_TEXT_OF = {"mistral3": "llama", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""By architecture of a model that sees pictures: the one that it is for text alone. Then the
three positions of a token are equal, so that `rope.dimension_sections` changes nothing, and
`n_deepstack_layers` counts layers that add features of pictures."""
ARCHITECTURES |= {name: ARCHITECTURES[text] for name, text in _TEXT_OF.items()}

_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of the size whose queries are scaled by hidden size / heads, not by head_dim."""
_ROPE = {
    "rope.scale_linear": "factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_NO_SCALE = (1.0, 0.0)
_NEUTRAL: Mapping[tuple[Any, ...], str] = {
    (True,): "attention.causal",
    (0.0,): "attention.clamp_kqv attention.scale attention.temperature_scale "
    "rope.scaling.yarn_log_multiplier",
    _NO_SCALE: "embedding_scale residual_scale logit_scale rope.scaling.alpha expert_weights_scale "
    "expert_gating_func",
    (1.0, -1.0): "rope.scaling.yarn_ext_factor",
}
"""Values that change nothing, and the keys of llama.cpp that have them; others are refused."""
_FACTORS = {
    "any": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
"""Control tokens that end an answer. Many files name only one of theirs as the end token."""
CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_INTEGERS = ("_count", "_kv", "_length", "_window", "_id", "_k")
_MAX = 1 << 24


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the entry of a file's architecture.

    Raises:
        ConfigError: there is none.
    """
    name = file.metadata.get("general.architecture")
    if name == "llama" and "blk.0.ffn_gate_inp.weight" in file.tensors:
        name = "mixtral"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise not_supported(f"general.architecture = {name!r} of {file.path}", ARCHITECTURES)
    return ARCHITECTURES[name]


def read_config(path: str) -> dict[str, Any]:
    """Returns what the model's `config.json` would hold, without the defaults of its class.

    Raises:
        ConfigError: its architecture is not supported.
        ModelLoadError: the file is damaged, or its numbers do not fit its tensors.
    """
    file = open_gguf(path)
    architecture = architecture_of(file)
    prefix = str(file.metadata["general.architecture"])
    for neutral, names in _NEUTRAL.items():
        for name in names.split():
            value = file.metadata.get(f"{prefix}.{name}", neutral[0])
            if isinstance(value, (list, np.ndarray)) or value not in neutral:
                raise not_supported(f"{prefix}.{name} = {value!r:.80} of {path}", neutral)
    keys = (*_FIELDS, *_ROPE, "rope.dimension_count", "rope.scaling.attn_factor")
    values = _numbers(file, prefix, keys)
    _check(file, values)
    fields: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **architecture.constants,
    }
    for key, name in (_FIELDS | dict(architecture.renamed)).items():
        if key in values:
            fields[name] = values[key]
    for ending, name in architecture.flags.items():
        fields[name] = f"blk.0.{ending}" in file.tensors
    if fields.get("sliding_window") == 0:  # Phi-3's word for none
        fields["sliding_window"] = None
    hidden_size, heads = values["embedding_length"], values["attention.head_count"]
    head_dim = values.get("attention.key_length") or hidden_size // heads
    if "gemma" in architecture.model_type:
        is_27b = _GEMMA_27B.get(architecture.model_type) == values["block_count"]
        fields["query_pre_attn_scalar"] = hidden_size // heads if is_27b else head_dim
    rotated = values.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    fields["rope_scaling"] = _rope_scaling(file, values)
    tokens = _numbers(file, "tokenizer.ggml", (*_END_KEYS, "bos_token_id", "padding_token_id"))
    fields["bos_token_id"] = tokens.get("bos_token_id")
    fields["pad_token_id"] = tokens.get("padding_token_id")
    fields["eos_token_id"] = _end_token_ids(file, tokens) or None
    return fields


def read_generation_config(path: str) -> dict[str, Any]:
    """Returns what the model's `generation_config.json` would hold, from `general.sampling.*`;
    empty if the file has none of it.

    Raises:
        ModelLoadError: the file is damaged.
    """
    numbers = _numbers(open_gguf(path), "general.sampling", _SAMPLING)
    chosen = {_SAMPLING[key]: value for key, value in numbers.items()}
    return {"do_sample": True, **chosen} if chosen else {}


def _numbers(file: GGUFFile, prefix: str, keys: Iterable[str]) -> dict[str, Any]:
    names = {key: f"{prefix}.{key}" for key in keys}
    numbers = {key: file.metadata[name] for key, name in names.items() if name in file.metadata}
    for key, value in numbers.items():
        kinds = (int,) if key.endswith(_INTEGERS) else (int, float)
        least = -1 if key == "top_k" else 0
        limit = _MAX if type(value) is int else math.inf
        if type(value) not in kinds or not least <= value < limit:
            several = " (layers of different sizes are not supported)"
            raise ModelLoadError(
                f"{prefix}.{key} = {value!r:.80} in {file.path} must be one number from {least} to "
                f"{_MAX}{several if isinstance(value, (list, np.ndarray)) else ''}"
            )
    return numbers


def _check(file: GGUFFile, values: Mapping[str, Any]) -> None:
    """Checks that the tensors have the sizes that the metadata names, before memory is allocated.

    Raises:
        ModelLoadError: they do not.
    """
    needed = ("block_count", "context_length", "embedding_length", "attention.head_count")
    layers, positions, hidden_size, heads = (values.get(key, 0) for key in needed)
    size, experts = values.get("feed_forward_length", 0), values.get("expert_count", 0)
    wide = values.get("attention.key_length") or (hidden_size // heads if heads else 0)
    wanted: dict[str, tuple[int | None, ...]] = {
        "token_embd.weight": (None, hidden_size),
        "blk.0.attn_output.weight": (hidden_size, heads * wide),
    }
    if experts:
        size = values.get("expert_feed_forward_length") or size
        wanted["blk.0.ffn_down_exps.weight"] = (experts, hidden_size, size)
    else:
        wanted["blk.0.ffn_down.weight"] = (hidden_size, size)
    if "position_embd.weight" in file.tensors:
        wanted["position_embd.weight"] = (positions, hidden_size)
    rotated = values.get("rope.dimension_count", wide)
    factors = [name for name in _FACTORS.values() if name in file.tensors]
    problems = [f"{name} is not F32" for name in factors if file.tensors[name].type != "F32"]
    wanted |= dict.fromkeys(factors, (rotated // 2,))
    if factors and factors not in ([_FACTORS["any"]], [*_FACTORS.values()][1:]):
        problems.append(f"of the factors of frequencies it has {', '.join(factors)} alone")
    if not 1 <= rotated <= wide:
        problems.append(f"{rotated} dimensions of a head of {wide} are rotated")
    for name, shape in wanted.items():
        actual = file.tensors[name].shape if name in file.tensors else ()
        if actual[shape[0] is None :] != shape[shape[0] is None :]:
            problems.append(f"{name} is {list(actual)} instead of {list(shape)}")
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if not positions or layers != len(blocks):
        problems.append(f"{positions} positions, {layers} layers, tensors of {len(blocks)}")
    kv_heads = values.get("attention.head_count_kv", heads)
    if not kv_heads or heads % kv_heads:
        problems.append(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    if problems:
        raise ModelLoadError(
            f"metadata and tensors of {file.path} do not fit each other: {'; '.join(problems)}; "
            "the file is damaged, or of an old converter: convert it again"
        )


def _rope_scaling(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any] | None:
    # llama.cpp divides frequencies by these factors, whatever they come from (Llama 3.1, Phi-3).
    factors = {
        kind: file.tensors[name].rows().view(np.float32).ravel().tolist()
        for kind, name in _FACTORS.items()
        if name in file.tensors
    }
    scaling = {_ROPE[key]: values[key] for key in _ROPE if key in values}
    if "any" in factors:
        scaling |= {"short_factor": factors["any"], "long_factor": factors["any"]}
        return scaling | {"rope_type": "longrope", "attention_factor": 1.0}
    magnitude = values.get("rope.scaling.attn_factor")
    if factors:
        return scaling | {"rope_type": "longrope", "attention_factor": magnitude} | factors
    key = f"{file.metadata['general.architecture']}.rope.scaling.type"
    kind = file.metadata.get(key, "linear")  # as llama.cpp has it
    if not isinstance(kind, str) or magnitude not in (None, 1.0):
        raise ModelLoadError(
            f"{key} = {kind!r:.80} with attn_factor = {magnitude} in {file.path} is not supported: "
            "the type must be one string, and the factor 1 unless the file has long and short ones"
        )
    is_scaled = kind not in ("none", "linear") or scaling.get("factor", 0) not in _NO_SCALE
    return scaling | {"rope_type": kind} if is_scaled else None


def _end_token_ids(file: GGUFFile, token_ids: Mapping[str, Any]) -> list[int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    ids = {token_ids[key] for key in _END_KEYS if key in token_ids}
    # Older converters call `<|end|>` and `<end_of_turn>` user-defined.
    wholes = np.flatnonzero(np.isin(kinds[: len(tokens)], (CONTROL, USER_DEFINED))).tolist()
    return sorted(ids | {i for i in wholes if tokens[i] in END_TOKENS})
