"""What a model's files leave out: fields of `config.json`, and sampling parameters.

The class of an architecture in transformers adds fields to a `config.json`. To import such a class
takes longer than to start the engine, so the fields that tpengine reads are in a table here. A
`model_type` without an entry is read through transformers: an entry saves time, and changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpengine.errors import InvalidSamplingParamsError, ModelLoadError
from tpengine.sampling_params import SamplingParams

_DECODER = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "eos_token_id": 2,
}  # fmt: skip
_LLAMA = _DECODER | {
    "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
_MISTRAL = _DECODER | {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN2 = _DECODER | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "eos_token_id": None,
}  # fmt: skip
_OPT = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
    "max_position_embeddings": 2048, "do_layer_norm_before": True,
    "_remove_final_layer_norm": False, "num_attention_heads": 12, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BERT = {
    "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "hidden_act": "gelu", "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True,
    "eos_token_id": None,
}  # fmt: skip
_ROBERTA = _BERT | {"pad_token_id": 1, "eos_token_id": 2}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "camembert": _ROBERTA,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "opt": _OPT,
    "roberta": _ROBERTA | {"vocab_size": 50265},
    "xlm-roberta": _ROBERTA,
}
"""By `model_type`: the fields that tpengine reads, with the values of the class in transformers."""
_MAY_BE_NULL = ("head_dim", "num_key_value_heads", "pad_token_id", "sliding_window")


def complete_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a `config.json` and those that its architecture adds; None: only
    transformers knows them.

    Rotary fields are brought into the form of transformers 5: `rope_parameters`, with `rope_theta`.

    Raises:
        ValueError: a field has another type than its default.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS or "auto_map" in config:
        return None
    fields = dict(config)
    if fields.get("rope_theta", 0) is None:  # transformers takes its default then
        del fields["rope_theta"]
    for name, default in _DEFAULTS[model_type].items():
        _check_type(name, fields.setdefault(name, default), default)
    if "rope_theta" in fields:
        scaling = fields.pop("rope_scaling", None) or fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {"rope_theta": fields.pop("rope_theta"), **scaling}
    _compute_fields(fields)
    return fields


def _check_type(name: str, value: object, default: object) -> None:
    if name == "eos_token_id" or (value is None and name in _MAY_BE_NULL):
        return
    accepted = (int, float) if isinstance(default, float) else (type(default),)
    if type(value) not in accepted:
        raise ValueError(f"{name} must be of the type of {default!r}, got {value!r}")


def _compute_fields(fields: dict[str, Any]) -> None:
    """Sets the fields whose defaults depend on others."""
    window = fields.get("sliding_window")
    if not fields.get("use_sliding_window", True):
        window = fields["sliding_window"] = None
    if fields["model_type"] in ("qwen2", "qwen3", "ministral") and not fields.get("layer_types"):
        first = fields.get("max_window_layers", 0)
        kinds = ["full_attention", "full_attention" if window is None else "sliding_attention"]
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = [kinds[layer >= first] for layer in layers]


_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
OWN_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
"""For a model that recommends none of `_SAMPLING`; at temperature 1.0 the answers of small models
are incoherent."""


def recommended_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that a `generation_config.json` recommends; empty if
    it recommends none. `do_sample: false` is greedy, whatever else it says."""
    names = (*_SAMPLING, "repetition_penalty")
    fields = {name: generation_config[name] for name in names if name in generation_config}
    fields["max_tokens"] = generation_config.get("max_new_tokens")
    if fields.get("top_k") == 0:
        fields["top_k"] = -1  # both keep all tokens
    if generation_config.get("do_sample") is False:
        fields["temperature"] = 0.0
    return {name: value for name, value in fields.items() if value is not None}


def sampling_defaults(
    folder: str, generation_config: Mapping[str, Any], max_tokens: int = 100
) -> tuple[dict[str, Any], str]:
    """Returns what commands and servers take for sampling parameters that the user leaves out: the
    model's recommendation, or `OWN_SAMPLING` if it has none.

    Args:
        folder: of the model, for the message.
        max_tokens: for a model that does not recommend it.

    Returns:
        Fields of `SamplingParams`, and whose they are.

    Raises:
        ModelLoadError: `SamplingParams` refuses what the model recommends.
    """
    recommended = recommended_sampling(generation_config)
    try:
        SamplingParams(**recommended)
    except InvalidSamplingParamsError as error:
        raise ModelLoadError(
            f"the sampling parameters in generation_config.json of {folder} are wrong: {error}"
        ) from error
    is_own = not generation_config.get("do_sample") and not recommended.keys() & _SAMPLING
    source = "tpengine's, the model recommends none" if is_own else "the model's"
    return {"max_tokens": max_tokens, **(OWN_SAMPLING if is_own else {}), **recommended}, source
