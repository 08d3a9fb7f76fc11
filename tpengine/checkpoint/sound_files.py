"""What the files of a model say of the sound that its encoder reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpengine.checkpoint.model_files import read_generation_config, read_json, read_processor
from tpengine.config import FRAME_SAMPLES, FRAME_STEP, SAMPLING_RATE, SoundConfig
from tpengine.errors import ConfigError

_FEATURES = {
    "sampling_rate": SAMPLING_RATE, "n_fft": FRAME_SAMPLES, "hop_length": FRAME_STEP, "dither": 0.0,
}  # fmt: skip
"""How all models of the family prepare a sound; `engine.log_mel` does it so."""


def read_sound(folder: str, hf_config: Mapping[str, Any]) -> SoundConfig:
    """Reads what an encoder of sound needs.

    Raises:
        ConfigError: its features are computed otherwise than `engine.log_mel` does.
        ModelLoadError: a file is not valid JSON.
    """
    prepared = read_processor(folder, "feature_extractor") or {}
    for field, value in {**_FEATURES, "feature_size": hf_config["num_mel_bins"]}.items():
        if prepared.get(field, value) != value:
            text = f"{field} = {prepared[field]!r} of the features of {folder} is not supported"
            raise ConfigError(f"{text}; only {value} is, as of Whisper's own models")
    # As in transformers: where there is a generation_config.json, it alone counts.
    fields = read_generation_config(folder) or read_json(Path(folder) / "config.json")
    languages = fields.get("lang_to_id") or {}
    suppressed, first = (
        tuple(i for i in fields.get(name) or () if i in range(hf_config["vocab_size"]))
        for name in ("suppress_tokens", "begin_suppress_tokens")
    )
    return SoundConfig(
        num_mel_bins=hf_config["num_mel_bins"],
        num_frames=2 * hf_config["max_source_positions"],
        languages={name.strip("<|>"): token_id for name, token_id in languages.items()},
        tasks=dict(fields.get("task_to_id") or {}),
        suppressed=suppressed,
        suppressed_first=first,
    )


def first_sound_ids(fields: Mapping[str, Any], sound: SoundConfig) -> list[Any]:
    """Returns what follows the first id of a decoder's prompt: the language, English unless the
    files name another, the task, and that no times are written; as far as the model has them.

    Args:
        fields: of `config.json` and `generation_config.json`.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    language = str(fields.get("language")).lower()
    language = TO_LANGUAGE_CODE.get(language, language).strip("<|>")
    forced = dict(fields.get("forced_decoder_ids") or ())  # older files; by position
    language_id = sound.languages.get(language) or forced.get(1) or sound.languages.get("en")
    task_id = sound.tasks.get(str(fields.get("task"))) or forced.get(2)
    task_id = task_id or sound.tasks.get("transcribe")
    ids = [language_id, task_id, fields.get("no_timestamps_token_id")]
    # A model of one language may name the last one at the first one's place.
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
