"""What the files of a model with two halves say of the half that reads a prompt, the encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpengine.checkpoint.model_files import read_generation_config, read_json
from tpengine.checkpoint.sound_files import first_sound_ids, read_sound
from tpengine.config import TWO_HALVES, EncoderConfig, architecture_of
from tpengine.errors import ConfigError


def read_encoder(folder: str, hf_config: dict[str, Any]) -> EncoderConfig | None:
    """Returns the encoder of a model; None: it has one half, or one that tpengine does not run.
    Brings the number of layers and heads in `hf_config` to those of the decoder.

    Raises:
        ConfigError: the halves have other heads, or the files name no first token of an output.
        ModelLoadError: a file cannot be read.
    """
    name = architecture_of(hf_config)
    if name not in TWO_HALVES:
        return None
    heads = hf_config["encoder_attention_heads"], hf_config["decoder_attention_heads"]
    if heads[0] != heads[1]:
        text = f"{name} in {folder} has {heads[0]} heads in its encoder and {heads[1]} in its"
        raise ConfigError(f"{text} decoder, whose blocks they share; use a model with equal heads")
    hf_config |= {"num_hidden_layers": hf_config["decoder_layers"], "num_attention_heads": heads[1]}
    # transformers 5 leaves the second one out of a config.json.
    written = read_json(Path(folder) / "config.json")
    fields = {**hf_config, **written, **read_generation_config(folder)}
    start_token_ids: list[Any] = [fields.get("decoder_start_token_id")]
    sound = None
    if "num_mel_bins" in hf_config:
        sound = read_sound(folder, hf_config)
        start_token_ids += first_sound_ids(fields, sound)
        hf_config["max_position_embeddings"] = hf_config["max_target_positions"]
    if (forced := fields.get("forced_bos_token_id")) is not None:
        start_token_ids.append(forced)
    if not all(token_id in range(hf_config["vocab_size"]) for token_id in start_token_ids):
        text = f"decoder_start_token_id and forced_bos_token_id of {folder} are {start_token_ids}"
        raise ConfigError(f"{text}; name ids of the vocabulary in its config.json")
    return EncoderConfig(
        num_layers=hf_config["encoder_layers"],
        max_len=hf_config["max_position_embeddings" if sound is None else "max_source_positions"],
        start_token_ids=tuple(start_token_ids),
        bad_words_token_ids=tuple(map(tuple, fields.get("bad_words_ids") or ())),
        sound=sound,
    )
