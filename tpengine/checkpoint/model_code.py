"""Whose code runs a model: tpengine's, transformers' or that of the model's own folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tpengine.config import OWN_CLASSES, TWO_HALVES, architecture_of, own_code
from tpengine.errors import ConfigError

_CACHED_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers of transformers whose K and V the paged cache holds."""
FALLBACK_NEEDS = (5, 4)
"""First version of transformers whose code can be used: 4 has other masks and configurations, 5.0
does not load experts, and 5.1 to 5.3 ignore GPT-2's scale of attention."""


def name_architecture(hf_config: dict[str, Any]) -> None:
    """Names the causal decoder of the `model_type` if `architectures` names none, or a class that
    does not exist, such as `LLaMAForCausalLM` of early files, and is not in a file of the model."""
    name = architecture_of(hf_config)
    if name in OWN_CLASSES or "auto_map" in hf_config:
        return
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    is_alias = name.endswith(("ForCausalLM", "LMHeadModel")) and not hasattr(transformers, name)
    if is_alias or not hf_config.get("architectures"):
        decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.get("model_type"), name)
        hf_config["architectures"] = [decoder]


def refused_code(folder: str, code: str) -> ConfigError:
    """Makes the error for Python code of a model's folder that was not allowed to run."""
    text = f"{folder} needs code of its own, {code}, which runs only with trust_remote_code"
    return ConfigError(f"{text}; read it, then set trust_remote_code=True (--trust-remote-code)")


def choose_model_impl(
    hf_config: Mapping[str, Any], folder: str, wanted: str, trust_remote_code: bool = False
) -> str:
    """Returns whose code runs a model: tpengine or transformers, also for a class of the model's
    own folder, which only the ranks import.

    Args:
        wanted: one of `MODEL_IMPLS`; auto is tpengine where it has the architecture.

    Raises:
        ConfigError: the wanted code does not run the architecture.
    """
    architecture = architecture_of(hf_config)
    refused = f"architecture {architecture!r} of {folder} is not supported"
    if wanted != "transformers" and architecture in OWN_CLASSES:
        return "tpengine"
    if wanted == "tpengine":
        known = ", ".join(sorted(OWN_CLASSES))
        raise ConfigError(f"{refused} with model_impl = 'tpengine', which has {known}; use 'auto'")
    if (code := own_code(hf_config)) and not trust_remote_code:
        raise refused_code(folder, code)
    if code is not None:
        from transformers.dynamic_module_utils import get_cached_module_file

        # Copies the code, and runs none of it. Ranks would write the same file at the same time.
        get_cached_module_file(folder, f"{code.partition('.')[0]}.py")
    if problem := _misfit(hf_config, has_code=code is not None):
        raise ConfigError(f"{refused}: {problem}; docs/models.md lists what runs")
    return "transformers"


def _misfit(hf_config: Mapping[str, Any], has_code: bool) -> str | None:
    """Returns why transformers' code cannot run a model over the paged cache, as far as its
    configuration and its class tell; None: they give no reason.

    Args:
        has_code: whether the class is in the model's folder; then only the configuration is asked.
    """
    import transformers

    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < FALLBACK_NEEDS:
        needed = "transformers' code runs from transformers {}.{}".format(*FALLBACK_NEEDS)
        return f"{needed} on, found {version}; upgrade it"
    if not has_code and (problem := _class_misfit(hf_config)):
        return problem
    if "vocab_size" not in hf_config or "num_attention_heads" not in hf_config:
        return "it has parts beside a text decoder; convert its text part to a model of its own"
    if hf_config.get("is_encoder_decoder"):
        return "it is the decoder of an encoder, whose states the cache does not hold"
    if types := set(hf_config.get("layer_types") or ()) - _CACHED_LAYERS:
        return f"it has layers of type {', '.join(sorted(types))}, which the paged cache lacks"
    return None


def _class_misfit(hf_config: Mapping[str, Any]) -> str | None:
    """The part of `_misfit` that is about a class of transformers."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture, model_type = architecture_of(hf_config), hf_config.get("model_type")
    if "whole_model" in hf_config and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"its text half is a {model_type}, which no class of tpengine or transformers runs"
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if hf_config.get("is_encoder_decoder"):
            return f"it has an encoder and a decoder; of such models {', '.join(TWO_HALVES)} run"
        lack = "neither tpengine nor the installed transformers has it as a causal decoder"
        return f"{lack}; its model_type is {model_type!r}"
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "unknown")
    if known != architecture:
        return f"transformers' causal decoder of model_type {model_type!r} is {known}"
    model_class = getattr(transformers, architecture)
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a state beside K and V, which the paged cache does not hold"
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return "its attention does not go through transformers' attention interface"
    return None
