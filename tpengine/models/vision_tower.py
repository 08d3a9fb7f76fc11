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

from tpengine.config import ModelConfig
from tpengine.errors import ModelLoadError


class VisionTower:
    """Computes the features of pictures, one after another.

    Attributes:
        num_bytes: of its weights.
        before_layer: is called before each of its layers.

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
            if not any(module.children()):
                module.register_forward_pre_hook(lambda *_: self.before_layer())

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
            model = model_class(whole).to(dtype)
    else:
        model = _read(model_class, config.model, {"config": whole, "dtype": dtype})
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


def _tiles(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tiles of a picture, `[1, num_tiles, 3, height, width]`, one by one, as they do not see
    each other: each takes less memory and time than all. Other pictures are one."""
    if inputs["pixel_values"].ndim < 5:
        return [inputs]
    tiles = zip(*(values.split(1, dim=1) for values in inputs.values()), strict=True)
    return [dict(zip(inputs, tile, strict=True)) for tile in tiles]


def _rows(parts: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
