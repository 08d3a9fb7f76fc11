"""What a GGUF file says about its model, in the words of `config.json`.

`ARCHITECTURES` has one entry for each architecture. The fields are those of its class in
transformers, so that the families of the engine need not know which kind of file they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpengine.errors import ConfigError, ModelLoadError
from tpengine.gguf_file import GGUFFile, open_gguf

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


_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_CONV1D = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
_BLOOM = {
    "context_length": "seq_length",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_NUM_EXPERTS = {"expert_count": "num_experts"}
_ATTENTION_BIAS = {"attn_output.bias": "attention_bias"}
ARCHITECTURES = {
    "bloom": Architecture("BloomForCausalLM", "bloom", _BLOOM, split_qkv=True),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _GPT2, transposed=_CONV1D),
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        flags=_ATTENTION_BIAS | {"ffn_up.bias": "mlp_bias"},
        permuted=True,
    ),
    "mixtral": Architecture("MixtralForCausalLM", "mixtral", permuted=True),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _NUM_EXPERTS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", flags=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _NUM_EXPERTS,
        constants={"norm_topk_prob": True},
        flags=_ATTENTION_BIAS,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon"},
        flags={"attn_output.bias": "use_bias"},
    ),
}
"""By `general.architecture`; a llama that has experts is a mixtral here."""

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the size whose queries are scaled by hidden size / heads, not by head_dim."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
}
"""Control tokens that end an answer: many files name one of them as their end, and mean more."""
CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_MAX_POSITIONS = 1 << 24


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the entry of a file's architecture.

    Raises:
        ConfigError: there is none.
    """
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture = {name!r} of {file.path} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_config(path: str) -> dict[str, Any]:
    """Returns what the model's `config.json` would hold, without the defaults of its class.

    Raises:
        ConfigError: its architecture is not supported.
        ModelLoadError: the file is damaged, or its numbers do not fit its tensors.
    """
    file = open_gguf(path)
    architecture = architecture_of(file)
    values = _Values(file)
    fields: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        **architecture.constants,
    }
    for key, name in (_FIELDS | dict(architecture.renamed)).items():
        if (value := values.get(key)) is not None:
            fields[name] = value
    for ending, name in architecture.flags.items():
        fields[name] = f"blk.0.{ending}" in file.tensors
    _check(values)
    fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields["sliding_window"] = fields.get("sliding_window") or None  # phi3: 0 is none
    head_dim = values.head_dim()
    if "gemma" in architecture.model_type:
        hidden_size, heads = fields["hidden_size"], fields["num_attention_heads"]
        is_27b = _GEMMA_27B.get(values.prefix) == fields["num_hidden_layers"]
        fields["query_pre_attn_scalar"] = hidden_size // heads if is_27b else head_dim
    rotated = values.get("rope.dimension_count")
    if rotated is not None and rotated != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    if (scaling := _rope_scaling(values)) is not None:
        fields["rope_scaling"] = scaling
    for name in ("bos", "pad"):
        key = "padding" if name == "pad" else name
        fields[f"{name}_token_id"] = values.get(f"{key}_token_id", "tokenizer.ggml")
    fields["eos_token_id"] = sorted(_end_token_ids(values)) or None
    return fields


def read_generation_config(path: str) -> dict[str, Any]:
    """Returns what the model's `generation_config.json` would hold.

    Without `general.sampling.*` in the file, the temperature is 0.7 and top_p 0.9.

    Raises:
        ModelLoadError: the file is damaged.
    """
    values = _Values(open_gguf(path))
    found = {
        name: value
        for key, name in _SAMPLING.items()
        if (value := values.get(key, "general.sampling")) is not None
    }
    return {"do_sample": True, **(found or {"temperature": 0.7, "top_p": 0.9})}


class _Values:
    """The numbers of a file's metadata, by key without the architecture before it."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def get(self, key: str, prefix: str | None = None) -> Any:
        """Returns a number; None: the file has none.

        Raises:
            ModelLoadError: the value is no number, or is less than 0.
        """
        name = f"{prefix or self.prefix}.{key}"
        value = self.file.metadata.get(name)
        if value is None or (type(value) in (int, float) and math.isfinite(value) and value >= 0):
            return value
        raise ModelLoadError(
            f"{name} = {value!r} in {self.file.path} is not one number of at least 0; models whose "
            "layers differ in size are not supported"
        )

    def need(self, key: str) -> int:
        """Returns an integer above 0.

        Raises:
            ModelLoadError: there is none.
        """
        value = self.get(key)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"{self.prefix}.{key} = {value!r} in {self.file.path} must be an integer above 0; "
                "the file was not converted completely"
            )
        return value

    def head_dim(self) -> int:
        """Number of elements of one head."""
        whole = self.need("embedding_length") // self.need("attention.head_count")
        return int(self.get("attention.key_length") or whole)

    def floats(self, name: str) -> list[float] | None:
        """Values of a small tensor in float32; None: the file has none."""
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.type != "F32":
            return None
        return [float(value) for value in tensor.rows().view(np.float32).ravel()]


def _check(values: _Values) -> None:
    """Checks that the tensors have the sizes that the metadata names, before memory is allocated.

    Raises:
        ModelLoadError: they do not.
    """
    tensors, path = values.file.tensors, values.file.path
    layers, hidden_size = values.need("block_count"), values.need("embedding_length")
    heads = values.need("attention.head_count")
    kv_heads = values.get("attention.head_count_kv")
    experts = values.get("expert_count")
    wanted: dict[str, tuple[int | None, ...]] = {
        "token_embd.weight": (None, hidden_size),
        "blk.0.attn_output.weight": (hidden_size, heads * values.head_dim()),
    }
    if experts:
        size = values.get("expert_feed_forward_length") or values.need("feed_forward_length")
        wanted["blk.0.ffn_down_exps.weight"] = (experts, hidden_size, size)
    else:
        wanted["blk.0.ffn_down.weight"] = (hidden_size, values.need("feed_forward_length"))
    if "position_embd.weight" in tensors:
        wanted["position_embd.weight"] = (values.need("context_length"), hidden_size)
    for name, shape in wanted.items():
        found = tensors[name].shape if name in tensors else ()
        sizes_fit = all(want in (None, size) for want, size in zip(shape, found, strict=False))
        if len(found) != len(shape) or not sizes_fit:
            raise ModelLoadError(
                f"{name} in {path} is {list(found)}, and its metadata asks for {list(shape)}; the "
                "file is damaged, or was made for another program"
            )
    num_found = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if layers != num_found:
        raise ModelLoadError(f"{path} has tensors of {num_found} layers, and names {layers}")
    if kv_heads is not None and not 1 <= kv_heads <= heads:
        raise ModelLoadError(f"{path} names {kv_heads} key and value heads for {heads} heads")
    if values.need("context_length") > _MAX_POSITIONS:
        raise ModelLoadError(f"{path} names {values.need('context_length')} positions")


def _rope_scaling(values: _Values) -> dict[str, Any] | None:
    # llama.cpp divides frequencies by these factors, whatever they come from (Llama 3.1, Phi-3).
    short = values.floats("rope_freqs.weight") or values.floats("rope_factors_short.weight")
    original = values.get("rope.scaling.original_context_length")
    if short is not None:
        long = values.floats("rope_factors_long.weight")
        factor = values.get("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long or short,
            "attention_factor": factor if long else 1.0,
            "original_max_position_embeddings": original or values.need("context_length"),
        }
    kind = values.file.metadata.get(f"{values.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    found = {
        "rope_type": kind,
        "factor": values.get("rope.scaling.factor"),
        "original_max_position_embeddings": original,
        "attention_factor": values.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _end_token_ids(values: _Values) -> set[int]:
    ids = {values.get(key, "tokenizer.ggml") for key in _END_KEYS} - {None}
    tokens = values.file.metadata.get("tokenizer.ggml.tokens", [])
    kinds = values.file.metadata.get("tokenizer.ggml.token_type", ())
    if isinstance(tokens, list) and len(tokens) == len(kinds):
        ids.update(
            int(i) for i in np.flatnonzero(np.asarray(kinds) == CONTROL) if tokens[i] in _END_TOKENS
        )
    return ids
