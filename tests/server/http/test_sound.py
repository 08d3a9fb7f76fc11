"""Speech over HTTP is written down as by `LLM`, for the `openai` package, and errors say what to
do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.server_process import ServerProcess
from support.small_whispers import (
    BEFORE,
    ENGLISH,
    GERMAN,
    NO_TIMES,
    START,
    TRANSCRIBE,
    TRANSLATE,
    sounds,
    wav,
    write_tokenizer,
    write_whisper,
)

from server.http.openai_door import Door
from tpengine import LLM, SamplingParams
from tpengine.engine.sound_prompts import read_parts

SMALL: dict[str, Any] = {"dtype": "float32", "num_device_blocks_override": 64}
FILE = wav(sounds([12_000], seed=8)[0])
PATH = "audio/transcriptions"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_whisper(tmp_path_factory.mktemp("whisper"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(whisper: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `tpengine serve`."""
    options = ["--model", str(whisper), "--served-model-name", "none", "--http-port", "0"]
    options += ["--dtype", "float32", "--num-device-blocks-override", "64", "--swap-space", "0"]
    server = ServerProcess(*options, log=tmp_path_factory.mktemp("server") / "log")
    yield server.http_address
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def write_down(llm: LLM, token_ids: list[int]) -> str:
    prompt: Any = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": FILE}}
    params = SamplingParams(temperature=0.0, max_tokens=None)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text.strip()


def test_openai_package(whisper: Path, client: openai.OpenAI) -> None:
    create, file = client.audio.transcriptions.create, ("a.wav", FILE)
    with LLM(str(whisper), **SMALL) as llm:
        tokenizer = llm.get_tokenizer()
        english, german = (
            write_down(llm, [START, language, TRANSCRIBE, NO_TIMES])
            for language in (ENGLISH, GERMAN)
        )
        own = tokenizer.encode(" It was said: äh", add_special_tokens=False)
        begun = write_down(llm, [BEFORE, *own, START, ENGLISH, TRANSCRIBE, NO_TIMES])
        hears = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[ENGLISH, GERMAN])
        prompt: Any = {"prompt_token_ids": [START], "multi_modal_data": {"audio": FILE}}
        (heard,) = llm.generate(prompt, hears, use_tqdm=False)
        (heard_id,) = heard.outputs[0].token_ids
        translated = write_down(llm, [START, heard_id, TRANSLATE, NO_TIMES])
    assert english != german
    assert create(model="none", file=file, language="en").text == english
    assert create(model="none", file=file, language="de", temperature=0.0).text == german
    said = "It was said: äh"
    assert create(model="none", file=file, language="en", prompt=said).text == begun
    text = create(model="none", file=file, language="de", response_format="text")
    assert text == f"{german}\n"
    verbose = create(model="none", file=file, response_format="verbose_json")
    by_language = {"en": (ENGLISH, english), "de": (GERMAN, german)}
    assert by_language[verbose.language] == (heard_id, verbose.text)
    assert verbose.duration == 0.75
    assert client.audio.translations.create(model="none", file=file).text == translated
    sampled = [
        create(model="none", file=file, language="en", temperature=1.0, extra_body={"seed": seed})
        for seed in (1, 1, 2)
    ]
    assert sampled[0].text == sampled[1].text != sampled[2].text


def test_a_long_sound(whisper: Path, client: openai.OpenAI) -> None:
    """Its parts are written down one by one."""
    file = wav(sounds([40_000], seed=9)[0])
    parts = list(read_parts(file, 1.0, 3.0))
    assert len(parts) == 3
    with LLM(str(whisper), **SMALL) as llm:
        prompts: Any = [
            {"prompt_token_ids": [START, GERMAN, TRANSCRIBE, NO_TIMES]}
            | {"multi_modal_data": {"audio": (part, 16_000)}}
            for part in parts
        ]
        params = SamplingParams(temperature=0.0, max_tokens=None)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = "".join(output.outputs[0].text for output in outputs).strip()
    common = {"model": "none", "response_format": "verbose_json"}
    create: Any = partial(client.audio.transcriptions.create, **common)
    answer = create(file=("a.wav", file), language="de")
    assert (answer.text, answer.duration) == (expected, 2.5)
    alone = create(file=("a.wav", wav(parts[0])))
    assert create(file=("a.wav", file)).language == alone.language


def test_a_large_file(client: openai.OpenAI) -> None:
    """A second, in 4 MiB: the limit of bodies has room for a sound."""
    file = wav(np.zeros(480_000, np.float32), 480_000, 4, 2)
    assert len(file) == 44 + 3_840_000
    answer: Any = client.audio.transcriptions.create(model="none", file=("a.wav", file))
    assert answer.usage.seconds == 1


def form(fields: dict[str, Any], file: bytes | None = FILE) -> bytes:
    head = "--xx\r\ncontent-disposition: form-data; name="
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    if file is not None:
        parts.append(f'{head}"file"; filename="a"\r\n\r\n'.encode() + file + b"\r\n")
    return b"".join([*parts, b"--xx--\r\n"])


def test_refusals(url: str) -> None:
    door, kind = Door(url), "multipart/form-data; boundary=xx"
    long = wav(np.zeros(1_500_001, np.float32), 1_000)
    cases: list[tuple[bytes, str, str | None]] = [
        (form({"model": "none"}, long), "lasts 1500 s, longer than the 1500 s", "file"),
        (form({}, b"no sound"), "is no WAV file", "file"),
        (form({}, None), "is missing", "file"),
        (form({"file": "text"}, None), "is missing, or has no filename", "file"),
        (form({"language": "xx"}), "must be one of de, en", "language"),
        (form({"response_format": "srt"}), "json, text, verbose_json", "response_format"),
        (form({"temperature": "hot"}), "must be a number", "temperature"),
        (form({"temperature": "-1"}), "temperature", "temperature"),
        (form({"stream": "true"}), "must be false", "stream"),
        (
            form({"timestamp_granularities[]": "word"}),
            "is not a field",
            "timestamp_granularities[]",
        ),
        (form({"model": "other"}), "is not served here", "model"),
        (form({})[:-10], "has no closing boundary", None),
        (form({}).replace(b'name="file"', b"name"), "has no name", None),
        (form({"file": "a"}), "'file' twice", None),
        (form({"prompt": ""}, None).replace(b"--xx--", b"") + form({"prompt": ""}), "twice", None),
        (form({str(number): "" for number in range(64)}), "has no closing boundary", None),
        (b"", "has no closing boundary", None),
    ]
    for body, words, field in cases:
        with door.open(PATH, body, **{"content-type": kind}) as answer:
            error = json.load(answer)["error"]
        assert 400 <= answer.status < 500, words
        assert words in error["message"]
        assert error["param"] == field
    with door.open(PATH, b"{}") as answer:
        assert answer.status == 415
    for origin, status in (("https://other.example", 403), ("http://[", 403), (url, 200)):
        headers = {"content-type": kind, "origin": origin}
        with door.open(PATH, form({"language": "en"}), **headers) as answer:
            assert answer.status == status
    status, error = door.refused("completions", {"model": "none", "prompt": "a"})
    assert (status, error["code"]) == (400, "wrong_endpoint")
    assert "use /v1/audio/transcriptions or /v1/audio/translations" in error["message"]
