"""A start with weights that an earlier start has kept in a file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.messages import said
from support.models import ModelShop
from support.patches import on_call
from support.zoo import PLAIN

from tpengine import LLM, EngineArgs, SamplingParams
from tpengine.errors import ConfigError, ModelLoadError
from tpengine.worker.worker import Worker

PROMPTS = [[5, 6, 7, 8], list(range(20, 60))]


@pytest.fixture
def model(models: ModelShop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models.folder(PLAIN), tmp_path / "model"))


@pytest.fixture
def answers(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Starts an engine; returns its tokens with log probabilities, and what it said of files."""

    def answer(folder: Path | None = tmp_path / "cache", **options: Any) -> tuple[Any, str]:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        with said(caplog) as messages, LLM(str(model), weight_cache=folder, **options) as llm:
            outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        numbers = [(c.token_ids, c.logprobs) for output in outputs for c in output.outputs]
        return numbers, " ".join(m for m in messages if m.startswith("weights: "))

    return answer


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int4", "enable_lora": True, "speculative_model": "[ngram]"},
        {"tensor_parallel_size": 2, "executor": "processes", "quantization": "int8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_second_start_copies_what_the_first_has_packed(
    answers: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected, _ = answers(None, **options)
    first, is_kept = answers(**options)
    files = sorted((tmp_path / "cache").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    second, is_copied = answers(**options)
    assert first == second == expected
    size = options.get("tensor_parallel_size", 1)
    assert [file.name[-14:] for file in files] == [f"{r}-of-{size}.weights" for r in range(size)]
    assert times == [file.stat().st_mtime_ns for file in files]
    if size == 1:  # ranks in other processes speak for themselves
        assert f"kept in {files[0]} " in is_kept
        assert f"{files[0]} (" in is_copied


def change_a_value(model: Path, _: Path) -> None:
    """Its size and time stay, as those of a checkpoint that a tool writes anew."""
    (weights,) = model.glob("*.safetensors")
    stat, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(_: Path, file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5000)


def flip_a_bit(_: Path, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_a_value, "it has those of other files, options or versions"),
        (truncate, "bytes at "),
        (flip_a_bit, "it is damaged"),
        (lambda _, file: file.write_bytes(b"x" * 10000), "Expecting value"),
        (lambda _, file: file.chmod(0o666), "may be written by others (mode 100666)"),
    ],
    ids=["value", "short", "damaged", "foreign", "open"],
)
def test_a_file_that_does_not_fit_is_replaced(
    answers: Any, model: Path, tmp_path: Path, change: Callable[[Path, Path], object], reason: str
) -> None:
    answers()
    (file,) = (tmp_path / "cache").iterdir()
    file.with_suffix(".part").write_bytes(b"of a writer that was killed" * 1000)
    change(model, file)
    expected, _ = answers(None)
    numbers, messages = answers()
    assert numbers == expected
    assert f"{file} is replaced: " in messages
    assert reason in messages
    numbers, messages = answers()
    assert numbers == expected
    assert messages.startswith(f"weights: {file} (")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_folder_of_others_is_refused(answers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"weight_cache = '.*shared' cannot be used: .*mode 40777"
    ):
        answers(folder)


def test_a_full_disk_costs_the_file_alone(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected, _ = answers(None)
    monkeypatch.setattr(os, "pwritev", find_no_room)
    numbers, messages = answers()
    assert numbers == expected
    assert "cannot be written: [Errno 28] No space left on device" in messages
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_changes_while_it_is_read(
    answers: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was packed may not be what was hashed."""
    on_call(monkeypatch, Worker, "_load_model", lambda *_: change_a_value(model, tmp_path))
    _, messages = answers()
    assert "cannot be written: the model's files were changed while they were read" in messages
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_cannot_be_read(answers: Any, model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.unlink()
    weights.symlink_to("nowhere")
    with pytest.raises(ModelLoadError, match=r"cannot be read: .*model\.safetensors"):
        answers()


def test_where_nothing_is_kept(answers: Any, tmp_path: Path, capfd: Any) -> None:
    answers(tensor_parallel_size=2, executor="processes", quantization="int4")
    assert "weight_cache has no effect: several ranks choose scales" in capfd.readouterr().err
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="keeps what is packed for a CPU, the device is cuda"):
        EngineArgs(str(tmp_path / "model"), weight_cache="here").create_engine_config("cuda")
