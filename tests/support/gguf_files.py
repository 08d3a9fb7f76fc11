"""Writes a folder in Hugging Face layout as a GGUF file, with the changes that llama.cpp's
converter makes; `tests/models/test_gguf_types.py` uses the converter itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file

from tpengine.config import EMBEDDED_MODEL

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""By `model_type`, where the names differ."""
_NUMBERS = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    only: Callable[[str], bool] = lambda name: True,
    further: dict[str, np.ndarray[Any, Any]] | None = None,
    arch: str | None = None,
) -> Path:
    """Writes the model in `folder` to `path`.

    Args:
        kind: type of the matrices whose rows have whole blocks; the others stay F32.
        metadata: further values by key; also replaces.
        only: which tensors, by their names in the file.
        further: tensors that are added as they are.
        arch: of the file; None: that of the model.
    """
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    model_type = config["model_type"]
    arch = arch or ARCHITECTURES.get(model_type, model_type)
    values = _metadata(config, arch, state) | (metadata or {})
    writer = GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        if value is not None:
            kind_of_value = "int32" if key.endswith("top_k") else add[type(value)]
            getattr(writer, f"add_{kind_of_value}")(key, value)
    for name, tensor in _tensors(config, arch, state).items():
        if not only(name):
            continue
        quantum = GGMLQuantizationType[kind]
        if tensor.ndim < 2 or tensor.shape[-1] % (1 if kind in ("F16", "BF16", "F32") else 32):
            quantum = GGMLQuantizationType.F32
        data = quantize(tensor, quantum)
        is_raw = quantum.name not in ("F32", "F16")
        writer.add_tensor(name, data, raw_dtype=quantum if is_raw else None)
    for name, data in (further or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_embedded_gguf(folder: Path) -> Path:
    """Writes the embedded model with its tokenizer into a file in `folder`."""
    fields = json.loads(Path(EMBEDDED_MODEL, "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    options = json.loads(Path(EMBEDDED_MODEL, "tokenizer_config.json").read_text())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.get),
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(vocabulary) - 4),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in fields["model"]["merges"]],
        "tokenizer.chat_template": options["chat_template"],
    }
    return write_gguf(Path(EMBEDDED_MODEL), folder / "embedded.gguf", metadata=metadata)


def _metadata(config: dict[str, Any], arch: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    def first(names: tuple[str, ...]) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    fields = {f"{arch}.{key}": first(names) for key, names in _NUMBERS.items()}
    fields |= {f"{arch}.{key}": first(names) for key, names in _FLOATS.items()}
    if arch == "bloom":
        fields[f"{arch}.context_length"] = fields[f"{arch}.embedding_length"]
    if fields[f"{arch}.feed_forward_length"] is None:
        fields[f"{arch}.feed_forward_length"] = 4 * fields[f"{arch}.embedding_length"]
    rope = _rope(config)
    whole = rope.get("full_attention", rope)
    fields[f"{arch}.rope.freq_base"] = whole.get("rope_theta")
    fields[f"{arch}.rope.freq_base_swa"] = rope.get("sliding_attention", {}).get("rope_theta")
    if whole.get("rope_type") in ("linear", "yarn"):
        fields[f"{arch}.rope.scaling.type"] = whole["rope_type"]
        fields[f"{arch}.rope.scaling.factor"] = whole["factor"]
        original = whole.get("original_max_position_embeddings")
        fields[f"{arch}.rope.scaling.original_context_length"] = original
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        fields[f"tokenizer.ggml.{key}_token_id"] = config.get(f"{name}_token_id")
    return fields


def _tensors(
    config: dict[str, Any], arch: str, state: dict[str, torch.Tensor]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names, arrays = get_tensor_name_map(key, layers), {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in state.items():
        tensor = tensor.float()
        before, _, after = name.partition(".experts.")
        if after:
            name = f"{before}.experts.{after.partition('.')[2]}"
        name = name.removeprefix("transformer." if arch == "bloom" else "")
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if arch in ("llama", "mistral3") and "q_proj" in name:
            tensor = _permute(tensor, heads)
        elif arch in ("llama", "mistral3") and "k_proj" in name:
            tensor = _permute(tensor, config.get("num_key_value_heads") or heads)
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        elif arch == "gpt2" and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T.contiguous()
        elif arch == "bloom" and "query_key_value" in name:
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if after:
            experts.setdefault(gguf_name, []).append(tensor)
            tensor = torch.stack(experts[gguf_name])
        arrays[gguf_name] = tensor.contiguous().numpy()
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        arrays["rope_freqs.weight"] = _llama3_factors(config, rope)
    return arrays


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {}
    old = {"rope_type": scaling.get("type"), **scaling, "rope_theta": config.get("rope_theta")}
    return config.get("rope_parameters") or old


def _permute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _llama3_factors(
    config: dict[str, Any], rope: dict[str, Any]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """How much slower than without scaling transformers rotates each pair."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config), "cpu")
    dim = 2 * len(scaled)
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    return (plain / scaled).numpy()
