"""A configuration with an unsupported field is refused with an error that names field and value."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused
from support.subjects import BY_NAME, Subjects, load
from support.tables import read_table
from support.tiny_llama import edit_json

from tpengine.errors import ConfigError, ModelLoadError


@pytest.mark.parametrize(("name", "field", "value", "words"), read_table("refused_fields"))
def test_field_is_refused(
    name: str, field: str, value: Any, words: str, subjects: Subjects, tmp_path: Path
) -> None:
    folder = shutil.copytree(subjects.folder(BY_NAME[name]), tmp_path / "model")
    load(folder)  # without the change it loads
    edit_json(folder / "config.json", lambda config: config.update({field: value}))
    # transformers may refuse a value itself, while it reads the configuration
    with refused((ConfigError, ModelLoadError), words):
        load(folder)


def test_log_says_what_8_bits_omit(subjects: Subjects, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tpengine"):
        load(subjects.folder(BY_NAME["mixtral-odd"]), quantization="int8")
    assert "quantization = 'int8': experts and their routers stay in float32" in caplog.text


def test_slow_but_exact_is_refused(subjects: Subjects, tmp_path: Path) -> None:
    folder = shutil.copytree(subjects.folder(BY_NAME["bloom-8-heads"]), tmp_path / "model")
    change = {"slow_but_exact": True, "pretraining_tp": 2}
    edit_json(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(ConfigError, match="slow_but_exact"):
        load(folder)
