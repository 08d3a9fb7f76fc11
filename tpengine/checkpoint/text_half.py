"""The configuration of the text half of a model that also reads pictures or sound.

transformers calls the class of the whole model conditional (`LlavaForConditionalGeneration`). Its
configuration has that of a causal decoder inside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpengine.errors import ConfigError

_ALONE = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""By `model_type`: text models that transformers does not run alone, and the decoder that computes
the same for text, where a token has one position on all axes."""
_BOTH_WAYS = ("paligemma",)
"""Models in which the tokens of a prompt see each other in both directions, also those of text."""
_AXES = ("mrope_section", "mrope_interleaved")
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Fields that a `config.json` has beside its text model, and that are the text model's too.
One that is null says nothing."""


def fields_of(config: Any) -> dict[str, Any]:
    """Returns all fields of a configuration of transformers, also those that its class calls
    otherwise than most (BLOOM: n_layer)."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    renamed = {name: fields.get(own) for name, own in config.attribute_map.items()}
    computed = {"num_hidden_layers": getattr(config, "num_hidden_layers", None)}
    return computed | renamed | fields


def text_half(config: Any, written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of the text model inside a model's configuration; None: the model is no
    more than one decoder.

    Its class is in `architectures`, all fields of the whole model are in `whole_model`. If no class
    runs the text model alone, `architectures` has the whole one.

    Args:
        config: configuration of transformers.
        written: the `config.json`.

    Raises:
        ConfigError: the whole model computes text otherwise than its decoder alone.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        half = config.get_text_config()
    except ValueError:  # it has several
        return None
    if half is config or config.is_encoder_decoder:
        return None
    whole = written.get("architectures") or [config.model_type]
    if config.model_type in _BOTH_WAYS:
        problem = f"architecture {whole[0]!r} is not supported"
        raise ConfigError(f"{problem}: the tokens of its prompts see each other in both directions")
    fields, model_type = fields_of(half), half.model_type
    if model_type in _ALONE:
        model_type = _ALONE[model_type]
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        rope = {key: value for key, value in rope.items() if key not in _AXES}
        fields |= {"rope_parameters": rope, "rope_scaling": None, "model_type": model_type}
        fields = fields_of(AutoConfig.for_model(**fields))
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    fields["architectures"] = whole if decoder is None else [decoder]
    fields["whole_model"] = fields_of(config) | {"architectures": whole}
    of_whole = {name: written.get(name) for name in _OF_THE_WHOLE}
    return fields | {name: value for name, value in of_whole.items() if value is not None}
