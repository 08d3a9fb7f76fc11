"""The half of a model that sees: transformers' image processor, vision tower and projector.

They are transformers' own code. Its class of the whole model is built with a text half that has no
layers and a vocabulary of one token, so that transformers reads all tensors of the other half by
itself, whatever their names, and none of the text half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tpengine.config import ModelConfig
from tpengine.errors import ModelLoadError

_INTERFACE = "tpengine-tower"
_MOST_QUERIES = 1024
"""Of a part of a layer's attention: in large pictures a layer takes seconds."""


class VisionTower:
    """Computes the features of pictures, one after another.

    Attributes:
        num_bytes: of its weights.
        before_layer: is called before each of its layers, and of their parts in large pictures.

    Raises:
        ModelLoadError: transformers cannot load it.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        assert config.whole is not None, "the model has no other half"
        self._dtype, self._device = dtype, device
        self.before_layer: Callable[[], None] = lambda: None
        try:
            self._model, self._processor = _load(config, dtype, device)
        except Exception as error:
            fault = f"the vision tower in {config.model} cannot be loaded: {error}"
            hint = """limit_mm_per_prompt='{"image": 0}' serves text alone"""
            raise ModelLoadError(f"{fault}; {hint}") from error
        self.num_bytes = sum(p.nbytes for p in self._model.parameters())
        for module in self._model.modules():
            module.__dict__["before_part"] = self._before_part
            if not any(module.children()):
                module.register_forward_pre_hook(self._before_part)

    def _before_part(self, *_: object) -> None:
        self.before_layer()

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        """Returns a picture's features, `[num_rows, picture_row_size]`.

        Args:
            pixels: uint8 `[height, width, 3]`, RGB.
        """
        image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        form = {"return_tensors": "pt", "input_data_format": "channels_last"}
        inputs = {n: x.to(self._device) for n, x in self._processor(images=[image], **form).items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        return torch.cat([self._features_of(part) for part in _tiles(inputs)])

    def _features_of(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        output: Any = self._model.get_image_features(**inputs)
        parts = [getattr(output, "pooler_output", output)]
        parts += getattr(output, "deepstack_features", None) or []
        return torch.cat([_rows(part) for part in parts], dim=1)


def import_class(name: str) -> Any:
    """Imports transformers' class of a whole model, which takes seconds."""
    return getattr(transformers, name)


def _load(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Returns the tower and the image processor."""
    whole = transformers.AutoConfig.from_pretrained(config.model)
    text = whole.get_text_config()
    text.num_hidden_layers, text.vocab_size = 0, 1
    if getattr(text, "layer_types", None):
        text.layer_types = []
    text.pad_token_id = None
    model_class = import_class(str(config.text_half_of))
    if config.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = model_class._from_config(whole, attn_implementation=_INTERFACE, dtype=dtype)
    else:
        options = {"config": whole, "dtype": dtype, "attn_implementation": _INTERFACE}
        model = _read(model_class, config.model, options)
    processor: Any = transformers.AutoImageProcessor
    pixels = processor.from_pretrained(config.model, backend="pil")
    return model.model.eval().to(device), pixels


def _read(model_class: Any, folder: str, options: dict[str, Any]) -> Any:
    logs = transformers.utils.logging
    level, shows_progress = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()  # its report lists every tensor of the text half
    logs.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        logs.set_verbosity(level)
        if shows_progress:
            logs.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its files lack {', '.join(missing[:5])} ({len(missing)} tensors)")
    return model


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of all tokens of a picture to each other, in parts if they are many.

    Args:
        query, key, value: `[1, num_heads, num_tokens, head_dim]`; the result has
            `[1, num_tokens, num_heads, head_dim]`.
        attention_mask: `[1, 1, 1 or num_tokens, num_tokens]`; None: each sees all.
    """
    parts = list[torch.Tensor]()
    for queries in query.split(_MOST_QUERIES, dim=2):
        if parts:
            module.before_part()
        mask, start = attention_mask, sum(part.shape[1] for part in parts)
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, start : start + queries.shape[2]]
        parts.append(sdpa_attention_forward(module, queries, key, value, mask, **options)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(_INTERFACE, _attend)
AttentionMaskInterface.register(_INTERFACE, sdpa_mask)


def _tiles(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tiles of a picture, `[1, num_tiles, 3, height, width]`, one by one, as they do not see
    each other: each takes less memory and time than all. Other pictures are one."""
    if inputs["pixel_values"].ndim < 5:
        return [inputs]
    tiles = zip(*(values.split(1, dim=1) for values in inputs.values()), strict=True)
    return [dict(zip(inputs, tile, strict=True)) for tile in tiles]


def _rows(parts: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
