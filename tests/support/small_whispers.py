"""Small random models of the Whisper family, and what transformers makes of sounds."""

from __future__ import annotations

import functools
import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import AddedToken

from support.small_barts import GROWN, SIZES, VOCAB_SIZE
from support.tiny_llama import byte_level_tokenizer, random_model

RATE = 16_000
MAX_POSITIONS = 50
"""Of the encoder: a second of sound."""
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, BEFORE, NO_TIMES = range(311, VOCAB_SIZE)
"""The last ids, because transformers takes what follows NO_TIMES for times."""
BEGIN = [START, ENGLISH, TRANSCRIBE, NO_TIMES]
SUPPRESSED = [*range(40, 120), START, BEFORE, NO_TIMES]
NOT_FIRST = [END, *range(120, 200)]
_CONFIG = SIZES | {
    "num_mel_bins": 16,
    "max_source_positions": MAX_POSITIONS,
    "max_target_positions": 64,
    "init_std": 0.3,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
}
_GENERATION = {
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMES,
    "is_multilingual": True,
    "language": "en",
    "task": "transcribe",
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": NOT_FIRST,
}
_SPECIALS = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>",
    "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>",
)  # fmt: skip
Samples = npt.NDArray[np.float32]


def write_whisper(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """Writes a model in which biases are not zero and norms are not one; returns its folder."""
    sizes = transformers.WhisperConfig(**{**_CONFIG, **config})
    make = functools.partial(transformers.WhisperForConditionalGeneration, sizes)
    model = random_model(make, 0, 0.1, GROWN)
    fields = _GENERATION if generation is None else generation
    for name, value in {**fields, "_from_model_config": False}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    _features(sizes).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes and words for a model's ids."""
    words = [f"word{number}" for number in range(END - 259)]
    added = [AddedToken(token, special=True) for token in _SPECIALS]
    byte_level_tokenizer(words, added=added).save_pretrained(folder)


def wav(samples: Samples, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """A file of this sound, in all channels."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        whole = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i4")
        raw = whole[:, None].view(np.uint8)[:, :width] ^ (0x80 if width == 1 else 0)
        file.writeframes(np.tile(raw, channels).tobytes())
    return buffer.getvalue()


def _features(config: Any) -> Any:
    """transformers' code for features, for sounds as short as the model's."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    extractor.n_samples = 2 * config.max_source_positions * extractor.hop_length
    return extractor


@functools.cache
def transformers_whisper(folder: Path) -> Any:
    """The model in a folder, in float32."""
    kind = transformers.WhisperForConditionalGeneration
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def features_of(model: Any, samples: Samples) -> torch.Tensor:
    """float32 `[1, num_mel_bins, num_frames]`."""
    extract = _features(model.config)
    return extract(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]


def sounds(lengths: Sequence[int], seed: int) -> list[Samples]:
    """Noise of these numbers of samples, whose colour and loudness change."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        noise = rng.standard_normal(length + 64)
        echo = noise[64 - int(rng.integers(1, 64)) :][:length] * rng.uniform(-1, 1)
        swell = 0.1 + np.sin(np.arange(length) * rng.uniform(0.0002, 0.002)) ** 2
        made.append((0.1 * swell * (noise[64:] + echo)).astype(np.float32))
    return made
