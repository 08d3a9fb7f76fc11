"""The half of a model that sees: transformers' image processor, vision tower and projector.

They are transformers' own code. Its class of the whole model is built with a text half that has no
layers and a vocabulary of one token, so that transformers reads all tensors of the other half by
itself, whatever their names, and none of the text half.
"""

from __future__ import annotations

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

    Raises:
        ModelLoadError: transformers cannot load it.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        assert config.whole is not None, "the model has no other half"
        self._dtype, self._device = dtype, device
        try:
            whole = transformers.AutoConfig.from_pretrained(config.model)
            text = whole.get_text_config()
            text.num_hidden_layers, text.vocab_size = 0, 1
            if getattr(text, "layer_types", None):
                text.layer_types = []
            text.pad_token_id = None
            model_class: Any = getattr(transformers, str(config.text_half_of))
            self._model = _load(model_class, config, whole, dtype).model.eval().to(device)
            processor: Any = transformers.AutoImageProcessor
            self._processor = processor.from_pretrained(config.model, backend="pil")
        except Exception as error:
            fault = f"the vision tower in {config.model} cannot be loaded: {error}"
            hint = """limit_mm_per_prompt='{"image": 0}' serves text alone"""
            raise ModelLoadError(f"{fault}; {hint}") from error
        self.num_bytes = sum(p.nbytes for p in self._model.parameters())

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        """Returns a picture's features, `[num_rows, picture_row_size]`.

        Args:
            pixels: uint8 `[height, width, 3]`, RGB.
        """
        image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        form = {"return_tensors": "pt", "input_data_format": "channels_last"}
        inputs = {n: x.to(self._device) for n, x in self._processor(images=[image], **form).items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        output: Any = self._model.get_image_features(**inputs)
        parts = [getattr(output, "pooler_output", output)]
        parts += getattr(output, "deepstack_features", None) or []
        return torch.cat([_rows(part) for part in parts], dim=1)


def _load(model_class: Any, config: ModelConfig, whole: Any, dtype: torch.dtype) -> Any:
    if config.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return model_class(whole).to(dtype)
    logs = transformers.utils.logging
    level, shows_progress = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()  # its report lists every tensor of the text half
    logs.disable_progress_bar()
    try:
        options = {"config": whole, "dtype": dtype, "ignore_mismatched_sizes": True}
        model, report = model_class.from_pretrained(
            config.model, output_loading_info=True, **options
        )
    finally:
        logs.set_verbosity(level)
        if shows_progress:
            logs.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its files lack {', '.join(missing[:5])} ({len(missing)} tensors)")
    return model


def _rows(parts: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
