"""Which class runs which architecture, and what a configuration may ask for.

To add a model family:

1. Write one file in this folder with a class that has the methods of `CausalLM`. A relative of
   Llama subclasses `LlamaForCausalLM` and returns its `LlamaTraits`; any other decoder subclasses
   `Decoder` and builds its `DecoderLayer`s, as `gpt2.py` does.
2. Build it from `tpengine/layers`. Name parameters as the checkpoint does; sharding and loading
   then need no further code. Between the layers call
   only `tpengine.ops`, because a CPU can record decode steps of nothing else.
3. Check every field of config.json that changes the result with `require`, because a field that is
   ignored gives wrong answers without an error. `build_model` does so for the fields in `_NEUTRAL`.
   If your family supports one, name it in the class attribute `own_fields`.
4. Add one line to `ARCHITECTURES` in `config.py`, with the name that checkpoints give; of an
   `Encoder` (`encoder.py`) to `ENCODERS`.
   One in `_DEFAULTS` of `model_defaults.py` lets it start sooner.
5. Add variants to `tests/data/variants.json`; the tests against transformers then cover them.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from torch import Tensor

from tpengine.config import OWN_CLASSES, ModelConfig
from tpengine.errors import ConfigError, not_supported
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.weights import Weights
from tpengine.logger import init_logger
from tpengine.ops.attention_ops import MAX_HEAD_DIM

logger = init_logger(__name__)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts."""
_NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((None,), "clip_qkv attn_logit_softcapping final_logit_softcapping attention_multiplier"),
    ((None,), "dual_chunk_attention_config"),
    ((None, False), "is_encoder_decoder add_cross_attention use_bidirectional_attention"),
    ((None, False), "attention_sinks use_mrope"),
    ((None, True), "is_causal"),
    ((None, 0), "num_sink_tokens num_experts num_local_experts"),
    ((None, 1.0), "residual_multiplier embedding_multiplier logits_scaling logit_scale"),
)
"""Values that change nothing, and the fields that have them, which otherwise change a model's
result. A family that supports one of them names it in its class attribute `own_fields`; all others
refuse it."""


class CausalLM(Protocol):
    """What the model runner and the loader use of a model.

    Attributes:
        ignored_weights: endings of checkpoint names that are not loaded, because the model computes
            these tensors or does not use them.
        base_prefix: start of the parameter names that is absent in a checkpoint of the bare model
            (one without its output head).
        recordable: whether decode steps may be recorded: its forward pass calls only `tpengine.ops`
            and reads no number out of a tensor.
    """

    ignored_weights: tuple[str, ...]
    base_prefix: str
    recordable: bool

    def forward(
        self,
        token_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """token_ids int32 `[num_tokens]` to final hidden states `[num_wanted, hidden_size]`.

        Args:
            hidden: `[num_tokens, hidden_size]`, what the pipeline stage before returned: the sum of
                the residual; overwritten. None: this stage is the first. All but the last want all
                tokens.
        """

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """What the first layer takes, see `Decoder.embed`; called only for prompts with pictures,
        whose features replace rows of it."""

    @property
    def rotary_table(self) -> Tensor | None:
        """See `Decoder.rotary_table`; the same."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""

    def compute_outputs(self, pooled: Tensor) -> Tensor:
        """Of a model that embeds, scores or classifies by a head of its own: hidden states that
        stand for prompts, float32 `[num_rows, hidden_size]`, to `[num_rows, num_outputs]`."""


def build_model(config: ModelConfig, weights: Weights) -> CausalLM:
    """Builds the model that `config` names, its parameters allocated and declared in `weights`.

    Raises:
        ConfigError: a value in its configuration is not supported.
    """
    if config.quantization is not None and any(map(config.hf_config.get, _EXPERTS)):
        words = "quantization = %r: experts and their routers stay in %s"
        logger.info(words, config.quantization, str(weights.dtype).removeprefix("torch."))
    if config.model_impl == "transformers":
        fallback: CausalLM = import_fallback().TransformersForCausalLM(config, weights)
        return fallback
    module, name = OWN_CLASSES[config.architecture].split(":")
    family = getattr(importlib.import_module(module), name)
    for neutral, fields in _NEUTRAL:
        for field in fields.split():
            if field not in getattr(family, "own_fields", ()):
                require(config, field, None, *neutral)
    if config.head_dim > MAX_HEAD_DIM:
        raise unsupported(config, "head_dim", config.head_dim, f"up to {MAX_HEAD_DIM}")
    model: CausalLM = family(config, weights)
    return model


def import_fallback() -> Any:
    """Imports transformers, and the module that runs its models; only ranks that need it do so."""
    return importlib.import_module("tpengine.models.fallback.model")


def import_vision_tower() -> Any:
    """Imports transformers, and the module that runs vision towers; only the rank that has one does
    so."""
    return importlib.import_module("tpengine.models.vision_tower")


def require(config: ModelConfig, field: str, default: Any, *supported: Any) -> Any:
    """Returns `field` of the model's configuration; `default` if it is absent or null.

    Raises:
        ConfigError: the value is not in `supported`.
    """
    value = config.hf_config.get(field)
    if value is None:
        value = default
    if value not in supported:
        raise unsupported(config, field, value, ", ".join(repr(option) for option in supported))
    return value


def unsupported(config: ModelConfig, field: str, value: object, supported: str) -> ConfigError:
    """Makes the error for a field whose value this architecture does not support."""
    place = f"the config.json of {config.model}, which is {config.architecture},"
    return not_supported(f"{field} = {value!r} in {place}", [supported])


def check_plain_attention(config: ModelConfig) -> None:
    """Checks that heads divide the hidden size, for families without a field `head_dim`, and that
    no layer has a window.

    Raises:
        ConfigError: it is not so.
    """
    hidden_size, heads = config.hf_config["hidden_size"], config.total_num_heads
    if config.head_dim * heads != hidden_size:
        raise unsupported(config, "hidden_size", hidden_size, f"multiples of {heads} heads")
    require(config, "sliding_window", None, None)


def layer_windows(config: ModelConfig, field: str = "sliding_window") -> tuple[int | None, ...]:
    """Returns each layer's sliding window in tokens, by `layer_types`; None: it sees all tokens.

    Args:
        field: has the window.

    Raises:
        ConfigError: a layer type is not supported, or a sliding layer has no window.
    """
    types = config.hf_config.get("layer_types")
    if not isinstance(types, list) or len(types) != config.num_layers:
        raise unsupported(config, "layer_types", types, f"a list of {config.num_layers} types")
    windows: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise unsupported(config, "layer_types", kind, "full_attention, sliding_attention")
        windows.append(_window(config, field) if kind == "sliding_attention" else None)
    return tuple(windows)


def half_windows(config: ModelConfig, field: str = "sliding_window") -> tuple[int | None, ...]:
    """Returns the windows of layers whose tokens see `field` others, half of them before and half
    of them after; as `AttentionRule` counts, by the tokens before and the token itself."""
    return tuple(window and window // 2 + 1 for window in layer_windows(config, field))


def uniform_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Returns `sliding_window`, in tokens, for every layer; None: all layers see all tokens.

    Raises:
        ConfigError: `layer_types` contradicts it.
    """
    field = "sliding_window"
    window = None if config.hf_config.get(field) is None else _window(config, field)
    windows = (window,) * config.num_layers
    types = config.hf_config.get("layer_types")
    if types is not None and layer_windows(config) != windows:
        raise unsupported(
            config, "layer_types", types, "one type for all layers (MinistralForCausalLM has more)"
        )
    return windows


def _window(config: ModelConfig, field: str) -> int:
    window = config.hf_config.get(field)
    if not isinstance(window, int) or window < 1:
        raise unsupported(config, field, window, "integers from 1 for sliding layers")
    return window
